/** A chat in this tab: its record, which other tabs change too, its documents, and the answer that is coming. */

import { newId, showAlert } from "./common.js";
import * as store from "./store.js";

const TITLE_CHARS = 60;

export const titleOf = ({ title, messages }) =>
  title || messages[0]?.content.slice(0, TITLE_CHARS) || "New chat";

export class Chat {
  record; // as in store.js
  documents;
  run = null; // {message, before, view, controller} while an answer is coming; `before`: the messages that it answers
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
      const writing = store.update(this.id, apply, { fresh, added: fresh ? this.documents : added });
      const stored = await writing.finally(() => { this.#numChanges -= 1; });
      this.#isStored = true;
      await this.#takeOver(stored);
    } catch (error) {
      showAlert(`This browser could not keep the chat: ${error.message}`); // the disk may be full
    }
    if (this.#mustRefresh && !this.#numChanges) await this.refresh();
    return !this.isGone;
  }

  /** Another tab has changed or deleted the chat. */
  async refresh() {
    this.#mustRefresh = this.#numChanges > 0;
    if (this.#isStored && !this.#mustRefresh) await this.#takeOver(await store.conversation(this.id));
  }

  /** stored: undefined if the chat was deleted. */
  async #takeOver(stored) {
    if (stored === undefined) return this.#leave();
    const known = new Map(this.documents.map((document) => [document.id, document]));
    const missingIds = stored.documentIds.filter((id) => !known.has(id));
    if (missingIds.length) for (const each of await store.documents(missingIds)) known.set(each.id, each);
    const isOld = stored.version <= this.record.version; // maybe a newer one came while documents were read
    if (this.isGone || isOld || this.#numChanges) return; // a change that is being written brings the newest record
    const before = this.documentIds.join();
    this.documents = stored.documentIds.map((id) => known.get(id)).filter(Boolean);
    const { run } = this, isSame = ({ id }) => id === run?.message.id;
    if (run && !allMessages(stored).some(isSame)) run.controller.abort(); // the question was taken back in another tab
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

// -- branches: `record.messages` is the branch that is shown, and `record.forks` has the others. A fork is where a
// question was asked in several ways or answered several times: its key is the id of the message before, "" at the
// start, and its value a list of branches, each a list of messages. The branch that is shown is empty there.

const isEmpty = (branch) => !branch.length;

/** Where the messages after the one with this id begin, or the end if it is not in the branch that is shown. */
function placeAfter({ messages }, key) {
  const place = key ? messages.findIndex(({ id }) => id === key) : -1;
  return key && place < 0 ? messages.length : place + 1;
}

/** The messages of all branches. */
export const allMessages = ({ messages, forks = {} }) => [messages, ...Object.values(forks).flat()].flat();

/** [place, number of branches] at the fork before this message of the record, or null if there is none. */
export function branchOf({ forks = {}, messages }, message) {
  const branches = forks[messages[messages.indexOf(message) - 1]?.id ?? ""];
  return branches ? [branches.findIndex(isEmpty), branches.length] : null;
}

/** Show the branch at this place of a fork. */
export const showBranch = (key, place) => (record) => {
  reveal(record, key);
  const branches = record.forks?.[key] ?? [], shown = branches.findIndex(isEmpty);
  if (!branches[place]?.length) return;
  branches[shown] = record.messages.splice(placeAfter(record, key));
  record.messages.push(...branches[place].splice(0));
};

/** Show a branch with the message of this id, which another tab may have left. */
export function reveal(record, id) {
  const isSame = (message) => message.id === id;
  if (record.messages.some(isSame)) return;
  for (const [key, branches] of Object.entries(record.forks ?? {})) {
    const place = branches.findIndex((branch) => branch.some(isSame));
    if (place >= 0) showBranch(key, place)(record);
  }
}

// -- changes of a record

/** Add messages to the branch that ends with the message of this id, or has gone on since. */
export const appendMessages = (lastId, ...added) => (record) => {
  reveal(record, lastId);
  record.messages.push(...added);
  record.changedMs = Date.now();
};

/** Add messages after the one with this id, "" for the start, as a new branch if there are others already. */
export const branchMessages = (key, ...added) => (record) => {
  reveal(record, key);
  const others = record.messages.splice(placeAfter(record, key));
  if (others.length) {
    const branches = ((record.forks ??= {})[key] ??= [[]]);
    branches[branches.findIndex(isEmpty)] = others;
    branches.push([]);
  }
  record.messages.push(...added);
  record.changedMs = Date.now();
};

/** Remove these messages, unless a fork hangs on one. An emptied branch goes, and the one before is shown. */
export const removeMessages = (...ids) => (record) => {
  const forks = record.forks ?? {}, start = record.messages.findIndex(({ id }) => id === ids[0]);
  if (start < 0 || ids.some((id) => id in forks)) return;
  record.messages = record.messages.filter(({ id }) => !ids.includes(id));
  record.changedMs = Date.now();
  const key = record.messages[start - 1]?.id ?? "", branches = forks[key];
  if (!branches || start < record.messages.length) return;
  const shown = branches.findIndex(isEmpty);
  branches.splice(shown, 1);
  record.messages.push(...branches[Math.max(0, shown - 1)].splice(0));
  if (branches.length === 1) delete forks[key];
};

/** Bring a message up to date, in whichever branch it is. */
export const updateMessage = (message) => (record) => {
  Object.assign(allMessages(record).find(({ id }) => id === message.id) ?? {}, message);
};

/** Add documents in place of others, or at the end. */
export const replaceDocuments = (removedIds, addedIds) => (record) => {
  const start = record.documentIds.findIndex((id) => removedIds.includes(id));
  const place = start < 0 ? record.documentIds.length : start;
  record.documentIds = record.documentIds.filter((id) => !removedIds.includes(id));
  record.documentIds.splice(place, 0, ...addedIds);
  record.changedMs = Date.now();
};
