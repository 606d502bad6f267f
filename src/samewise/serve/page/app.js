// The page: what is heard goes to the panel, what is asked goes to the model, a missing key is asked for.

import { call, keepKey, onRefused } from "./api.js";
import { $ } from "./dom.js";
import { watch } from "./live.js";
import * as room from "./room.js";
import * as talk from "./talk.js";

onRefused((tried) => new Promise((given) => {
  const dialog = $("key-dialog");
  if (tried) $("key-why").textContent = "The key given before was refused. Try another.";
  $("api-key").value = "";
  const closed = () => {
    const key = $("api-key").value.trim();
    if (!key) { // dismissed: there is nothing to do here without one
      dialog.showModal();
      return;
    }
    dialog.removeEventListener("close", closed);
    keepKey(key);
    $("question").focus();
    given();
  };
  dialog.addEventListener("close", closed);
  dialog.showModal();
}));

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", String(other === button));
  });
}

async function nameModel() {
  try {
    const models = await (await call("v1/models")).json();
    $("model").textContent = models.data[0].id;
  } catch {
    $("model").textContent = ""; // the status says what is wrong
  }
}

room.begin();
talk.begin();
watch(room.show, room.lost);
nameModel();
if (!matchMedia("(pointer: coarse)").matches) $("question").focus(); // there a keyboard would cover the page
