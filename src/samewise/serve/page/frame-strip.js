// The strip of frames: one bar per frame, with its rows by kind above a line and its tokens below.

const KINDS = ["known", "prompt", "guess", "padding"];
const WIDTH = 5;
const GAP = 2;
const MAX_FRAMES = 400;

export class Strip {
  constructor(canvas, onSelect) {
    this.canvas = canvas;
    this.frames = [];
    this.cursor = null; // the number of the frame selected by keyboard or pointer
    this.onSelect = onSelect;
    canvas.addEventListener("keydown", (event) => this.step(event));
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.select(null));
    canvas.addEventListener("blur", () => this.select(null));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  add(frames) {
    const last = this.frames.at(-1);
    if (last && frames.length && frames[0].number <= last.number) this.frames = []; // the server was restarted
    this.frames = [...this.frames, ...frames].slice(-MAX_FRAMES);
    this.draw();
    if (this.cursor === null) this.onSelect(this.frames.at(-1), false);
  }

  get numVisible() {
    return Math.max(1, Math.floor((this.canvas.clientWidth || 320) / (WIDTH + GAP))); // 320: while the canvas is not visible
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || !this.frames.length) return;
    event.preventDefault();
    const shown = this.frames.slice(-this.numVisible);
    const at = shown.findIndex((frame) => frame.number === this.cursor);
    const next = at < 0 ? shown.length - 1 : Math.max(0, Math.min(shown.length - 1, at + by));
    this.select(shown[next], true);
  }

  point(event) {
    const shown = this.frames.slice(-this.numVisible);
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    this.select(shown[Math.floor((x - this.left(shown.length)) / (WIDTH + GAP))] ?? null);
  }

  select(frame, announced = false) {
    this.cursor = frame?.number ?? null;
    this.draw();
    this.onSelect(frame ?? this.frames.at(-1), announced);
  }

  left(count) {
    return this.canvas.clientWidth - count * (WIDTH + GAP) + GAP;
  }

  draw() {
    const { canvas } = this;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const shown = this.frames.slice(-this.numVisible);
    const rows = Math.max(8, ...shown.map((f) => f.prompt + f.known + f.guess + f.padding));
    const tokens = Math.max(4, ...shown.map((f) => f.committed));
    const base = Math.round(height * 0.74);
    shown.forEach((frame, i) => {
      const x = this.left(shown.length) + i * (WIDTH + GAP);
      let y = base - 2;
      for (const kind of KINDS) {
        const rowHeight = frame[kind] / rows * (base - 6);
        if (rowHeight <= 0) continue;
        fill(context, kind, colour, x, y - rowHeight, rowHeight);
        y -= rowHeight;
      }
      const tokenHeight = frame.committed / tokens * (height - base - 6);
      context.fillStyle = colour("ink-soft");
      if (tokenHeight) context.fillRect(x, base + 3, WIDTH, Math.max(1.5, tokenHeight));
      if (frame.number === this.cursor) {
        context.strokeStyle = colour("ink");
        context.lineWidth = 1.5;
        context.strokeRect(x - 1, 1, WIDTH + 2, height - 2);
      }
    });
    context.fillStyle = colour("line-strong");
    context.fillRect(0, base, width, 1);
    if (!shown.length) return;
    context.font = `11px ${style.fontFamily}`;
    const label = `${rows} rows`;
    context.fillStyle = colour("card");
    context.fillRect(0, 0, context.measureText(label).width + 6, 15);
    context.fillStyle = colour("ink-soft");
    context.fillText(label, 0, 11);
  }
}

// Patterns as well as colours: prompts solid, known tokens darker, guesses hatched, padding an outline.
function fill(context, kind, colour, x, y, height) {
  if (kind === "padding") {
    context.strokeStyle = colour("line-strong");
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, WIDTH - 1, Math.max(0, height - 1));
    return;
  }
  context.fillStyle = colour(kind === "guess" ? "guess-fill" : kind);
  context.fillRect(x, y, WIDTH, height);
  if (kind !== "guess") return;
  context.save();
  context.beginPath();
  context.rect(x, y, WIDTH, height);
  context.clip();
  context.strokeStyle = colour("guess");
  context.lineWidth = 1.5;
  context.beginPath();
  for (let at = y - WIDTH; at < y + height + WIDTH; at += 4) {
    context.moveTo(x, at + WIDTH);
    context.lineTo(x + WIDTH, at);
  }
  context.stroke();
  context.restore();
}

export function describe(frame) {
  if (!frame) return "none yet";
  const parts = [["prompt", "prompt"], ["known", "known"], ["guess", frame.guess === 1 ? "guess" : "guesses"], ["padding", "padding"]]
    .filter(([kind]) => frame[kind]).map(([kind, word]) => `${frame[kind]} ${word}`);
  return `${parts.join(" + ") || "no rows"} → ${frame.committed} ${frame.committed === 1 ? "token" : "tokens"}`;
}
