// DOM helpers. make("p", { class: "note" }, "text", child) returns a new element.

export const $ = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Announces a text to screen readers.
export function announce(text) {
  $("announcement").textContent = text;
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}
