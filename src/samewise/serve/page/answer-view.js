// The view of an answer: its text with drafted tokens marked, its counts, and its buttons.

import { make, number, plural } from "./dom.js";
import { summarize } from "./request.js";

export function newView(actions) {
  const text = make("div", { class: "text" });
  const counts = make("p", { class: "counts" });
  const rows = make("tbody");
  const table = make("table", {},
    make("caption", { class: "visually-hidden" }, "Every burst of this answer"),
    make("thead", {}, make("tr", {}, ...["burst", "guessed", "accepted", "rolled back"]
      .map((name, i) => make("th", { scope: "col", class: i ? "num" : undefined }, name)))), rows);
  const bursts = make("details", { class: "bursts", hidden: true },
    make("summary", {}, "Burst by burst"), make("div", { class: "scroll" }, table));
  const buttons = make("div", { class: "actions", hidden: true }, ...actions);
  const comparison = make("div", { class: "comparison" });
  const root = make("article", { class: "turn answer busy", "aria-busy": "true" },
    make("h3", { class: "visually-hidden" }, "Answer"), text, counts, buttons, bursts, comparison);
  return { root, text, counts, rows, bursts, buttons, comparison };
}

export function addBurst(view, answer, burst) {
  view.text.append(...burstElements(burst));
  showCounts(view, answer);
}

export function finish(view, answer, reason) {
  view.root.classList.remove("busy");
  view.root.removeAttribute("aria-busy");
  showCounts(view, answer, reason);
  view.rows.replaceChildren(...answer.bursts.map(burstRow));
  view.bursts.hidden = answer.bursts.length === 0;
  view.buttons.hidden = answer.ids.length === 0;
}

// A burst's text: accepted drafts underlined, the target model's token plain, then the number of rejected ones.
function burstElements(burst) {
  const rejected = burst.guessed - burst.accepted;
  const title = burst.guessed
    ? `guessed ${burst.guessed}, accepted ${burst.accepted}, rolled back ${rejected}` : "no guess: the replay’s own token";
  const parts = [];
  const complete = burst.tokens.map((token) => token.text).join("") === burst.text;
  const accepted = complete ? burst.tokens.slice(0, burst.accepted).map((token) => token.text).join("") : burst.text;
  if (burst.accepted && accepted) parts.push(make("span", { class: "accepted" }, accepted));
  if (!burst.accepted) parts.push(burst.text);
  else if (complete && accepted.length < burst.text.length) parts.push(burst.text.slice(accepted.length));
  const elements = [make("span", { class: "burst", title }, ...parts)];
  if (rejected) elements.push(make("span", { class: "rejected", title, "aria-hidden": "true" }, `↺${rejected}`));
  return elements;
}

function burstRow(burst) {
  const rejected = burst.guessed - burst.accepted;
  return make("tr", {},
    make("td", { class: "piece" }, burst.text || "(part of a character)"),
    make("td", { class: "num" }, burst.guessed ? String(burst.guessed) : "–"),
    make("td", { class: "num good" }, burst.guessed ? `✓ ${burst.accepted}` : "–"),
    make("td", { class: "num bad" }, rejected ? `↺ ${rejected}` : "–"));
}

const REASONS = { length: "reached its longest", stop: null, abort: "stopped" };

function showCounts(view, answer, reason) {
  const summary = summarize(answer);
  const parts = [[plural(summary.tokens, "token"), ` in ${plural(summary.bursts, "burst")}`]];
  if (summary.guessed) {
    parts.push([`${number(summary.guessed)} guessed`]);
    parts.push([make("span", { class: "good" }, `✓ ${number(summary.accepted)} accepted`)]);
    parts.push([make("span", { class: summary.rejected ? "bad" : undefined }, `↺ ${number(summary.rejected)} rolled back`)]);
  } else if (summary.tokens) parts.push(["nothing guessed"]);
  if (summary.rate !== null) parts.push([`${number(summary.rate, summary.rate < 10 ? 1 : 0)} tokens/s`]);
  if (answer.seed !== null) parts.push([`seed ${answer.seed}`]);
  const ended = reason ?? REASONS[answer.finish];
  if (ended) parts.push([ended]);
  if (answer.request.verify === false) parts.push([make("span", { class: "bad" }, "not verified")]);
  view.counts.replaceChildren(...parts.map((part) => make("span", { class: "part" }, ...part)));
}
