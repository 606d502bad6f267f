// Requests to the server: API key, errors, server-sent events.

const root = new URL(".", document.baseURI);
const STORE = "samewise-api-key";

let askForKey = () => Promise.reject(new Problem("this server asks for an API key", 401));
let asking = null; // one dialog for all requests that were refused at the same time

export class Problem extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

// Sets the function that asks the user for a key; its promise resolves when a key was entered.
export function onUnauthorized(ask) {
  askForKey = ask;
}

export function storeKey(key) {
  sessionStorage.setItem(STORE, key);
}

export async function call(path, { body, signal } = {}) {
  const key = sessionStorage.getItem(STORE);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
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
    if (sessionStorage.getItem(STORE) === key) {
      asking ??= askForKey(Boolean(key)).finally(() => { asking = null; });
      await asking;
    }
    return call(path, { body, signal });
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const error = await response.json().then((body) => body.error, () => null);
  const wait = response.headers.get("Retry-After");
  const message = error?.message ?? `the server answered ${response.status}`;
  return new Problem(wait ? `${message} (try again in ${wait} s)` : message, response.status, error?.param);
}

// Yields the JSON of each server-sent event.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (buffer + value).split(/\r?\n\r?\n/);
      buffer = parts.pop();
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
