/** The API key. It lives in sessionStorage, which the browser keeps for this tab only. */

const NAME = "nanovllm-api-key";

const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("key-dialog"));
const field = /** @type {HTMLInputElement} */ (document.getElementById("key"));
const message = /** @type {HTMLElement} */ (document.getElementById("key-message"));

/** @type {Promise<boolean> | null} the answer to the dialog that is open */
let asking = null;

export function storedKey() {
  return sessionStorage.getItem(NAME);
}

/**
 * Ask because the server has refused a request that was sent with `refused`. Requests that fail at the same time share
 * one dialog, and one that was sent before the key changed asks nothing.
 * @param {string | null} refused
 * @returns {Promise<boolean>} whether to try again
 */
export async function askForKey(refused) {
  if (storedKey() !== refused) return true;
  return openDialog(refused ? "The server does not accept this key." : "This server asks for an API key.");
}

/** @param {string} text what the dialog says */
export function openDialog(text) {
  message.textContent = text;
  if (asking === null) {
    asking = new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
    }).finally(() => {
      asking = null;
    });
    field.value = storedKey() ?? "";
    dialog.returnValue = "";
    dialog.showModal();
    field.select();
  }
  return asking;
}

dialog.querySelector("form")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const key = field.value.trim();
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
  field.value = "";
  dialog.close("given");
});

document.getElementById("key-cancel")?.addEventListener("click", () => dialog.close("cancelled"));
document.getElementById("change-key")?.addEventListener("click", () => {
  openDialog("This key is sent with every request. Leave the field empty to send none.");
});
