// An answer on the page: its text with what was guessed in it, what it took, and what can be done with it.

import { tally } from "./ask.js";
import { make, number, plural } from "./dom.js";

export function newView(acts) {
  const text = make("div", { class: "text" });
  const tallied = make("p", { class: "tally" });
  const rows = make("tbody");
  const table = make("table", {},
    make("caption", { class: "unseen" }, "Every burst of this answer"),
    make("thead", {}, make("tr", {}, ...["burst", "guessed", "accepted", "rolled back"]
      .map((name, i) => make("th", { scope: "col", class: i ? "num" : undefined }, name)))), rows);
  const bursts = make("details", { class: "bursts", hidden: true },
    make("summary", {}, "Burst by burst"), make("div", { class: "scroll" }, table));
  const buttons = make("div", { class: "acts", hidden: true }, ...acts);
  const below = make("div", { class: "compared" });
  const root = make("article", { class: "turn answer busy", "aria-busy": "true" },
    make("h3", { class: "unseen" }, "Answer"), text, tallied, buttons, bursts, below);
  return { root, text, tallied, rows, bursts, buttons, below };
}

export function addBurst(view, answer, burst) {
  view.text.append(...shown(burst));
  showTally(view, answer);
}

export function finish(view, answer, why) {
  view.root.classList.remove("busy");
  view.root.removeAttribute("aria-busy");
  showTally(view, answer, why);
  view.rows.replaceChildren(...answer.bursts.map(row));
  view.bursts.hidden = answer.bursts.length === 0;
  view.buttons.hidden = answer.ids.length === 0;
}

// A burst's text: guesses that were accepted underlined, then the replay's own, then what was rolled back.
function shown(burst) {
  const back = burst.guessed - burst.accepted;
  const title = burst.guessed
    ? `guessed ${burst.guessed}, accepted ${burst.accepted}, rolled back ${back}` : "no guess: the replay’s own token";
  const parts = [];
  const whole = burst.tokens.map((token) => token.text).join("") === burst.text;
  const kept = whole ? burst.tokens.slice(0, burst.accepted).map((token) => token.text).join("") : burst.text;
  if (burst.accepted && kept) parts.push(make("span", { class: "kept" }, kept));
  if (!burst.accepted) parts.push(burst.text);
  else if (whole && kept.length < burst.text.length) parts.push(burst.text.slice(kept.length));
  const made = [make("span", { class: "burst", title }, ...parts)];
  if (back) made.push(make("span", { class: "back", title, "aria-hidden": "true" }, `↺${back}`));
  return made;
}

function row(burst) {
  const back = burst.guessed - burst.accepted;
  return make("tr", {},
    make("td", { class: "piece" }, burst.text || "(part of a character)"),
    make("td", { class: "num" }, burst.guessed ? String(burst.guessed) : "–"),
    make("td", { class: "num good" }, burst.guessed ? `✓ ${burst.accepted}` : "–"),
    make("td", { class: "num bad" }, back ? `↺ ${back}` : "–"));
}

const REASONS = { length: "reached its longest", stop: null, abort: "stopped" };

function showTally(view, answer, why) {
  const found = tally(answer);
  const parts = [[plural(found.tokens, "token"), ` in ${plural(found.bursts, "burst")}`]];
  if (found.guessed) {
    parts.push([`${number(found.guessed)} guessed`]);
    parts.push([make("span", { class: "good" }, `✓ ${number(found.accepted)} accepted`)]);
    parts.push([make("span", { class: found.back ? "bad" : undefined }, `↺ ${number(found.back)} rolled back`)]);
  } else if (found.tokens) parts.push(["nothing guessed"]);
  if (found.rate !== null) parts.push([`${number(found.rate, found.rate < 10 ? 1 : 0)} tokens/s`]);
  if (answer.seed !== null) parts.push([`seed ${answer.seed}`]);
  const ended = why ?? REASONS[answer.finish];
  if (ended) parts.push([ended]);
  if (answer.request.verify === false) parts.push([make("span", { class: "bad" }, "not verified")]);
  view.tallied.replaceChildren(...parts.map((part) => make("span", { class: "part" }, ...part)));
}
