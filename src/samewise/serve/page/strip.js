// The strip of frames: a bar for each, its rows above a line by who used them, its tokens below.

const KINDS = ["known", "prompt", "guess", "padding"];
const WIDTH = 5;
const GAP = 2;
const KEPT = 400;

export class Strip {
  constructor(canvas, read) {
    this.canvas = canvas;
    this.frames = [];
    this.cursor = null; // the frame being read by keyboard or pointer, by number
    this.read = read;
    canvas.addEventListener("keydown", (event) => this.step(event));
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  add(frames) {
    const last = this.frames.at(-1);
    if (last && frames.length && frames[0].number <= last.number) this.frames = []; // another server
    this.frames = [...this.frames, ...frames].slice(-KEPT);
    this.draw();
    if (this.cursor === null) this.read(this.frames.at(-1), false);
  }

  get fitting() {
    return Math.max(1, Math.floor((this.canvas.clientWidth || 320) / (WIDTH + GAP))); // also where it is not in sight
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || !this.frames.length) return;
    event.preventDefault();
    const shown = this.frames.slice(-this.fitting);
    const at = shown.findIndex((frame) => frame.number === this.cursor);
    const next = at < 0 ? shown.length - 1 : Math.max(0, Math.min(shown.length - 1, at + by));
    this.choose(shown[next], true);
  }

  point(event) {
    const shown = this.frames.slice(-this.fitting);
    const x = event.clientX - this.canvas.getBoundingClientRect().left;
    this.choose(shown[Math.floor((x - this.left(shown.length)) / (WIDTH + GAP))] ?? null);
  }

  choose(frame, aloud = false) {
    this.cursor = frame?.number ?? null;
    this.draw();
    this.read(frame ?? this.frames.at(-1), aloud);
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
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const shown = this.frames.slice(-this.fitting);
    const rows = Math.max(8, ...shown.map((f) => f.prompt + f.known + f.guess + f.padding));
    const tokens = Math.max(4, ...shown.map((f) => f.committed));
    const base = Math.round(height * 0.74);
    shown.forEach((frame, i) => {
      const x = this.left(shown.length) + i * (WIDTH + GAP);
      let y = base - 2;
      for (const kind of KINDS) {
        const tall = frame[kind] / rows * (base - 6);
        if (tall <= 0) continue;
        fill(pen, kind, colour, x, y - tall, tall);
        y -= tall;
      }
      const deep = frame.committed / tokens * (height - base - 6);
      pen.fillStyle = colour("ink-soft");
      if (deep) pen.fillRect(x, base + 3, WIDTH, Math.max(1.5, deep));
      if (frame.number === this.cursor) {
        pen.strokeStyle = colour("ink");
        pen.lineWidth = 1.5;
        pen.strokeRect(x - 1, 1, WIDTH + 2, height - 2);
      }
    });
    pen.fillStyle = colour("line-strong");
    pen.fillRect(0, base, width, 1);
    if (!shown.length) return;
    pen.font = `11px ${style.fontFamily}`;
    const label = `${rows} rows`;
    pen.fillStyle = colour("card");
    pen.fillRect(0, 0, pen.measureText(label).width + 6, 15);
    pen.fillStyle = colour("ink-soft");
    pen.fillText(label, 0, 11);
  }
}

// Marks as well as colours: prompts solid, known tokens darker, guesses hatched, padding an empty outline.
function fill(pen, kind, colour, x, y, tall) {
  if (kind === "padding") {
    pen.strokeStyle = colour("line-strong");
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, WIDTH - 1, Math.max(0, tall - 1));
    return;
  }
  pen.fillStyle = colour(kind === "guess" ? "guess-fill" : kind);
  pen.fillRect(x, y, WIDTH, tall);
  if (kind !== "guess") return;
  pen.save();
  pen.beginPath();
  pen.rect(x, y, WIDTH, tall);
  pen.clip();
  pen.strokeStyle = colour("guess");
  pen.lineWidth = 1.5;
  pen.beginPath();
  for (let at = y - WIDTH; at < y + tall + WIDTH; at += 4) {
    pen.moveTo(x, at + WIDTH);
    pen.lineTo(x + WIDTH, at);
  }
  pen.stroke();
  pen.restore();
}

export function describe(frame) {
  if (!frame) return "none yet";
  const parts = [["prompt", "prompt"], ["known", "known"], ["guess", frame.guess === 1 ? "guess" : "guesses"], ["padding", "padding"]]
    .filter(([kind]) => frame[kind]).map(([kind, word]) => `${frame[kind]} ${word}`);
  return `${parts.join(" + ") || "no rows"} → ${frame.committed} ${frame.committed === 1 ? "token" : "tokens"}`;
}
