// Conversations in IndexedDB, and word of every change to the other tabs.
//
// A conversation is {id, title, created, updated, current, deleted}; `current` is the message whose
// branch is shown. A message is a record of its own, so that two tabs which add to a conversation
// lose nothing; a record is changed inside one transaction, never read first and written later.
// Knows nothing of the page or of the server.

// A browser that gives no storage keeps conversations as long as the page is open.

const UNDO_SECONDS = 60;
const UNFINISHED = "ggpy.unfinished.";

let database = null; // or none, and then memory
let settle;
const opened = new Promise((resolve) => (settle = resolve));
const channel = "BroadcastChannel" in window ? new BroadcastChannel("ggpy") : null;
const listeners = new Set();
const owned = new Set(); // ids of messages that this tab is receiving
const claims = new Map(); // id of a message -> what to call when another tab says it is its own

/** `listen({conversation})` after a change by another tab. */
export function onOtherTab(listen) {
  listeners.add(listen);
}

function tell(conversation) {
  channel?.postMessage({ kind: "changed", conversation });
}

channel?.addEventListener("message", ({ data }) => {
  if (data.kind === "changed") for (const listen of listeners) listen(data);
  if (data.kind === "whose" && owned.has(data.id)) channel.postMessage({ kind: "mine", id: data.id });
  if (data.kind === "mine") claims.get(data.id)?.();
});

/** As much of an object store as is used here, in memory. */
class Memory {
  records = new Map();

  get(id) {
    return this.records.get(id);
  }

  getKey(id) {
    return this.records.has(id) ? id : undefined;
  }

  getAll() {
    return [...this.records.values()];
  }

  put(record) {
    this.records.set(record.id, structuredClone(record));
  }

  delete(id) {
    this.records.delete(id);
  }

  index(name) {
    const those = (value) => this.getAll().filter((record) => record[name] === value);
    return { getAll: those, getAllKeys: (value) => those(value).map(({ id }) => id) };
  }
}

const memory = [new Memory(), new Memory()];

function promised(request) {
  if (!(request instanceof IDBRequest)) return request; // of a Memory
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Runs `work(conversations, messages)` in a transaction; its result once that is durable. */
async function transaction(mode, work) {
  await opened;
  if (!database) return work(...memory);
  const t = database.transaction(["conversations", "messages"], mode);
  const done = new Promise((resolve, reject) => {
    t.oncomplete = resolve;
    t.onabort = () => reject(t.error ?? new Error("The browser could not store the conversation."));
  });
  done.catch(() => {}); // reported below, even where `work` fails first
  const result = await work(t.objectStore("conversations"), t.objectStore("messages"));
  await done;
  return result;
}

/** Throws what the browser says if it stores nothing; all else works then, too. */
export async function openStore() {
  try {
    database = await openDatabase();
  } finally {
    settle();
  }
  database.onversionchange = () => database.close();
  await Promise.allSettled([takeUnfinished(), purge()]); // a full storage is told when it matters
}

function openDatabase() {
  const request = indexedDB.open("ggpy", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    const messages = request.result.createObjectStore("messages", { keyPath: "id" });
    messages.createIndex("conversation", "conversation");
  };
  return promised(request);
}

/** All conversations, the last one changed first. */
export async function listConversations() {
  const all = await transaction("readonly", (conversations) => promised(conversations.getAll()));
  return all.filter((c) => !c.deleted).sort((a, b) => b.updated - a.updated);
}

export async function getConversation(id) {
  const found = await transaction("readonly", (conversations) => promised(conversations.get(id)));
  return found && !found.deleted ? found : null;
}

export function getMessages(conversation) {
  return transaction("readonly", (_, messages) =>
    promised(messages.index("conversation").getAll(conversation)));
}

/** Adds messages, and the conversation if it is new; the last message is the current one. */
export async function addMessages(conversation, added) {
  await transaction("readwrite", async (conversations, messages) => {
    const stored = (await promised(conversations.get(conversation.id))) ?? conversation;
    conversations.put({ ...stored, updated: Date.now(), current: added.at(-1).id });
    for (const message of added) messages.put(message);
  });
  tell(conversation.id);
}

export async function changeConversation(id, change) {
  await transaction("readwrite", async (conversations) => {
    const stored = await promised(conversations.get(id));
    if (stored) conversations.put({ ...stored, ...change });
  });
  tell(id);
}

/** Stores a message of which this tab is the only writer, as long as its conversation exists. */
export async function putMessage(message) {
  await transaction("readwrite", async (conversations, messages) => {
    if (await promised(conversations.getKey(message.conversation))) messages.put(message);
  });
  tell(message.conversation);
}

async function changeMessage(id, change) {
  return transaction("readwrite", async (_, messages) => {
    const stored = await promised(messages.get(id));
    const changed = stored && change(stored);
    if (changed) messages.put(changed);
    return changed;
  });
}

/** Conversations that contain a text, with the place: [{id, excerpt}]. */
export async function searchMessages(text) {
  const wanted = text.toLowerCase();
  const all = await transaction("readonly", (_, messages) => promised(messages.getAll()));
  const found = new Map();
  for (const { conversation, content } of all) {
    const at = content.toLowerCase().indexOf(wanted);
    if (at < 0 || found.has(conversation)) continue;
    const from = Math.max(0, at - 24);
    const excerpt = content.slice(from, at + wanted.length + 48).replace(/\s+/g, " ");
    found.set(conversation, from ? `…${excerpt}` : excerpt);
  }
  return found;
}

/** A deleted conversation can be restored for a minute; where the storage is full, it is gone at once. */
export async function deleteConversation(id) {
  try {
    await changeConversation(id, { deleted: Date.now() });
  } catch {
    await transaction("readwrite", (conversations, messages) => erase(id, conversations, messages));
    tell(id);
  }
}

async function erase(id, conversations, messages) {
  conversations.delete(id);
  const keys = await promised(messages.index("conversation").getAllKeys(id));
  for (const key of keys) messages.delete(key);
}

export function restoreConversation(id) {
  return changeConversation(id, { deleted: 0 });
}

async function purge() {
  const old = Date.now() - UNDO_SECONDS * 1000;
  await transaction("readwrite", async (conversations, messages) => {
    for (const { id, deleted } of await promised(conversations.getAll())) {
      if (deleted && deleted <= old) await erase(id, conversations, messages);
    }
  });
}

/** Everything, or one conversation: [{...conversation, messages}]. */
export async function readAll(only = null) {
  return transaction("readonly", async (conversations, messages) => {
    const all = (await promised(conversations.getAll())).filter((c) => !c.deleted);
    const wanted = only ? all.filter((c) => c.id === only) : all;
    const index = messages.index("conversation");
    const lists = await Promise.all(wanted.map((c) => promised(index.getAll(c.id))));
    return wanted.map((c, i) => ({ ...c, messages: lists[i] }));
  });
}

/** Adds what is missing; a message that is stored already stays as it is. */
export async function mergeAll(given) {
  await transaction("readwrite", async (conversations, messages) => {
    for (const { messages: added, ...conversation } of given) {
      const stored = await promised(conversations.get(conversation.id));
      conversations.put({ ...conversation, ...stored, deleted: 0 });
      for (const message of added) {
        if (!(await promised(messages.getKey(message.id)))) messages.put(message);
      }
    }
  });
  tell(null);
}

// Answers that are being received

export function own(id) {
  owned.add(id);
}

export function disown(id) {
  owned.delete(id);
  keep(UNFINISHED + id, null);
}

/** Keeps what has arrived when the page goes away: a database is too slow for that moment. */
export function keepUnfinished(message) {
  // Where it is too long for this storage, the copy of a moment ago is in the database.
  keep(UNFINISHED + message.id, JSON.stringify(message));
}

async function takeUnfinished() {
  for (const key of keysKept().filter((name) => name.startsWith(UNFINISHED))) {
    const found = parsed(kept(key));
    keep(key, null);
    if (!found) continue;
    await changeMessage(found.id, (m) => m.state === "streaming" && { ...found, state: "interrupted" });
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** Whether another tab is receiving this message; it answers at once, if there is one. */
function isReceivedElsewhere(id) {
  if (!channel) return Promise.resolve(false);
  return new Promise((resolve) => {
    const end = (answer) => (claims.delete(id), resolve(answer));
    claims.set(id, () => end(true));
    channel.postMessage({ kind: "whose", id });
    setTimeout(() => end(false), 400);
  });
}

/** Marks an answer as interrupted if the tab that received it is gone; whether it was. */
export async function interruptOrphan(message) {
  if (message.state !== "streaming" || owned.has(message.id)) return false;
  if (await isReceivedElsewhere(message.id)) return false;
  const change = (m) => m.state === "streaming" && { ...m, state: "interrupted" };
  return Boolean(await changeMessage(message.id, change));
}

// Small values

const unkept = new Map(); // what the browser does not take, as long as the page is open

/** Keeps a text; null forgets it. */
export function keep(key, text, area = "localStorage") {
  unkept.delete(key);
  try {
    if (text !== null) return void window[area].setItem(key, text);
    localStorage.removeItem(key);
    sessionStorage.removeItem(key);
  } catch {
    unkept.set(key, text);
  }
}

/** A text that is kept in this tab or in the browser, or null. */
export function kept(key) {
  if (unkept.has(key)) return unkept.get(key);
  try {
    return sessionStorage.getItem(key) ?? localStorage.getItem(key);
  } catch {
    return null;
  }
}

function keysKept() {
  try {
    return Object.keys(localStorage);
  } catch {
    return [];
  }
}
