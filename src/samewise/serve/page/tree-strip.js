// The strip of draft trees: one bar per draft, its guesses above a line and the length of the accepted path below.

const WIDTH = 5;
const GAP = 2;
const MAX_DRAFTS = 400;

export class TreeStrip {
  constructor(canvas) {
    this.canvas = canvas;
    this.drafts = []; // [guesses, accepted depth]
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  add(drafts) {
    this.drafts = [...this.drafts, ...drafts].slice(-MAX_DRAFTS);
    this.draw();
  }

  // Of all drafts that are kept.
  means() {
    const mean = (at) => this.drafts.reduce((sum, draft) => sum + draft[at], 0) / Math.max(1, this.drafts.length);
    return { nodes: mean(0), depth: mean(1) };
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
    const shown = this.drafts.slice(-Math.max(1, Math.floor(width / (WIDTH + GAP))));
    const mostNodes = Math.max(8, ...shown.map(([nodes]) => nodes));
    const deepest = Math.max(4, ...shown.map(([, depth]) => depth));
    const base = Math.round(height * 0.6);
    const left = width - shown.length * (WIDTH + GAP) + GAP;
    shown.forEach(([nodes, depth], i) => {
      const x = left + i * (WIDTH + GAP);
      const up = nodes / mostNodes * (base - 4);
      context.fillStyle = colour("guess-fill");
      context.fillRect(x, base - 1 - up, WIDTH, up);
      context.strokeStyle = colour("guess");
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, base - 0.5 - up, WIDTH - 1, Math.max(0, up - 1));
      context.fillStyle = colour("known");
      if (depth) context.fillRect(x, base + 2, WIDTH, Math.max(1.5, depth / deepest * (height - base - 4)));
    });
    context.fillStyle = colour("line-strong");
    context.fillRect(0, base, width, 1);
    context.font = `11px ${style.fontFamily}`;
    label(context, colour, `${mostNodes} guesses`, 11);
    label(context, colour, `${deepest} deep`, height - 3);
  }
}

function label(context, colour, text, y) {
  context.fillStyle = colour("card");
  context.fillRect(0, y - 11, context.measureText(text).width + 6, 15);
  context.fillStyle = colour("ink-soft");
  context.fillText(text, 0, y);
}
