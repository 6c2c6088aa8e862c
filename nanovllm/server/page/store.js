/**
 * What this browser keeps, in IndexedDB: conversations, the documents they name, and the settings. Nothing of it is
 * sent anywhere but to the server in requests. The API key is not here: see common.js.
 *
 * conversation: {id, title, changedMs, documentIds, messages}. document: {id, name, text, tokens}. The settings are one
 * record. A document is kept as long as a conversation names it.
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

async function records(name, mode) {
  return (await open()).transaction(name, mode).objectStore(name);
}

const get = async (name, id) => resultOf((await records(name, "readonly")).get(id));
const all = async (name) => resultOf((await records(name, "readonly")).getAll());
const put = async (name, record) => resultOf((await records(name, "readwrite")).put(record));
const remove = async (name, id) => resultOf((await records(name, "readwrite")).delete(id));

/** All conversations, the one that changed last first. */
export async function conversations() {
  return (await all("conversations")).sort((a, b) => b.changedMs - a.changedMs);
}

export const saveConversation = (conversation) => put("conversations", conversation);

export async function deleteConversation(id) {
  await remove("conversations", id);
  await deleteUnnamedDocuments();
}

/** The documents of these ids, in their order. */
export async function documents(ids) {
  return (await Promise.all(ids.map((id) => get("documents", id)))).filter(Boolean);
}

export const saveDocument = (document) => put("documents", document);

async function deleteUnnamedDocuments() {
  const named = new Set((await all("conversations")).flatMap(({ documentIds }) => documentIds));
  const ids = await resultOf((await records("documents", "readonly")).getAllKeys());
  for (const id of ids) if (!named.has(id)) await remove("documents", id);
}

/** Empty at first. */
export async function settings() {
  return (await get("settings", SETTINGS_ID)) ?? {};
}

export const saveSettings = (values) => put("settings", { ...values, id: SETTINGS_ID });
