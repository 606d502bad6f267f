// SHA-256 of token ids and of the bits of log-probabilities. Not crypto.subtle, which browsers offer for https
// and localhost only.

const K = new Uint32Array(64);
const INITIAL = new Uint32Array(8);
for (let n = 2, count = 0; count < 64; n++) {
  let prime = true;
  for (let d = 2; d * d <= n; d++) if (n % d === 0) { prime = false; break; }
  if (!prime) continue;
  if (count < 8) INITIAL[count] = fraction(Math.sqrt(n));
  K[count++] = fraction(Math.cbrt(n));
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
  const hash = INITIAL.slice();
  const words = new Uint32Array(64);
  for (let at = 0; at < padded.length; at += 64) block(hash, words, view, at);
  return Array.from(hash, (word) => word.toString(16).padStart(8, "0")).join("");
}

function block(hash, words, view, at) {
  for (let i = 0; i < 16; i++) words[i] = view.getUint32(at + 4 * i);
  for (let i = 16; i < 64; i++) {
    const a = words[i - 15];
    const b = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] + (rotate(a, 7) ^ rotate(a, 18) ^ (a >>> 3)) + (rotate(b, 17) ^ rotate(b, 19) ^ (b >>> 10));
  }
  let [a, b, c, d, e, f, g, h] = hash;
  for (let i = 0; i < 64; i++) {
    const one = (h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + words[i]) | 0;
    const two = ((rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((word, i) => { hash[i] += word; });
}

function rotate(word, by) {
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

// The first position where two answers differ in token id or log-probability bits, or null.
export function firstDifference(one, other) {
  const length = Math.max(one.ids.length, other.ids.length);
  for (let i = 0; i < length; i++) {
    if (one.ids[i] !== other.ids[i]) return { at: i, what: "token" };
    if (!Object.is(one.logprobs[i], other.logprobs[i])) return { at: i, what: "log-probability" };
  }
  return null;
}
