/** What the modules share: elements, messages to the user, numbers, and requests to the server with the API key. */

export const byId = (id) => document.getElementById(id);

/** A new element with text in it. Text is never read as HTML. */
export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** For this page's own records. crypto.randomUUID is there with https only. */
export const newId = () => `${Date.now()}-${Math.random()}`;

export function button(label, className, onClick) {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

/** A button that copies what `textOf` returns. */
export function copyButton(textOf) {
  const made = button("Copy", "quiet", async () => {
    made.textContent = await copy(textOf()) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

/** Without https the browser has no clipboard for pages, but copies what is selected. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const focused = document.activeElement, area = element("textarea", "visually-hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused.focus();
  return isCopied;
}

/** message: "" for none. */
export function showAlert(message) {
  byId("alert").textContent = message;
  byId("alert").hidden = !message;
}

/** Tell users of a screen reader. */
export function announce(message) {
  byId("announcement").textContent = message;
}

// -- numbers in English, as the page is

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const whole = (value) => WHOLE.format(value);
export const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Such as 840 ms, 9.1 s or 3 min 20 s. */
export function duration(ms) {
  if (ms < 1000) return `${whole(ms)} ms`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 100) return `${seconds < 10 ? (ms / 1000).toFixed(1) : seconds} s`;
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

/** Three significant digits, such as 0.312, 4.71 or 1,230. */
export function short(value) {
  if (value === 0) return "0";
  if (value >= 100) return whole(value);
  return value < 0.001 ? "<0.001" : value.toPrecision(3);
}

// -- the API key: in sessionStorage, which the browser keeps for this tab only

const KEY_NAME = "nanovllm-api-key";
const dialog = byId("key-dialog");
let asking = null; // resolves when the open dialog closes, to true if a key was given

/**
 * Ask for a key in place of the one that the server has refused, and return true to try again. Requests that fail at
 * the same time share one dialog, and one that was sent before the key changed asks nothing.
 */
async function askForKey(refused) {
  if (sessionStorage.getItem(KEY_NAME) !== refused) return true;
  return openDialog(refused ? "The server does not accept this key." : "This server asks for an API key.");
}

function openDialog(message) {
  byId("key-message").textContent = message;
  if (asking === null) {
    asking = new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
    }).finally(() => { asking = null; });
    byId("key").value = sessionStorage.getItem(KEY_NAME) ?? "";
    dialog.returnValue = "";
    dialog.showModal();
    byId("key").select();
  }
  return asking;
}

dialog.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
  byId("key").value = "";
  dialog.close("given");
});
byId("key-cancel").addEventListener("click", () => dialog.close("cancelled"));
byId("change-key").addEventListener("click", () => {
  openDialog("This key is sent with every request. Leave the field empty to send none.");
});

// -- requests

// Beginnings of messages that go when they are no longer true
export const TOO_LONG = "Documents and conversation";
export const UNREACHABLE = "The server cannot be reached. Check that it is running, and try again.";

/** A failure whose message can be shown. `status` and `code` are of the HTTP response, if there was one. */
export class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/**
 * Send a request, whose body is a Blob or becomes JSON, and return the response if it is a successful one. If the
 * server refuses the key, ask the user for one and try again, unless `mayAsk` is false. Raises ServerError.
 */
export async function request(path, { body, signal, mayAsk = true } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY_NAME);
    const response = await send(path, body, signal, key);
    if (response.ok) return response;
    if (response.status !== 401 || !mayAsk || !(await askForKey(key))) throw await failure(response);
  }
}

async function send(path, body, signal, key) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const isFile = body instanceof Blob, sent = isFile || body === undefined ? body : JSON.stringify(body);
  if (body) headers["Content-Type"] = isFile ? "application/octet-stream" : "application/json";
  try {
    return await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: sent });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(UNREACHABLE);
  }
}

async function failure(response) {
  const { status } = response;
  const { error } = await response.json().catch(() => ({})); // it may come from a proxy in front of the server
  const said = sentence(error?.message ?? "");
  if (status === 401) return new ServerError("The server asks for an API key.", status);
  if (status === 413) return new ServerError(`The document or the conversation is too large. ${said}`, status);
  if (status === 429) {
    const wait = response.headers.get("Retry-After");
    return new ServerError(`The server is busy. Try again in ${wait ? `${wait} s` : "a moment"}. ${said}`, status);
  }
  if (status >= 500) return new ServerError(`The server has failed (status ${status}). ${said}`, status);
  return new ServerError(said || `The server refused the request (status ${status}).`, status, error?.code);
}

/** The data of each server-sent event. An event ends with an empty line; lines that are not data are skipped. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const complete = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = complete.pop();
      for (const event of complete) {
        const data = event.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

export function sentence(text) {
  const capitalized = text.slice(0, 1).toUpperCase() + text.slice(1);
  return !text || /[.!?]$/.test(capitalized) ? capitalized : `${capitalized}.`;
}
