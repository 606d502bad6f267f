// The server, as this page sees it: requests with a key, errors with a message, streams as events.

const root = new URL(".", document.baseURI);
const STORE = "samewise-api-key";

let askForKey = () => Promise.reject(new Problem("this server asks for an API key", 401));
let asking = null; // one question for all who were refused at once

export class Problem extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

// How to ask the person for a key; resolves when they gave one.
export function onRefused(ask) {
  askForKey = ask;
}

export function keepKey(key) {
  sessionStorage.setItem(STORE, key);
}

export async function call(path, { body, signal } = {}) {
  const used = sessionStorage.getItem(STORE);
  const headers = used ? { Authorization: `Bearer ${used}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const init = { method: body ? "POST" : "GET", headers, signal };
  if (body) init.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, root), init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("the server cannot be reached; is it running?");
  }
  if (response.status === 401) {
    if (sessionStorage.getItem(STORE) === used) {
      asking ??= askForKey(Boolean(used)).finally(() => { asking = null; });
      await asking;
    }
    return call(path, { body, signal });
  }
  if (!response.ok) throw await problem(response);
  return response;
}

async function problem(response) {
  const error = await response.json().then((found) => found.error, () => null);
  const wait = response.headers.get("Retry-After");
  const message = error?.message ?? `the server answered ${response.status}`;
  return new Problem(wait ? `${message} (try again in ${wait} s)` : message, response.status, error?.param);
}

// The JSON of each server-sent event, as it comes.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
