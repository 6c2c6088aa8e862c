/** A chat in this tab: its record, which other tabs change too, its documents, and the answer that is coming. */

import { newId, showAlert } from "./common.js";
import * as store from "./store.js";

const TITLE_CHARS = 60;

export const titleOf = ({ title, messages }) =>
  title || messages[0]?.content.slice(0, TITLE_CHARS) || "New chat";

export class Chat {
  record; // as in store.js
  documents;
  run = null; // {message, view, controller} while an answer is coming
  isGone = false; // deleted, here or in another tab
  whenChanged; // called with the chat after another tab's changes were taken over, or when it is gone
  #isStored;
  #numChanges = 0; // that are being written
  #mustRefresh = false; // when they are written

  constructor(record, documents, isStored, whenChanged) {
    Object.assign(this, { record, documents, whenChanged });
    this.#isStored = isStored;
  }

  /** Return a new chat, which is stored at its first change. */
  static begin(documents, questions, whenChanged) {
    const documentIds = documents.map(({ id }) => id);
    const record = { id: newId(), title: "", changedMs: Date.now(), version: 0, documentIds, questions, messages: [] };
    return new Chat(record, [...documents], false, whenChanged);
  }

  /** Return the chat of this id, or undefined. */
  static async load(id, whenChanged) {
    const record = await store.conversation(id);
    return record && new Chat(record, await store.documents(record.documentIds), true, whenChanged);
  }

  get id() {
    return this.record.id;
  }

  get documentIds() {
    return this.documents.map(({ id }) => id);
  }

  /**
   * Change the record: here at once, then in the store, and take over what other tabs have changed meanwhile. apply:
   * changes a record in place, even after changes by other tabs. added: new documents to store with it. Return false
   * if the chat was deleted.
   */
  async change(apply, added = []) {
    if (this.isGone) return false;
    const fresh = this.#isStored ? undefined : structuredClone(this.record);
    apply(this.record);
    this.#numChanges += 1;
    try {
      const stored = await store.update(this.id, apply, { fresh, added: fresh ? this.documents : added });
      this.#isStored = true;
      await this.#takeOver(stored, 1);
    } catch (error) {
      showAlert(`This browser could not keep the chat: ${error.message}`); // the disk may be full
    } finally {
      this.#numChanges -= 1;
    }
    if (this.#mustRefresh && !this.#numChanges) await this.refresh();
    return !this.isGone;
  }

  /** Another tab has changed or deleted the chat. */
  async refresh() {
    this.#mustRefresh = this.#numChanges > 0;
    if (this.#isStored && !this.#mustRefresh) await this.#takeOver(await store.conversation(this.id), 0);
  }

  /** stored: undefined if the chat was deleted. numOwn: changes of this tab that are part of it and still count. */
  async #takeOver(stored, numOwn) {
    if (stored === undefined) return this.#leave();
    const known = new Map(this.documents.map((document) => [document.id, document]));
    const missingIds = stored.documentIds.filter((id) => !known.has(id));
    if (missingIds.length) for (const each of await store.documents(missingIds)) known.set(each.id, each);
    const isOld = stored.version <= this.record.version;
    if (this.isGone || isOld || this.#numChanges > numOwn) return; // a later change brings the newest record
    const before = this.documentIds.join();
    this.documents = stored.documentIds.map((id) => known.get(id)).filter(Boolean);
    const { run } = this, isSame = ({ id }) => id === run?.message.id;
    if (run && !stored.messages.some(isSame)) run.controller.abort(); // the question was replaced in another tab
    const messages = stored.messages.map((message) => (isSame(message) ? run.message : message)); // which is newer
    this.record = { ...stored, messages };
    this.whenChanged(this, this.documentIds.join() !== before);
  }

  #leave() {
    if (this.isGone) return;
    this.end();
    this.whenChanged(this);
  }

  /** The chat was deleted: its answer ends, and nothing of it is stored any more. */
  end() {
    this.isGone = true;
    this.run?.controller.abort();
  }
}

// -- changes of a record

/** Add messages in place of others, or at the end. */
export const replaceMessages = (removedIds, ...added) => (record) => {
  const isRemoved = ({ id }) => removedIds.includes(id), start = record.messages.findIndex(isRemoved);
  const place = start < 0 ? record.messages.length : start;
  record.messages = record.messages.filter((message) => !isRemoved(message));
  record.messages.splice(place, 0, ...added);
  record.changedMs = Date.now();
};

/** Bring a message up to date, unless another tab has removed it. */
export const updateMessage = (message) => (record) => {
  Object.assign(record.messages.find(({ id }) => id === message.id) ?? {}, message);
};

/** Add documents in place of others, or at the end. */
export const replaceDocuments = (removedIds, addedIds) => (record) => {
  const start = record.documentIds.findIndex((id) => removedIds.includes(id));
  const place = start < 0 ? record.documentIds.length : start;
  record.documentIds = record.documentIds.filter((id) => !removedIds.includes(id));
  record.documentIds.splice(place, 0, ...addedIds);
  record.changedMs = Date.now();
};
