// The conversation: sends questions, shows answers, and keeps both for the next request.

import { addBurst, finish, newView } from "./answer-view.js";
import { askUnderLoad } from "./compare.js";
import { $, announce, make, plural } from "./dom.js";
import { ask, newAnswer, summarize } from "./request.js";

let messages = []; // {role, content}, as the server takes them
let running = null; // the AbortController of the current answer

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
  field.addEventListener("input", () => resize(field));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new-conversation").addEventListener("click", startOver);
  $("marks").addEventListener("change", () => document.body.classList.toggle("unmarked", !$("marks").checked));
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => send(example.textContent));
  }
}

function resize(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 200)}px`;
}

function startOver() {
  running?.abort();
  messages = [];
  $("turns").replaceChildren(welcome);
  $("new-conversation").hidden = true;
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
  resize(field);
  welcome.remove();
  $("turns").append(make("article", { class: "turn question" }, make("h3", { class: "visually-hidden" }, "Question"), make("p", {}, content)));
  const answer = newAnswer(request([...messages, { role: "user", content }]));
  const view = newView(actions(answer, () => view));
  $("turns").append(view.root);
  scrollToEnd();
  announce("Answering.");
  await stream(answer, view);
  if (answer.text) messages = [...answer.request.messages, { role: "assistant", content: answer.text }];
  restoreFocus(field);
}

async function stream(answer, view) {
  running = new AbortController();
  setBusy(true);
  let reason;
  try {
    await ask(answer.request, {
      answer, signal: running.signal,
      onBurst: (_, burst) => {
        const follow = nearEnd();
        addBurst(view, answer, burst);
        if (follow) scrollToEnd();
      },
    });
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "broke off";
    if (error.name !== "AbortError") {
      view.comparison.append(make("p", { class: "problem", role: "alert" }, `No answer: ${error.message}`));
    }
  }
  answer.ended ??= performance.now();
  running = null;
  setBusy(false);
  finish(view, answer, reason);
  if (reason) view.root.querySelector(".ask-again").dataset.partial = "";
  disableAskAgain(false);
  enableReceipt(view, answer);
  scrollToEnd();
  const summary = summarize(answer);
  if (answer.text) {
    const guesses = summary.guessed ? ` ${summary.guessed} guessed, ${summary.accepted} accepted, ${summary.rejected} rolled back.` : "";
    announce(`${answer.text} — ${plural(summary.tokens, "token")}.${guesses}`);
  }
}

function setBusy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("new-conversation").hidden = on;
  disableAskAgain(on);
}

// No comparison starts during a request, and an incomplete answer cannot be compared.
function disableAskAgain(on) {
  for (const button of document.querySelectorAll(".ask-again")) button.disabled = on || "partial" in button.dataset;
}

// Moves the focus only if no element has it.
function restoreFocus(element) {
  if (!document.activeElement || document.activeElement === document.body) element.focus({ preventScroll: true });
}

function actions(answer, view) {
  const again = make("button", { type: "button", class: "ask-again" }, "Ask again in a crowd");
  again.addEventListener("click", async () => {
    disableAskAgain(true);
    await askUnderLoad(answer, view().comparison);
    disableAskAgain(false);
    view().comparison.scrollIntoView({ block: "nearest" });
    restoreFocus(again);
  });
  const receipt = make("button", { type: "button", class: "receipt", disabled: true, title: "this server gives no receipts" }, "Download receipt");
  receipt.addEventListener("click", () => download(answer));
  const copy = make("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(answer.text);
    announce("Copied.");
  });
  return [again, receipt, ...(navigator.clipboard ? [copy] : [])];
}

function enableReceipt(view, answer) {
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
  announce("Receipt downloaded.");
}

function nearEnd() {
  const list = $("turns");
  return list.scrollHeight - list.scrollTop - list.clientHeight < 120;
}

function scrollToEnd() {
  const list = $("turns");
  list.scrollTop = list.scrollHeight;
}
