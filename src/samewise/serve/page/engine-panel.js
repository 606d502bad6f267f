// The engine panel: shows the snapshots of the live feed.

import { $, announce, make, number, plural } from "./dom.js";
import { describe, Strip } from "./frame-strip.js";
import { TreeStrip } from "./tree-strip.js";

const rates = [];
let strip;
let trees;
let contract = null;

export function begin() {
  strip = new Strip($("strip"), (frame, announced) => {
    $("frame-readout").textContent = describe(frame);
    if (announced) $("frame-announcement").textContent = `Frame ${frame.number}: ${describe(frame)}`;
  });
  trees = new TreeStrip($("trees"));
  new ResizeObserver(showRowShares).observe($("strip"));
  $("copy-contract").hidden = !navigator.clipboard;
  $("copy-contract").addEventListener("click", async () => {
    await navigator.clipboard.writeText(contract);
    announce("Contract copied.");
  });
}

export function show(snapshot) {
  showStatus(snapshot.running ? "busy" : "idle", loadText(snapshot));
  strip.add(snapshot.frames ?? []);
  showRowShares();
  showTrees((snapshot.frames ?? []).flatMap((frame) => frame.drafts ?? []));
  showSpeed(snapshot.tokens_per_second ?? 0);
  showProposers(snapshot.proposers ?? {});
  if (snapshot.timeline) showTimeline(snapshot.timeline);
  if (snapshot.contract !== contract) showContract(snapshot.contract);
  if (snapshot.facts) showFacts(snapshot.facts);
}

export function showLost(message) {
  showStatus("lost", message);
}

function showStatus(state, text) {
  $("status").dataset.state = state;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

function loadText({ running, waiting }) {
  if (!running && !waiting) return "idle";
  return `${number(running)} running${waiting ? `, ${number(waiting)} waiting` : ""}`;
}

// Shares of rows by kind, over the visible frames.
function showRowShares() {
  const shown = strip.frames.slice(-strip.numVisible);
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

function showTrees(drafts) {
  if (!drafts.length) return;
  $("trees-card").hidden = false;
  trees.add(drafts);
  const { nodes, depth } = trees.means();
  $("trees-readout").textContent = `${number(nodes, 1)} guesses → ${number(depth, 1)} deep`;
  $("trees").setAttribute("aria-label", `The last ${plural(trees.drafts.length, "draft")}: ${number(nodes, 1)} guesses and an accepted depth of ${number(depth, 1)} on average`);
}

function showSpeed(rate) {
  rates.push(rate);
  rates.splice(0, rates.length - 120);
  $("rate").textContent = number(rate, rate > 0 && rate < 10 ? 1 : 0);
  const canvas = $("spark");
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const top = Math.max(1, ...rates);
  const x = (i) => width - (rates.length - 1 - i) * width / 119;
  const y = (value) => height - 1.5 - value / top * (height - 4);
  context.beginPath();
  rates.forEach((value, i) => context.lineTo(x(i), y(value)));
  context.strokeStyle = style.getPropertyValue("--accent");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(x(0), height);
  context.globalAlpha = 0.12;
  context.fillStyle = style.getPropertyValue("--accent");
  context.fill();
}

function showProposers(proposers) {
  const rows = Object.entries(proposers).filter(([name, one]) => name !== "none" || one.tokens_per_second || Object.keys(proposers).length === 1);
  if (!rows.length) return;
  $("proposers").replaceChildren(...rows.map(([name, one]) => make("tr", {},
    make("th", { scope: "row" }, name === "none" ? "no guess" : name),
    make("td", { class: "num" }, one.nodes === null ? "–" : number(one.nodes, 1)),
    make("td", {}, one.depth === null ? "–" : make("span", { class: "meter", title: `${number(one.accepted)} of ${number(one.guessed)} guesses accepted` },
      make("b", {}, number(one.depth, 2)), histogram(one.depths))),
    make("td", { class: "num" }, number(one.tokens_per_second ?? 0, 1)))));
}

const DEPTHS = 9; // bars of a histogram: depths 0 to 7, and 8 or more

// How many drafts were accepted to which depth, the most frequent as high as the line.
function histogram(depths) {
  const counts = depths.slice(0, DEPTHS - 1);
  while (counts.length < DEPTHS - 1) counts.push(0);
  counts.push(depths.slice(DEPTHS - 1).reduce((a, b) => a + b, 0));
  const most = Math.max(1, ...counts);
  return make("span", { class: "histogram", "aria-hidden": "true" }, ...counts.map((count) => {
    const element = make("i");
    element.style.height = `${Math.round(100 * count / most)}%`;
    return element;
  }));
}

const WORDS = { accumulate: "gathering context", optimise: "searching layers", accelerate: "accelerating" };
const MARKS = { accumulate: "▤", optimise: "◇", accelerate: "»" };

function showTimeline(events) {
  $("timeline-card").hidden = events.length === 0;
  if (!events.length) return;
  const last = events.at(-1);
  $("timeline-readout").textContent = WORDS[last.event] ?? last.event;
  const first = events[0].tokens;
  const end = Math.max(last.tokens + 1, first + 1);
  $("track").replaceChildren(...events.map((one, i) => {
    const segment = make("i", { "data-event": one.event, title: sentence(one) }, MARKS[one.event] ?? "·");
    segment.style.flexGrow = String(Math.max(0.02, ((events[i + 1]?.tokens ?? end) - one.tokens) / (end - first)));
    return segment;
  }));
  $("events").replaceChildren(...events.slice(-5).reverse().map((one) => make("li", {}, sentence(one))));
}

// The event, the expected speed, and the sublayers that are skipped.
function sentence(one) {
  const parts = [`${MARKS[one.event] ?? "·"} ${WORDS[one.event] ?? one.event} at ${plural(one.tokens, "token")}`];
  if (one.rate) parts.push(`${Math.round(100 * one.rate)}% right`);
  if (one.score) parts.push(`${number(one.score, 1)} tokens/s promised`);
  for (const [kind, layers] of Object.entries(one.set ?? {})) {
    if (layers.length) parts.push(`without ${kind === "mlp" ? "MLP" : kind} ${layers.join(" ")}`);
  }
  return parts.join(", ");
}

function showContract(id) {
  contract = id;
  $("contract").textContent = id ?? "–";
  $("copy-contract").disabled = !id;
}

function showFacts(facts) {
  $("facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}
