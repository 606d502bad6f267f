// The conversation: a question goes out, an answer comes in, and the next question knows of both.

import { addBurst, finish, newView } from "./answer.js";
import { ask, newAnswer, tally } from "./ask.js";
import { $, make, plural, say } from "./dom.js";
import { askInCrowd } from "./same.js";

let turns = []; // {role, content}, as the server wants them
let running = null; // the AbortController of the answer under way

export function begin() {
  const form = $("ask");
  const field = $("question");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(field.value);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(field.value);
  });
  field.addEventListener("input", () => fit(field));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("fresh").addEventListener("click", fresh);
  $("marks").addEventListener("change", () => document.body.classList.toggle("unmarked", !$("marks").checked));
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => send(example.textContent));
  }
}

function fit(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 200)}px`;
}

function fresh() {
  running?.abort();
  turns = [];
  $("turns").replaceChildren(welcome);
  $("fresh").hidden = true;
  $("question").focus();
}

const welcome = $("welcome");

function request(messages) {
  const body = { messages, max_tokens: numberIn("max-tokens") ?? 256 };
  const temperature = numberIn("temperature");
  const seed = numberIn("seed");
  if (temperature !== null) body.temperature = temperature;
  if (seed !== null) body.seed = seed;
  if (!$("verify").checked) body.verify = false;
  return body;
}

function numberIn(id) {
  const text = $(id).value.trim();
  return text === "" ? null : Number(text);
}

async function send(text) {
  const content = text.trim();
  if (!content || running) return;
  const field = $("question");
  field.value = "";
  fit(field);
  welcome.remove();
  $("turns").append(make("article", { class: "turn question" }, make("h3", { class: "unseen" }, "Question"), make("p", {}, content)));
  const answer = newAnswer(request([...turns, { role: "user", content }]));
  const view = newView(actions(answer, () => view));
  $("turns").append(view.root);
  toEnd();
  say("Answering.");
  await stream(answer, view);
  if (answer.text) turns = [...answer.request.messages, { role: "assistant", content: answer.text }];
  rest(field);
}

async function stream(answer, view) {
  running = new AbortController();
  busy(true);
  let why;
  try {
    await ask(answer.request, {
      answer, signal: running.signal,
      told: (_, burst) => {
        const follow = nearEnd();
        addBurst(view, answer, burst);
        if (follow) toEnd();
      },
    });
  } catch (error) {
    why = error.name === "AbortError" ? "stopped" : "broke off";
    if (error.name !== "AbortError") {
      view.below.append(make("p", { class: "problem", role: "alert" }, `No answer: ${error.message}`));
    }
  }
  answer.ended ??= performance.now();
  running = null;
  busy(false);
  finish(view, answer, why);
  if (why) view.root.querySelector(".again").dataset.partial = "";
  quiet(false);
  receiptReady(view, answer);
  toEnd();
  const found = tally(answer);
  if (answer.text) {
    const guesses = found.guessed ? ` ${found.guessed} guessed, ${found.accepted} accepted, ${found.back} rolled back.` : "";
    say(`${answer.text} — ${plural(found.tokens, "token")}.${guesses}`);
  }
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("fresh").hidden = on;
  quiet(on);
}

// While something is being asked nothing else is asked again. A part of an answer cannot be compared.
function quiet(on) {
  for (const button of document.querySelectorAll(".again")) button.disabled = on || "partial" in button.dataset;
}

// Focus is put where it is useful only when it would otherwise be nowhere.
function rest(place) {
  if (!document.activeElement || document.activeElement === document.body) place.focus({ preventScroll: true });
}

function actions(answer, view) {
  const again = make("button", { type: "button", class: "again" }, "Ask again in a crowd");
  again.addEventListener("click", async () => {
    quiet(true);
    await askInCrowd(answer, view().below);
    quiet(false);
    view().below.scrollIntoView({ block: "nearest" });
    rest(again);
  });
  const receipt = make("button", { type: "button", class: "receipt", disabled: true, title: "this server gives no receipts" }, "Download receipt");
  receipt.addEventListener("click", () => download(answer));
  const copy = make("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(answer.text);
    say("Copied.");
  });
  return [again, receipt, ...(navigator.clipboard ? [copy] : [])];
}

function receiptReady(view, answer) {
  if (!answer.receipt) return;
  const button = view.root.querySelector(".receipt");
  button.disabled = false;
  button.title = "check it later with: samewise audit receipt.json";
}

function download(answer) {
  const data = JSON.stringify(answer.receipt, null, 2);
  const url = URL.createObjectURL(new Blob([data], { type: "application/json" }));
  const name = String(answer.receipt.digest ?? "answer").split(":").pop().slice(0, 12);
  const link = make("a", { href: url, download: `receipt-${name}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  say("Receipt downloaded.");
}

function nearEnd() {
  const list = $("turns");
  return list.scrollHeight - list.scrollTop - list.clientHeight < 120;
}

function toEnd() {
  const list = $("turns");
  list.scrollTop = list.scrollHeight;
}
