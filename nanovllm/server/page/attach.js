/** The document: dropped, chosen or pasted. Only UTF-8 text is taken. */

import { byId } from "./page_elements.js";
import { counted } from "./numbers.js";

const LONG_PASTE_CHARS = 4000; // a longer text becomes the document instead of a message

/**
 * @typedef {import("./conversation.js").TextDocument} TextDocument
 * @param {{ attach: (document: TextDocument | null) => void, refuse: (message: string) => void }} actions
 */
export function setUpDocument({ attach, refuse }) {
  /** @param {File} file */
  const take = async (file) => {
    try {
      attach({ name: file.name, text: await readText(file) });
    } catch (error) {
      refuse(/** @type {Error} */ (error).message);
    }
  };
  const chooser = byId("file");
  byId("attach").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    if (chooser.files.length) take(chooser.files[0]);
    chooser.value = ""; // so that the same file can be chosen again
  });
  byId("remove-document").addEventListener("click", () => {
    attach(null);
    byId("attach").focus();
  });
  setUpDrop(take);
  byId("question").addEventListener("paste", (/** @type {ClipboardEvent} */ event) => {
    const [file] = event.clipboardData?.files ?? [];
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (!file && text.length <= LONG_PASTE_CHARS) return;
    event.preventDefault();
    if (file) take(file);
    else attach({ name: "pasted text", text });
  });
}

/** @param {TextDocument | null} document */
export function showDocument(document) {
  byId("document").hidden = document === null;
  if (document === null) return;
  byId("document-name").textContent = document.name;
  byId("document-size").textContent = counted(document.text.length, "character");
}

/** @param {(file: File) => void} take */
function setUpDrop(take) {
  const hint = byId("drop-hint");
  /** @param {DragEvent} event */
  const hasFile = (event) => event.dataTransfer?.types.includes("Files") ?? false;
  document.addEventListener("dragover", (event) => {
    if (!hasFile(event)) return;
    event.preventDefault(); // otherwise the browser opens the file
    hint.hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) hint.hidden = true; // it has left the window
  });
  document.addEventListener("drop", (event) => {
    hint.hidden = true;
    if (!hasFile(event)) return;
    event.preventDefault();
    const [file] = event.dataTransfer?.files ?? [];
    if (file) take(file);
  });
}

/** @param {File} file */
async function readText(file) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (error) {
    if (error instanceof TypeError) throw new Error(`${file.name} is not UTF-8 text. Save it as plain text first.`);
    throw new Error(`${file.name} cannot be read.`);
  }
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return text;
}
