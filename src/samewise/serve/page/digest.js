// SHA-256 of token ids and of the bits of log-probabilities. By hand, because the browser's own is only
// there for https and localhost, and a server in the next room is neither.

const K = new Uint32Array(64);
const FIRST = new Uint32Array(8);
for (let n = 2, found = 0; found < 64; n++) {
  let prime = true;
  for (let d = 2; d * d <= n; d++) if (n % d === 0) { prime = false; break; }
  if (!prime) continue;
  if (found < 8) FIRST[found] = fraction(Math.sqrt(n));
  K[found++] = fraction(Math.cbrt(n));
}

function fraction(x) {
  return Math.floor((x - Math.floor(x)) * 2 ** 32);
}

export function sha256(bytes) {
  const length = bytes.length;
  const padded = new Uint8Array(((length + 8 >> 6) + 1) * 64);
  padded.set(bytes);
  padded[length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(length / 2 ** 29));
  view.setUint32(padded.length - 4, length << 3);
  const hash = FIRST.slice();
  const words = new Uint32Array(64);
  for (let at = 0; at < padded.length; at += 64) block(hash, words, view, at);
  return Array.from(hash, (word) => word.toString(16).padStart(8, "0")).join("");
}

function block(hash, words, view, at) {
  for (let i = 0; i < 16; i++) words[i] = view.getUint32(at + 4 * i);
  for (let i = 16; i < 64; i++) {
    const a = words[i - 15];
    const b = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] + (turn(a, 7) ^ turn(a, 18) ^ (a >>> 3)) + (turn(b, 17) ^ turn(b, 19) ^ (b >>> 10));
  }
  let [a, b, c, d, e, f, g, h] = hash;
  for (let i = 0; i < 64; i++) {
    const one = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + words[i]) | 0;
    const two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((word, i) => { hash[i] += word; });
}

function turn(word, by) {
  return (word >>> by) | (word << (32 - by));
}

export function ofIds(ids) {
  const view = new DataView(new ArrayBuffer(4 * ids.length));
  ids.forEach((id, i) => view.setUint32(4 * i, id, true));
  return sha256(new Uint8Array(view.buffer));
}

export function ofFloats(values) {
  const view = new DataView(new ArrayBuffer(8 * values.length));
  values.forEach((value, i) => view.setFloat64(8 * i, value, true));
  return sha256(new Uint8Array(view.buffer));
}

// The first place where two answers differ, or null: token ids, then the bits beside them.
export function firstDifference(one, other) {
  const most = Math.max(one.ids.length, other.ids.length);
  for (let i = 0; i < most; i++) {
    if (one.ids[i] !== other.ids[i]) return { at: i, what: "token" };
    if (!Object.is(one.logprobs[i], other.logprobs[i])) return { at: i, what: "log-probability" };
  }
  return null;
}
