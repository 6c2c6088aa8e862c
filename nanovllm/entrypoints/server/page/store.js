/**
 * What this browser keeps, in IndexedDB: conversations, the documents they name, and the settings. It is sent to the
 * server in requests and to no other place. The API key is not kept here: see common.js.
 *
 * conversation: {id, title, changedMs, version, documentIds, messages, forks}; the title is "" until the user gives one,
 * each message has an id, and chats.js explains `forks`. document: {id, name, text, tokens}; its text never changes. The
 * settings are one record. A document is kept as long as a conversation names it.
 *
 * The page can be open in several tabs. No tab writes what it remembers: each change reads the stored record and
 * writes it in one transaction, so that the changes of all tabs add up. The other tabs are then told.
 */

const STORES = ["conversations", "documents", "settings"];
const SETTINGS_ID = "settings";

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("nanovllm", 1);
    opening.onupgradeneeded = () => {
      for (const name of STORES) opening.result.createObjectStore(name, { keyPath: "id" });
    };
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  return opened;
}

const resultOf = (asked) => new Promise((resolve, reject) => {
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});

/** Run `work`, which gets the stores and awaits only their requests. Return its result once everything is written. */
async function inTransaction(mode, work) {
  const transaction = (await open()).transaction(STORES, mode);
  const written = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const stores = Object.fromEntries(STORES.map((name) => [name, transaction.objectStore(name)]));
  return (await Promise.all([work(stores), written]))[0];
}

// -- news for the other tabs: {type, id} for a conversation, {type} for what concerns all

const channel = new BroadcastChannel("nanovllm");

export const tell = (news) => channel.postMessage(news);

export function onNews(handle) {
  channel.onmessage = ({ data }) => handle(data);
}

// -- conversations

/** Messages of earlier versions of this page have no ids. */
function withIds(record) {
  record?.messages.forEach((message, i) => { message.id ??= `message-${i}`; });
  return record;
}

/** All conversations with something in them, the one that changed last first. */
export async function conversations() {
  const all = await inTransaction("readonly", (stores) => resultOf(stores.conversations.getAll()));
  const kept = all.filter(({ messages, documentIds, title }) => messages.length || documentIds.length || title);
  return kept.sort((a, b) => b.changedMs - a.changedMs);
}

/** Return the conversation of this id, or undefined. */
export async function conversation(id) {
  return withIds(await inTransaction("readonly", (stores) => resultOf(stores.conversations.get(id))));
}

/**
 * Apply a change to the stored conversation, and return it as it is then. fresh: the record to begin with if the
 * conversation was never stored; without it, one that is not there was deleted, and undefined is returned. added:
 * documents to keep with it.
 */
export async function update(id, apply, { fresh, added = [] }) {
  const changed = await inTransaction("readwrite", async (stores) => {
    const record = withIds(await resultOf(stores.conversations.get(id))) ?? fresh;
    if (record === undefined) return undefined;
    const numDocuments = record.documentIds.length;
    apply(record);
    record.version = (record.version ?? 0) + 1;
    for (const document of added) {
      if (await resultOf(stores.documents.getKey(document.id)) === undefined) stores.documents.put(document);
    }
    stores.conversations.put(record);
    if (record.documentIds.length < numDocuments) await deleteUnnamedDocuments(stores);
    return record;
  });
  if (changed) tell({ type: "changed", id });
  return changed;
}

export async function deleteConversation(id) {
  await inTransaction("readwrite", async (stores) => {
    stores.conversations.delete(id);
    await deleteUnnamedDocuments(stores);
  });
  tell({ type: "deleted", id });
}

// -- documents

/** The documents of these ids, in their order. */
export async function documents(ids) {
  const found = await inTransaction("readonly", (stores) =>
    Promise.all(ids.map((id) => resultOf(stores.documents.get(id)))));
  return found.filter(Boolean);
}

/** Keep what the server has counted, unless the document was deleted meanwhile. */
export async function saveTokens({ id, tokens, isEstimate }) {
  await inTransaction("readwrite", async (stores) => {
    const document = await resultOf(stores.documents.get(id));
    if (document) stores.documents.put({ ...document, tokens, isEstimate });
  });
}

async function deleteUnnamedDocuments(stores) {
  const named = new Set((await resultOf(stores.conversations.getAll())).flatMap(({ documentIds }) => documentIds));
  for (const id of await resultOf(stores.documents.getAllKeys())) if (!named.has(id)) stores.documents.delete(id);
}

// -- settings

/** Empty at first. */
export async function settings() {
  return (await inTransaction("readonly", (stores) => resultOf(stores.settings.get(SETTINGS_ID)))) ?? {};
}

/** changes: new values by name, undefined for a setting that is now empty. Other settings stay as they are. */
export async function saveSettings(changes) {
  await inTransaction("readwrite", async (stores) => {
    stores.settings.put({ ...await resultOf(stores.settings.get(SETTINGS_ID)), ...changes, id: SETTINGS_ID });
  });
  tell({ type: "settings" });
}
