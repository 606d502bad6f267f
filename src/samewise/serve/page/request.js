// Sends a chat request and records its answer: text, token ids, log-probabilities, bursts.

import { call, events, Problem } from "./api.js";

let receipts = true; // false once the server has refused to return receipts

export function newAnswer(request) {
  return {
    request, text: "", bursts: [], ids: [], logprobs: [], finish: null, seed: null,
    fingerprint: null, receipt: null, began: performance.now(), first: null, ended: null,
  };
}

// Streams an answer; calls onBurst(answer, burst) for every burst of final tokens.
export async function ask(request, { onBurst = () => {}, signal, answer = newAnswer(request) } = {}) {
  const response = await open(request, signal);
  for await (const event of events(response)) {
    if (event.error) throw new Problem(event.error.message ?? "the answer broke off", 0, event.error.param);
    answer.fingerprint = event.system_fingerprint ?? answer.fingerprint;
    answer.receipt = event.receipt ?? answer.receipt;
    const choice = event.choices?.[0];
    if (!choice) continue;
    const burst = burstOf(choice, event);
    if (burst.tokens.length || burst.text) {
      answer.first ??= performance.now();
      record(answer, burst);
      onBurst(answer, burst);
    }
    answer.finish = choice.finish_reason ?? answer.finish;
    answer.seed = choice.seed ?? answer.seed;
  }
  answer.ended = performance.now();
  return answer;
}

async function open(request, signal) {
  const body = {
    ...request, stream: true, explain: true, logprobs: true, return_token_ids: true,
    ...(receipts ? { receipt: true } : {}),
  };
  try {
    return await call("v1/chat/completions", { body, signal });
  } catch (error) {
    if (!receipts || error.param !== "receipt") throw error;
    receipts = false;
    return open(request, signal);
  }
}

// A chunk as a burst: the first `accepted` tokens were drafted, the last one is the target model's own.
function burstOf(choice, event) {
  const draft = choice.samewise ?? event.samewise ?? {};
  const ids = choice.token_ids ?? [];
  const entries = choice.logprobs?.content ?? [];
  const tokens = entries.map((entry, i) => ({ text: entry.token, id: ids[i], logprob: entry.logprob }));
  const guessed = draft.guessed ?? 0;
  const said = choice.delta?.content ?? ""; // the answer, without the reasoning that is shown before it
  const text = choice.delta?.reasoning ?? said;
  return { text, said, tokens, guessed, accepted: Math.min(draft.accepted ?? 0, guessed) };
}

function record(answer, burst) {
  answer.text += burst.said;
  answer.bursts.push(burst);
  for (const token of burst.tokens) {
    answer.ids.push(token.id);
    answer.logprobs.push(token.logprob);
  }
}

export function summarize(answer) {
  const sum = (name) => answer.bursts.reduce((total, burst) => total + burst[name], 0);
  const guessed = sum("guessed");
  const accepted = sum("accepted");
  const seconds = ((answer.ended ?? performance.now()) - (answer.first ?? answer.began)) / 1000;
  return {
    tokens: answer.ids.length, bursts: answer.bursts.length, guessed, accepted, rejected: guessed - accepted,
    rate: seconds > 0 && answer.ids.length > 1 ? (answer.ids.length - 1) / seconds : null,
    wait: answer.first === null ? null : (answer.first - answer.began) / 1000,
  };
}
