/** The documents of the chat that is shown: taken from files or pasted, counted in tokens, shortened, and listed. */

import { replaceDocuments } from "./chats.js";
import {
  ServerError, TOO_LONG, UNREACHABLE, announce, button, byId, counted, element, newId, request, showAlert, whole,
} from "./common.js";
import * as store from "./store.js";

const LONG_PASTE_CHARS = 4000; // a longer text becomes a document instead of a message
const VIEWED_CHARS = 100_000; // of a document's text at a time
const ON_GPU = ["resident", "written"]; // states of blocks
const SHOWN_CHARS = 40; // of a name in a sentence
const CHARS_PER_TOKEN = 4; // an estimate, for what the server is too small to count
const MOST_KEPT_FOR_CHAT = 1024; // tokens for questions and answers, or an eighth of what the server takes

// Control characters, but for those that tabs, lines, pages, old ends of files and colours in logs are made of
const NOT_IN_TEXT = /[\0-\x07\x0e-\x19\x1c-\x1f\x7f-\x9f]/;
const LEAST_USEFUL_TOKENS = 32; // nothing is shortened to less

const part = ({ name, text }) => `Document "${name}":\n\n${text}\n\nEnd of the document.\n\n`;
const sizeOf = ({ tokens, isEstimate }) => `${isEstimate ? "about " : ""}${counted(tokens, "token")}`;

/**
 * Return the text before the first question. It has the documents, so that every later question, in this chat or a
 * new one, begins with tokens that the server has in its cache.
 */
export const preambleOf = (documents) => documents.map(part).join("");

/** The tokens of all these documents that are counted. */
export const tokensOf = (documents) => documents.reduce((sum, { tokens }) => sum + (tokens ?? 0), 0);

/**
 * A document is {id, name, text, tokens, isEstimate, fullTokens}: `tokens` is null until the server has counted, and
 * `fullTokens` is what it had before it was shortened, which made a new document of it.
 */
export class Documents {
  #chat = null; // which has the list
  #shownIds = [];
  #numRead = 0; // so many, from the first on, were read for the last answer
  #wasChanged = false; // since then, in a conversation that has begun
  canExtract = false; // true if the server reads the text of PDF and other formats
  #maxRequestTokens = 0; // 0: not known yet
  #opening;
  #whenChanged;
  #located = null; // {engine, blockIds, numTokens}: the blocks that hold the beginning of the documents' text
  #rendered = { key: "", tokens: [] }; // the documents' text as the model reads it
  #snapshot = null; // of the cache

  /**
   * opening: returns the first messages of a conversation whose first question is a given text. whenChanged: called
   * when documents of a chat were added, removed or shortened.
   */
  constructor(opening, whenChanged) {
    this.#opening = opening;
    this.#whenChanged = whenChanged;
    this.#takePasted();
    this.#takeDropped();
    const chooser = byId("file");
    for (const id of ["attach", "attach-here", "choose"]) byId(id).addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      const files = [...chooser.files];
      chooser.value = ""; // so that the same file can be chosen again
      await this.#takeFiles(files);
    });
  }

  get #list() {
    return this.#chat?.documents ?? [];
  }

  /** The most tokens of a request, or 0 if that is not known yet. */
  get maxRequestTokens() {
    return this.#maxRequestTokens;
  }

  /** True if a document does not fit: nothing can be asked before it is shortened or removed. */
  get isExcess() {
    return this.#excess !== undefined;
  }

  /** Show the documents of this chat, as they are now. */
  show(chat) {
    const changed = chat.documents.findIndex(({ id }, i) => this.#shownIds[i] !== id);
    this.#numRead = Math.min(this.#numRead, changed < 0 ? chat.documents.length : changed);
    if (chat !== this.#chat) this.#wasChanged = false;
    else if (chat.record.messages.length) this.#wasChanged ||= chat.documentIds.join() !== this.#shownIds.join();
    this.#chat = chat;
    this.#shownIds = chat.documentIds;
    if (this.#maxRequestTokens) for (const each of this.#list) if (each.tokens === null) this.#count(each);
    this.draw();
    return this.#locate();
  }

  /** The server takes so many tokens, for prompt and answer together. It may be another server than before. */
  setLimit(maxRequestTokens) {
    this.#maxRequestTokens = maxRequestTokens;
    this.#numRead = 0;
    for (const each of this.#list) if (each.tokens === null || each.isEstimate) this.#count(each);
    this.#locate();
    this.draw();
  }

  /** The documents of these ids were read for an answer. Meanwhile the list may have changed. */
  setRead(ids) {
    const changed = this.#list.findIndex(({ id }, i) => ids[i] !== id);
    this.#numRead = changed < 0 ? this.#list.length : changed;
    this.#wasChanged = ids.join() !== this.#shownIds.join();
    this.draw();
    this.#locate();
  }

  /** snapshot: the newest one of the cache. */
  showSnapshot(snapshot) {
    this.#snapshot = snapshot;
    [...byId("documents").children].forEach((row, i) => {
      row.querySelector("p").textContent = this.#words(this.#list[i], i);
    });
  }

  /** [{name, numBlocks, blockIds}]: how many blocks each document fills, and those that hold it. [] if not known. */
  get blocks() {
    const { engine, block_size: blockSize } = this.#snapshot ?? {};
    if (this.#located === null || this.#located.engine !== engine) return []; // a replica of it has the documents
    const numChars = preambleOf(this.#list).length, { blockIds, numTokens } = this.#located;
    let end = 0, numBlocks = 0;
    return this.#list.map((document) => {
      const start = numBlocks;
      end += part(document).length;
      numBlocks = Math.floor(end / numChars * numTokens / blockSize);
      return { name: document.name, numBlocks: numBlocks - start, blockIds: blockIds.slice(start, numBlocks) };
    });
  }

  /** Ask which blocks hold the documents. Nothing depends on it, so a failure is left to what does. */
  async #locate() {
    this.#located = null;
    if (!this.#list.length || !this.#maxRequestTokens) return;
    const ids = this.#shownIds, messages = this.#opening(preambleOf(this.#list)), key = JSON.stringify(messages);
    const ask = async (path, body) => (await request(path, { body, mayAsk: false })).json();
    try {
      if (this.#rendered.key !== key) {
        const { tokens } = await ask("tokenize", { messages, add_generation_prompt: false });
        this.#rendered = { key, tokens };
      }
      const { tokens } = this.#rendered;
      const { engine, block_ids: blockIds } = await ask("kvcache", { tokens });
      if (ids.join() === this.#shownIds.join()) this.#located = { engine, blockIds, numTokens: tokens.length };
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
    }
  }

  /** chat: where it goes, which may be another one than is shown when a file has been read. */
  async add(name, text, chat = this.#chat) {
    const added = { id: newId(), name, text, tokens: null };
    announce(`${name} was added.`);
    await this.#change(chat, (documents) => [...documents, added]);
    await this.#count(added);
  }

  async #remove(removed) {
    announce(`${removed.name} was removed.`);
    byId("attach").focus();
    await this.#change(this.#chat, (documents) => documents.filter(({ id }) => id !== removed.id));
  }

  /** change: returns a new list of documents. */
  async #change(chat, change) {
    const before = chat.documents;
    chat.documents = change(before);
    const removedIds = before.filter((each) => !chat.documents.includes(each)).map(({ id }) => id);
    const added = chat.documents.filter((each) => !before.includes(each));
    if (chat === this.#chat) {
      showAlert("");
      this.show(chat);
    }
    await chat.change(replaceDocuments(removedIds, added.map(({ id }) => id)), added);
    await this.#whenChanged();
  }

  // -- tokens

  async #count(document) {
    try {
      Object.assign(document, await countTokens(document.text));
    } catch (error) {
      if (error.message !== UNREACHABLE) showAlert(error.message); // it is counted when the server is back
    }
    this.draw();
    await store.saveTokens(document);
  }

  /** How many tokens documents may have, with something left for questions and answers. */
  get #room() {
    return this.#maxRequestTokens - Math.min(MOST_KEPT_FOR_CHAT, Math.ceil(this.#maxRequestTokens / 8));
  }

  #roomFor(document) {
    const before = this.#list.slice(0, this.#list.indexOf(document));
    return this.#room - tokensOf(before);
  }

  /** Cut its end off, at the end of a line, until it fits. */
  async #shorten(document) {
    const chat = this.#chat;
    const room = this.#roomFor(document), fullTokens = document.fullTokens ?? document.tokens;
    let { text, tokens } = document, isEstimate = true;
    while (tokens > room || isEstimate) {
      const longest = text.slice(0, Math.floor(text.length * Math.min(1, room / tokens) * 0.99));
      const end = longest.lastIndexOf("\n");
      text = end > longest.length / 2 ? longest.slice(0, end + 1) : longest;
      ({ tokens, isEstimate } = await countTokens(text));
    }
    const shortened = { id: newId(), name: document.name, text, tokens, isEstimate, fullTokens };
    announce(`${document.name} was shortened to ${counted(tokens, "token")}.`);
    byId("attach").focus();
    await this.#change(chat, (documents) => documents.map((each) => (each === document ? shortened : each)));
  }

  // -- the list

  draw() {
    this.#drawWelcome();
    byId("no-documents").hidden = this.#list.length > 0;
    byId("documents").replaceChildren(...this.#list.map((each, i) => this.#row(each, i)));
    this.#drawExcess();
    const note = byId("documents-note");
    note.hidden = !this.#wasChanged;
    note.textContent = this.#numRead
      ? "The documents have changed. The next answer reads everything again after the change."
      : "The documents have changed. The next answer reads everything again.";
    const attached = byId("attached"), [first] = this.#list, count = this.#list.length;
    attached.hidden = !count;
    if (count) attached.textContent = count === 1 ? first.name : counted(count, "document");
  }

  /** What the first screen says of the documents, and how much fits. */
  #drawWelcome() {
    const list = this.#list, [first] = list, room = byId("room");
    const isCounted = list.every(({ tokens }) => tokens !== null);
    const which = list.length > 1 ? counted(list.length, "document") : first?.name.slice(0, SHOWN_CHARS);
    const size = sizeOf({ tokens: tokensOf(list), isEstimate: list.some(({ isEstimate }) => isEstimate) });
    const takes = `${counted(this.#maxRequestTokens, "token")} fit into a chat, documents and answers together.`;
    byId("welcome-title").textContent = `Ask about ${which ?? "long documents"}`;
    byId("welcome-text").hidden = list.length > 0;
    room.hidden = !this.#maxRequestTokens || !isCounted;
    room.textContent = list.length ? `${size[0].toUpperCase()}${size.slice(1)}. ${takes}` : takes;
    byId("choose").textContent = list.length ? "Add a document…" : "Choose a document…";
    byId("choose").classList.toggle("primary", !list.length && byId("try-example").hidden);
  }

  #row(document, index) {
    const row = element("li", "document"), name = button(document.name, "document-name", () => view(document));
    const remove = button("✕", "quiet", () => this.#remove(document));
    name.title = document.name;
    name.dir = "auto";
    remove.setAttribute("aria-label", `Remove ${document.name}`);
    row.append(name, remove, element("p", "muted small", this.#words(document, index)));
    return row;
  }

  #words(document, index) {
    const { tokens, fullTokens } = document;
    const cut = fullTokens ? `the first of ${whole(fullTokens)}` : "";
    const state = this.#isExcess(document) ? "too long" : this.#cached(index) ?? "not read yet";
    return [tokens === null ? "counting…" : sizeOf(document), cut, state].filter(Boolean).join(" · ");
  }

  /** Such as "in the cache, 41% on the GPU". undefined if the document is not in the cache. */
  #cached(index) {
    const { numBlocks, blockIds } = this.blocks[index] ?? {};
    if (!blockIds?.length) return index < this.#numRead ? "in the cache" : undefined; // as the last answer has left it
    const { states, state_names: names, has_gpu: hasGpu, num_slots: numSlots } = this.#snapshot;
    const shareOf = (isCounted) => blockIds.filter((block) => isCounted(names[states[block]])).length / numBlocks;
    const kept = shareOf((state) => state !== "free"), onGpu = shareOf((state) => ON_GPU.includes(state));
    const words = kept === 1 ? "in the cache" : `${whole(kept * 100)}% in the cache`;
    return hasGpu && numSlots !== null ? `${words}, ${whole(onGpu * 100)}% on the GPU` : words;
  }

  get #excess() {
    return this.#list.find((each) => this.#isExcess(each));
  }

  #isExcess(document) {
    return this.#maxRequestTokens > 0 && document.tokens > this.#roomFor(document);
  }

  /** The first document that does not fit is named above the message, with a button to shorten it. */
  #drawExcess() {
    const document = this.#excess, box = byId("excess");
    box.hidden = document === undefined;
    byId("send").disabled = document !== undefined;
    box.replaceChildren();
    if (document === undefined) return;
    if (byId("alert").textContent.startsWith(TOO_LONG)) showAlert(""); // this says more
    const room = this.#roomFor(document), takes = `this server takes ${whole(this.#maxRequestTokens)}`;
    const isAlone = document.tokens > this.#room;
    const others = isAlone ? "" : `, and the ones before it leave room for ${whole(Math.max(0, room))}`;
    const which = this.#list.length > 1 ? `The document ${document.name.slice(0, SHOWN_CHARS)}` : "This document";
    box.append(`${which} has ${sizeOf(document)}; ${takes}${others}. `);
    if (room >= LEAST_USEFUL_TOKENS) box.append(button("Shorten it to fit", "", () => this.#shorten(document)));
  }

  // -- where documents come from

  async #takeFiles(files) {
    const chat = this.#chat, notes = [];
    for (const file of files) {
      const { text, note } = await this.#textOf(file);
      if (text?.trim()) await this.add(file.name, text, chat);
      if (note) notes.push(`${file.name} ${note}`);
      else if (!text.trim()) notes.push(`${file.name} is empty.`);
    }
    if (notes.length) showAlert(notes.join(" "));
  }

  /** {text, note} of a file, as of `decode`. What is not plain text goes to the server, if it can read it. */
  async #textOf(file) {
    const bytes = await file.arrayBuffer().catch(() => null);
    if (bytes === null) return { text: null, note: "cannot be read." };
    const decoded = decode(new Uint8Array(bytes));
    if (!this.canExtract || (decoded.text !== null && !/\.x?html?$/i.test(file.name))) return decoded;
    announce(`Reading ${file.name}.`);
    try {
      const path = `v1/documents/text?name=${encodeURIComponent(file.name)}`;
      return await (await request(path, { body: new Blob([bytes]) })).json();
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      if (decoded.text !== null) return decoded; // HTML, as it is
      const { message } = error, isNamed = message.toLowerCase().startsWith(`${file.name.toLowerCase()} `);
      return { text: null, note: isNamed ? message.slice(file.name.length + 1) : `cannot be read. ${message}` };
    }
  }

  #takePasted() {
    byId("question").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files], text = event.clipboardData.getData("text/plain");
      if (!files.length && text.length <= LONG_PASTE_CHARS) return;
      event.preventDefault();
      if (files.length) this.#takeFiles(files);
      else this.add("pasted text", text);
    });
  }

  #takeDropped() {
    const hasFile = (event) => event.dataTransfer?.types.includes("Files") ?? false;
    document.addEventListener("dragover", (event) => {
      if (!hasFile(event)) return;
      event.preventDefault(); // otherwise the browser opens the file
      byId("drop-hint").hidden = false;
    });
    document.addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) byId("drop-hint").hidden = true; // it has left the window
    });
    document.addEventListener("drop", (event) => {
      byId("drop-hint").hidden = true;
      if (!hasFile(event)) return;
      event.preventDefault();
      this.#takeFiles([...event.dataTransfer.files]);
    });
  }
}

/** Show a document's text, a part at a time, because a book takes a browser seconds. */
function view(document) {
  const { name, text } = document, shown = byId("viewer-text"), more = byId("viewer-more");
  byId("viewer-title").textContent = name;
  byId("viewer-size").textContent = `${sizeOf(document)}, ${counted(text.length, "character")}`;
  shown.textContent = "";
  let end = 0;
  more.onclick = () => {
    shown.append(text.slice(end, end + VIEWED_CHARS));
    end += VIEWED_CHARS;
    more.hidden = end >= text.length;
  };
  more.onclick();
  byId("viewer").showModal();
  shown.scrollTop = 0;
}

/**
 * The text of a file, which is UTF-8, UTF-16 with a byte order mark, or Windows-1252, which includes Latin-1:
 * {text, note}. text: null if it is not text. note: what to tell the user, after the file's name.
 */
function decode(bytes) {
  const decoded = (encoding) => {
    try {
      return new TextDecoder(encoding, { fatal: true }).decode(bytes);
    } catch {
      return null; // it is in another encoding
    }
  };
  const [first, second] = bytes;
  const utf16 = first === 0xff && second === 0xfe ? "utf-16le" : first === 0xfe && second === 0xff ? "utf-16be" : null;
  const text = decoded(utf16 ?? "utf-8"), western = decoded("windows-1252");
  if (western.startsWith("%PDF-")) return { text: null, note: "is a PDF. Save it as plain text first." };
  if (text !== null && !text.includes("\0")) return { text };
  const numOther = western.replace(/[\0-\x7f]/g, "").length;
  if (text === null && utf16 === null && numOther < western.length / 2 && !NOT_IN_TEXT.test(western)) {
    return { text: western, note: "is not in UTF-8. It was read as Western European text (Windows-1252)." };
  }
  return { text: null, note: "is not a text file. Save it as plain text first." };
}

/** {tokens, isEstimate}: an estimate if the text is longer than the server counts. Raises ServerError. */
async function countTokens(text) {
  try {
    const answer = await (await request("tokenize", { body: { prompt: text, add_special_tokens: false } })).json();
    return { tokens: answer.count, isEstimate: false };
  } catch (error) {
    if (error.status !== 400 && error.status !== 413) throw error;
    return { tokens: Math.ceil(text.length / CHARS_PER_TOKEN), isEstimate: true };
  }
}
