// The engine's panel: numbers from the live feed, put where they belong.

import { $, make, number, plural, say } from "./dom.js";
import { describe, Strip } from "./strip.js";

const rates = [];
let strip;
let contract = null;

export function begin() {
  strip = new Strip($("strip"), (frame, aloud) => {
    $("frame-readout").textContent = describe(frame);
    if (aloud) $("frame-said").textContent = `Frame ${frame.number}: ${describe(frame)}`;
  });
  new ResizeObserver(key).observe($("strip"));
  $("copy-contract").hidden = !navigator.clipboard;
  $("copy-contract").addEventListener("click", async () => {
    await navigator.clipboard.writeText(contract);
    say("Contract copied.");
  });
}

export function show(snapshot) {
  status(snapshot.running ? "busy" : "idle", load(snapshot));
  strip.add(snapshot.frames ?? []);
  key();
  speed(snapshot.tokens_per_second ?? 0);
  proposers(snapshot.proposers ?? {});
  if (snapshot.timeline) timeline(snapshot.timeline);
  if (snapshot.contract !== contract) showContract(snapshot.contract);
  if (snapshot.facts) facts(snapshot.facts);
}

export function lost(message) {
  status("lost", message);
}

function status(state, text) {
  $("status").dataset.state = state;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

function load({ running, waiting }) {
  if (!running && !waiting) return "idle";
  return `${number(running)} running${waiting ? `, ${number(waiting)} waiting` : ""}`;
}

// Whose the rows were, over the frames in sight.
function key() {
  const shown = strip.frames.slice(-strip.fitting);
  const total = { prompt: 0, known: 0, guess: 0, padding: 0 };
  for (const frame of shown) for (const kind of Object.keys(total)) total[kind] += frame[kind];
  const all = Object.values(total).reduce((a, b) => a + b, 0);
  const committed = shown.reduce((sum, frame) => sum + frame.committed, 0);
  $("yield").textContent = shown.length ? `${number(committed / shown.length, 1)} tokens per frame` : "";
  const share = (kind) => (all ? `${Math.round(100 * total[kind] / all)}%` : "–");
  for (const item of $("key").children) item.querySelector("b").textContent = share(item.dataset.kind);
  $("strip").setAttribute("aria-label", all
    ? `The last ${plural(shown.length, "frame")}: rows used by prompts ${share("prompt")}, known tokens ${share("known")}, guesses ${share("guess")}, padding ${share("padding")}`
    : "No frames yet");
}

function speed(rate) {
  rates.push(rate);
  rates.splice(0, rates.length - 120);
  $("rate").textContent = number(rate, rate > 0 && rate < 10 ? 1 : 0);
  const canvas = $("spark");
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const top = Math.max(1, ...rates);
  const x = (i) => width - (rates.length - 1 - i) * width / 119;
  const y = (value) => height - 1.5 - value / top * (height - 4);
  pen.beginPath();
  rates.forEach((value, i) => pen.lineTo(x(i), y(value)));
  pen.strokeStyle = style.getPropertyValue("--accent");
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(0), height);
  pen.globalAlpha = 0.12;
  pen.fillStyle = style.getPropertyValue("--accent");
  pen.fill();
}

function proposers(found) {
  const rows = Object.entries(found).filter(([name, one]) => name !== "none" || one.tokens_per_second || Object.keys(found).length === 1);
  if (!rows.length) return;
  $("proposers").replaceChildren(...rows.map(([name, one]) => make("tr", {},
    make("th", { scope: "row" }, name === "none" ? "no guess" : name),
    make("td", {}, one.rate === null ? "–" : make("span", { class: "meter" }, bar(one.rate),
      make("b", {}, `${Math.round(100 * one.rate)}%`), make("small", {}, `${number(one.accepted)} of ${number(one.guessed)}`))),
    make("td", { class: "num" }, number(one.tokens_per_second ?? 0, 1)))));
}

function bar(rate) {
  const made = make("span", { class: "bar", "aria-hidden": "true" }, make("i"));
  made.firstChild.style.width = `${Math.round(100 * rate)}%`;
  return made;
}

const WORDS = { accumulate: "gathering context", optimise: "searching layers", accelerate: "accelerating" };
const MARKS = { accumulate: "▤", optimise: "◇", accelerate: "»" };

function timeline(events) {
  $("timeline-card").hidden = events.length === 0;
  if (!events.length) return;
  const last = events.at(-1);
  $("timeline-readout").textContent = WORDS[last.event] ?? last.event;
  const first = events[0].tokens;
  const end = Math.max(last.tokens + 1, first + 1);
  $("track").replaceChildren(...events.map((one, i) => {
    const made = make("i", { "data-event": one.event, title: sentence(one) }, MARKS[one.event] ?? "·");
    made.style.flexGrow = String(Math.max(0.02, ((events[i + 1]?.tokens ?? end) - one.tokens) / (end - first)));
    return made;
  }));
  $("events").replaceChildren(...events.slice(-5).reverse().map((one) => make("li", {}, sentence(one))));
}

// What happened, what the set promises, and which sublayers it leaves out.
function sentence(one) {
  const said = [`${MARKS[one.event] ?? "·"} ${WORDS[one.event] ?? one.event} at ${plural(one.tokens, "token")}`];
  if (one.rate) said.push(`${Math.round(100 * one.rate)}% right`);
  if (one.score) said.push(`${number(one.score, 1)} tokens/s promised`);
  for (const [kind, layers] of Object.entries(one.set ?? {})) {
    if (layers.length) said.push(`without ${kind === "mlp" ? "MLP" : kind} ${layers.join(" ")}`);
  }
  return said.join(", ");
}

function showContract(id) {
  contract = id;
  $("contract").textContent = id ?? "–";
  $("copy-contract").disabled = !id;
}

function facts(found) {
  $("facts").replaceChildren(...Object.entries(found).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}
