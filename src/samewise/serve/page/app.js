// Connects the parts of the page: live feed, engine panel, conversation, key dialog.

import { call, onUnauthorized, storeKey } from "./api.js";
import * as conversation from "./conversation.js";
import { $ } from "./dom.js";
import * as enginePanel from "./engine-panel.js";
import { watch } from "./live-feed.js";

onUnauthorized((wasRefused) => new Promise((resolve) => {
  const dialog = $("key-dialog");
  if (wasRefused) $("key-why").textContent = "The key given before was refused. Try another.";
  $("api-key").value = "";
  const closed = () => {
    const key = $("api-key").value.trim();
    if (!key) { // dismissed: nothing on the page works without a key
      dialog.showModal();
      return;
    }
    dialog.removeEventListener("close", closed);
    storeKey(key);
    $("question").focus();
    resolve();
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

async function showModelName() {
  try {
    const models = await (await call("v1/models")).json();
    $("model").textContent = models.data[0].id;
  } catch {
    $("model").textContent = ""; // the status line shows the error
  }
}

enginePanel.begin();
conversation.begin();
watch(enginePanel.show, enginePanel.showLost);
showModelName();
if (!matchMedia("(pointer: coarse)").matches) $("question").focus(); // on a touch screen the keyboard would cover the page
