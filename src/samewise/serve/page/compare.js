// Asks the same question again beside other requests and compares the answers bit by bit.

import { call, events } from "./api.js";
import { firstDifference, ofFloats, ofIds } from "./digest.js";
import { announce, make, number, plural } from "./dom.js";
import { ask, newAnswer } from "./request.js";

const NUM_OTHERS = 8;
const TOPICS = [
  "The lighthouse keeper wrote in the log:", "Dear committee, concerning the bridge,", "Once there was a fox who",
  "To bake bread without an oven,", "def quicksort(items):\n", "In the year of the great frost, people",
  "The three laws of motion say that", "Shopping list: apples, flour,", "A haiku about machines:\n",
  "The train to the coast leaves at", "Minutes of the meeting, item one:", "Stars are born when",
];

// Keeps other requests running until aborted. One body holds them all, since browsers open six connections at most.
async function runOthers(others, signal) {
  for (let round = 0; !signal.aborted; round++) {
    const prompts = Array.from({ length: NUM_OTHERS }, (_, i) => {
      const topic = TOPICS[(i + 5 * round) % TOPICS.length];
      return `${topic} ${"and so on ".repeat((i * 7 + round) % 11)}`;
    });
    const body = { prompt: prompts, max_tokens: 96, temperature: 1, seed: round, share: false, stream: true, return_token_ids: true };
    try {
      for await (const event of events(await call("v1/completions", { body, signal }))) {
        for (const choice of event.choices ?? []) others.tokens += choice.token_ids?.length ?? 0;
        others.onBegun?.();
      }
    } catch (error) {
      if (signal.aborted) return;
      others.problem = error.message;
      others.onBegun?.();
      return;
    }
  }
}

export async function askUnderLoad(first, panel) {
  const stop = new AbortController();
  const others = { tokens: 0, problem: null };
  const cells = make("div", { class: "cells", "aria-hidden": "true" });
  const line = make("p", { class: "verdict" }, `Asking again, with ${NUM_OTHERS} others at the same time …`);
  panel.replaceChildren(line, cells);
  announce(`Asking again, with ${NUM_OTHERS} others at the same time.`);
  const begun = new Promise((resolve) => { others.onBegun = resolve; });
  const running = runOthers(others, stop.signal);
  try {
    await Promise.race([begun, running]);
    const again = newAnswer(first.request);
    await ask(first.request, { answer: again, onBurst: (answer) => addCells(cells, first, answer) });
    const difference = firstDifference(first, again);
    panel.replaceChildren(verdict(first, again, difference), ...problemNote(others), cells, table(first, again, others));
    panel.dataset.same = String(difference === null);
    announce(panel.querySelector(".verdict").textContent);
  } catch (error) {
    line.textContent = `It could not be asked again: ${error.message}`;
    line.classList.add("bad");
    announce(line.textContent);
  } finally {
    stop.abort();
    await running;
  }
}

function addCells(cells, first, answer) {
  for (let i = cells.childElementCount; i < answer.ids.length; i++) {
    const same = first.ids[i] === answer.ids[i] && Object.is(first.logprobs[i], answer.logprobs[i]);
    cells.append(make("i", { class: same ? "equal" : "other" }, same ? "=" : "≠"));
  }
}

function verdict(first, again, difference) {
  if (difference === null) {
    const words = `${plural(again.ids.length, "token")} and every bit of ${again.ids.length === 1 ? "its log-probability" : "their log-probabilities"}.`;
    return make("p", { class: "verdict good" }, make("strong", {}, "✓ Same."), ` ${words}`);
  }
  const why = first.request.verify === false
    ? "It was asked for without verification: ordinary decoding, whose bits depend on the company."
    : first.fingerprint !== again.fingerprint ? "The server has another contract now."
      : "This must not happen: please keep the receipt and report it.";
  return make("p", { class: "verdict bad" }, make("strong", {}, "≠ Different"),
    ` from token ${difference.at + 1} on (its ${difference.what}). ${why}`);
}

function problemNote(others) {
  return others.problem ? [make("p", { class: "bad" }, `But it had no company: ${others.problem}`)] : [];
}

function table(first, again, others) {
  const row = (name, one, other, code) => make("tr", {}, make("th", { scope: "row" }, name),
    ...[one, other].map((value) => make("td", {}, code ? make("code", { title: `SHA-256 ${value}` }, value.slice(0, 12)) : value)));
  const seconds = (answer) => `${number((answer.ended - answer.began) / 1000, 1)} s`;
  const company = others.problem ? "none" : `${NUM_OTHERS} others, ${plural(others.tokens, "token")}`;
  return make("div", { class: "scroll" }, make("table", {},
    make("caption", { class: "visually-hidden" }, "The two answers compared"),
    make("thead", {}, make("tr", {}, make("td"), make("th", { scope: "col" }, "first"), make("th", { scope: "col" }, "in the crowd"))),
    make("tbody", {},
      row("digest of token ids", ofIds(first.ids), ofIds(again.ids), true),
      row("digest of the bits", ofFloats(first.logprobs), ofFloats(again.logprobs), true),
      row("company", "not recorded", company),
      row("time", seconds(first), seconds(again)))));
}
