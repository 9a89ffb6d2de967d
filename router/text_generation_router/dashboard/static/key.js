// The API key, for as long as the tab is open.

import { byId, setText } from "./dom.js";

const NAME = "text-generation-api-key";
const dialog = byId("key-dialog");
const input = byId("key");

/** Returns the headers that carry the key. */
export function keyHeaders() {
  const key = sessionStorage.getItem(NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** True if the server needs a key and none was given yet. */
export const lacksKey = () => "key" in document.documentElement.dataset && !sessionStorage.getItem(NAME);

/** Shows or hides the button that forgets the key. */
function showForget() {
  byId("forget").hidden = !sessionStorage.getItem(NAME);
}

let asked = null;

/** Asks for a key; resolves when one was given. All who ask meanwhile get the same answer. */
export function askForKey() {
  asked ??= ask().finally(() => { asked = null; });
  return asked;
}

function ask() {
  if (sessionStorage.getItem(NAME)) setText(byId("key-text"), "This key is not valid here. Try another one.");
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      // A key is visible ASCII; anything else is no header.
      const key = input.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) {
        setText(byId("key-text"), "A key has visible ASCII characters only.");
        return;
      }
      sessionStorage.setItem(NAME, key);
      showForget();
      dialog.close();
      resolve();
    };
  });
}

dialog.addEventListener("cancel", (event) => event.preventDefault());
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(NAME);
  location.reload();
});
showForget();
