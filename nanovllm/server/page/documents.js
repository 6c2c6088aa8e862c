/** The documents of the conversation: taken from files or pasted, counted in tokens, shortened, and shown as a list. */

import {
  ServerError, UNREACHABLE, announce, button, byId, counted, element, newId, request, showAlert, whole,
} from "./common.js";
import * as store from "./store.js";

const LONG_PASTE_CHARS = 4000; // a longer text becomes a document instead of a message
const ON_GPU = ["resident", "written"]; // states of blocks
const SHOWN_CHARS = 40; // of a name in a sentence
const CHARS_PER_TOKEN = 4; // an estimate, for what the server is too small to count
const MOST_KEPT_FOR_CHAT = 1024; // tokens for questions and answers, or an eighth of what the server takes

const LEAST_USEFUL_TOKENS = 32; // nothing is shortened to less

const part = ({ name, text }) => `Document "${name}":\n\n${text}\n\nEnd of the document.\n\n`;
const sizeOf = ({ tokens, isEstimate }) => `${isEstimate ? "about " : ""}${counted(tokens, "token")}`;

/**
 * A document is {id, name, text, tokens, isEstimate, fullTokens}: `tokens` is null until the server has counted, and
 * `fullTokens` is what it had before it was shortened.
 */
export class Documents {
  #list = [];
  #numRead = 0; // so many, from the first on, were read for the last answer
  #wasChanged = false; // since then, in a conversation that has begun
  #maxRequestTokens = 0; // 0: not known yet
  #opening;
  #whenChanged;
  #located = null; // {engine, blockIds, numTokens}: the blocks that hold the beginning of the documents' text
  #rendered = { key: "", tokens: [] }; // the documents' text as the model reads it
  #snapshot = null; // of the cache

  /**
   * opening: returns the first messages of a conversation whose first question is a given text. whenChanged: called
   * when documents were added, removed or shortened.
   */
  constructor(opening, whenChanged) {
    this.#opening = opening;
    this.#whenChanged = whenChanged;
    this.#takePasted();
    this.#takeDropped();
    const chooser = byId("file");
    for (const id of ["attach", "choose"]) byId(id).addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      const files = [...chooser.files];
      chooser.value = ""; // so that the same file can be chosen again
      await this.#takeFiles(files);
    });
  }

  get ids() {
    return this.#list.map(({ id }) => id);
  }

  /** The tokens of all documents, as far as they are known. */
  get tokens() {
    return this.#list.reduce((sum, { tokens }) => sum + (tokens ?? 0), 0);
  }

  /**
   * The text before the first question. The documents come first of all, so that every later question, in this
   * conversation or a new one, begins with tokens that the server has in its cache.
   */
  get preamble() {
    return this.#list.map(part).join("");
  }

  /** Show the documents of another conversation. */
  show(list) {
    const shared = list.findIndex(({ id }, i) => this.#list[i]?.id !== id);
    this.#numRead = Math.min(this.#numRead, shared < 0 ? list.length : shared);
    this.#list = [...list];
    this.#wasChanged = false;
    this.#locate();
    this.draw();
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
    this.#wasChanged = ids.join() !== this.ids.join();
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
    const numChars = this.preamble.length, { blockIds, numTokens } = this.#located;
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
    const { ids } = this, messages = this.#opening(this.preamble), key = JSON.stringify(messages);
    const ask = async (path, body) => (await request(path, { body, mayAsk: false })).json();
    try {
      if (this.#rendered.key !== key) {
        const { tokens } = await ask("tokenize", { messages, add_generation_prompt: false });
        this.#rendered = { key, tokens };
      }
      const { tokens } = this.#rendered;
      const { engine, block_ids: blockIds } = await ask("kvcache", { tokens });
      if (ids.join() === this.ids.join()) this.#located = { engine, blockIds, numTokens: tokens.length };
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
    }
  }

  async add(name, text) {
    const added = { id: newId(), name, text, tokens: null };
    this.#list.push(added);
    announce(`${name} was added.`);
    await this.#changed();
    await this.#count(added);
  }

  async #remove(removed) {
    this.#numRead = Math.min(this.#numRead, this.#list.indexOf(removed));
    this.#list = this.#list.filter((each) => each !== removed);
    announce(`${removed.name} was removed.`);
    byId("attach").focus();
    await this.#changed();
  }

  async #changed() {
    this.#wasChanged = byId("turns").children.length > 0;
    showAlert("");
    this.draw();
    for (const each of this.#list) await store.saveDocument(each);
    await this.#whenChanged();
    await this.#locate();
  }

  // -- tokens

  async #count(document) {
    try {
      Object.assign(document, await countTokens(document.text));
    } catch (error) {
      if (error.message !== UNREACHABLE) showAlert(error.message); // it is counted when the server is back
    }
    this.draw();
    if (this.#list.includes(document)) await store.saveDocument(document);
  }

  /** How many tokens documents may have, with something left for questions and answers. */
  get #room() {
    return this.#maxRequestTokens - Math.min(MOST_KEPT_FOR_CHAT, Math.ceil(this.#maxRequestTokens / 8));
  }

  #roomFor(document) {
    const before = this.#list.slice(0, this.#list.indexOf(document));
    return this.#room - before.reduce((sum, { tokens }) => sum + (tokens ?? 0), 0);
  }

  /** Cut its end off, at the end of a line, until it fits. */
  async #shorten(document) {
    const room = this.#roomFor(document), fullTokens = document.fullTokens ?? document.tokens;
    let { text, tokens } = document, isEstimate = true;
    while (tokens > room || isEstimate) {
      const longest = text.slice(0, Math.floor(text.length * Math.min(1, room / tokens) * 0.99));
      const end = longest.lastIndexOf("\n");
      text = end > longest.length / 2 ? longest.slice(0, end + 1) : longest;
      ({ tokens, isEstimate } = await countTokens(text));
    }
    this.#numRead = Math.min(this.#numRead, this.#list.indexOf(document));
    Object.assign(document, { text, tokens, isEstimate, fullTokens });
    announce(`${document.name} was shortened to ${counted(tokens, "token")}.`);
    byId("attach").focus();
    await this.#changed();
  }

  // -- the list

  draw() {
    byId("no-documents").hidden = this.#list.length > 0;
    byId("documents").replaceChildren(...this.#list.map((each, i) => this.#row(each, i)));
    this.#drawExcess();
    const note = byId("documents-note");
    note.hidden = !this.#wasChanged;
    note.textContent = this.#numRead
      ? "The documents have changed. The next answer reads everything again after the change."
      : "The documents have changed. The next answer reads everything again.";
    const count = this.#list.length;
    byId("side-button").textContent = count ? counted(count, "document") : "Documents";
  }

  #row(document, index) {
    const row = element("li", "document"), name = element("span", "document-name", document.name);
    const remove = button("✕", "quiet", () => this.#remove(document));
    name.title = document.name;
    remove.setAttribute("aria-label", `Remove ${document.name}`);
    row.append(name, remove, element("p", "muted small", this.#words(document, index)));
    return row;
  }

  #words(document, index) {
    const { tokens, fullTokens } = document;
    const cut = fullTokens ? `the first of ${whole(fullTokens)}` : "";
    const state = this.#isExcess(document) ? "too long" : this.#cached(index) ?? "not read yet";
    return [tokens === null ? "counting …" : sizeOf(document), cut, state].filter(Boolean).join(" · ");
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

  #isExcess(document) {
    return this.#maxRequestTokens > 0 && document.tokens > this.#roomFor(document);
  }

  /** The first document that does not fit is named above the message, with a button to shorten it. */
  #drawExcess() {
    const document = this.#list.find((each) => this.#isExcess(each)), box = byId("excess");
    box.hidden = document === undefined;
    box.replaceChildren();
    if (document === undefined) return;
    const room = this.#roomFor(document), takes = `this server takes ${whole(this.#maxRequestTokens)}`;
    const isAlone = document.tokens > this.#room;
    const others = isAlone ? "" : `, and the ones before it leave room for ${whole(Math.max(0, room))}`;
    const which = this.#list.length > 1 ? `The document ${document.name.slice(0, SHOWN_CHARS)}` : "This document";
    box.append(`${which} has ${sizeOf(document)}; ${takes}${others}. `);
    if (room >= LEAST_USEFUL_TOKENS) box.append(button("Shorten it to fit", "", () => this.#shorten(document)));
  }

  // -- where documents come from. Only UTF-8 text is taken

  async #takeFiles(files) {
    for (const file of files) {
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.trim()) await this.add(file.name, text);
        else showAlert(`${file.name} is empty.`);
      } catch (error) {
        const isBinary = error instanceof TypeError;
        showAlert(`${file.name} ${isBinary ? "is not UTF-8 text. Save it as plain text first." : "cannot be read."}`);
      }
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
