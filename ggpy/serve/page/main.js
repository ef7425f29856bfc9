// The page: which conversation and which branch is shown, and what the buttons do.

import { Answer, emptyAnswer } from "./answer.js";
import { onKeyNeeded, serverInfo } from "./api.js";
import { Composer } from "./composer.js";
import { announce, byId, composes, cut, el, newId, setIcon, toast } from "./dom.js";
import { askKey, currentSettings, setUpSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { Thread } from "./thread.js";
import { fileName, fromJson, save, toJson } from "./transfer.js";
import { leafBelow, pathTo, siblingsOf } from "./tree.js";

const IDEAS = [
  ["Explain", "How does a KV cache make a language model faster?"],
  ["Write", "Write a Python function that merges overlapping intervals, with tests."],
  ["Derive", "Derive the formula for the roots of a quadratic equation."],
  ["Compare", "Compare TCP and UDP in a table."],
];

const DRAFT = "ggpy.draft";

let conversation = null; // the one that is shown; null is a new one
let messages = []; // of it, on all branches
let current = null; // id of the message at the end of the branch that is shown
let info = null; // of the server
const touch = window.matchMedia("(hover: none)"); // there a focus opens the keyboard
const live = new Map(); // id of an answer that this tab receives -> Answer
const changed = new Set(); // answers to be drawn in the next frame

const actions = {
  newChat: () => go(null),
  send: (text) => ask(text, current),
  edited: (question, text) => ask(text, question.parent),
  regenerate: (reply) => answer(reply.parent),
  retry: (reply) => answer(reply.parent, reply.content ? newId() : reply.id),
  choose,
  stop: stopShown,
  editLast: () => thread.edit(shownPath().findLast((m) => m.role === "user")?.id),
  left: () => (info?.nContext ? Math.max(0, info.nContext - contextUsed()) : null),
  isLive: (id) => [...live.values()].some(({ record }) => record.conversation === id),
  changed: (id) => afterChange(id),
  lost: () => connect(),
};
const thread = new Thread(byId("thread"), byId("scroll"), actions);
const composer = new Composer(actions);
const sidebar = new Sidebar(actions);

function shownPath() {
  return pathTo(messages, current);
}

// What is shown

/** Opens a conversation, or a new one (null), as a step of the browser's history. */
function go(id) {
  const hash = id ? `#c=${id}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
  if (sidebar.isDrawerOpen) sidebar.drawer(false);
  return route();
}

async function route() {
  const id = /^#c=([\w-]+)$/.exec(location.hash)?.[1] ?? null;
  thread.speak(false);
  await open(id);
  thread.toEnd();
  if (!touch.matches) composer.focus();
}

let turns = 0; // what is opened last wins, even if it is found first

async function open(id) {
  const turn = ++turns;
  const found = id ? await store.getConversation(id) : null;
  if (turn !== turns) return;
  if (id && !found) history.replaceState(null, "", location.pathname + location.search);
  await take(found, turn);
  sidebar.open = conversation?.id ?? null;
  sidebar.show();
}

/** Shows a conversation as it is stored, with the answers that arrive here. */
async function take(found, turn) {
  const stored = found ? await store.getMessages(found.id) : [];
  if (turn !== turns) return;
  const again = found && conversation?.id === found.id;
  const known = new Set(stored.map((m) => m.id));
  const asked = again ? messages.filter((m) => !known.has(m.id)) : []; // a moment ago, here
  const wanted = again && actions.isLive(found.id) ? current : found?.current;
  conversation = found;
  messages = [...stored.map((m) => live.get(m.id)?.record ?? m), ...asked];
  current = messages.some((m) => m.id === wanted) ? wanted : leafBelow(messages, null);
  draw();
  watchOthers();
}

let watching = null;

/** Where another tab receives an answer and nothing new has come for a second, asks whether it lives. */
function watchOthers() {
  clearTimeout(watching);
  const others = messages.filter((m) => m.state === "streaming" && !live.has(m.id));
  if (!others.length) return;
  watching = setTimeout(async () => {
    const gone = await Promise.all(others.map(store.interruptOrphan));
    if (gone.includes(true)) reload();
    else watchOthers();
  }, 1000);
}

/** Reads the shown conversation again, if it is this one (null: whichever). */
async function reload(id = null) {
  if (!conversation || (id && id !== conversation.id)) return;
  const turn = turns;
  const shown = conversation.id;
  const found = await store.getConversation(shown);
  if (turn !== turns) return;
  if (found) return void (await take(found, turn));
  live.forEach((made) => made.record.conversation === shown && made.stop());
  await go(null); // it was deleted
}

function draw() {
  const path = shownPath();
  thread.show(path, siblingsOf(messages));
  byId("welcome").hidden = path.length > 0;
  byId("export-one").hidden = !conversation;
  document.title = conversation ? `${conversation.title} – ggpy` : "ggpy";
  const last = path.at(-1);
  composer.setBusy(last?.state === "streaming", live.has(last?.id));
  drawContext();
}

function contextUsed() {
  const counted = shownPath().findLast((m) => m.role === "assistant" && m.prompt !== null);
  return counted ? (counted.prompt ?? 0) + (counted.generated ?? 0) : 0;
}

function drawContext() {
  const used = contextUsed();
  const total = info?.nContext;
  byId("context").hidden = !total || !used;
  if (!total) return;
  const share = Math.min(100, (100 * used) / total);
  const number = (n) => n.toLocaleString("en");
  byId("context-arc").setAttribute("stroke-dasharray", `${share} 100`);
  byId("context-text").textContent = `${number(used)} / ${number(total)}`;
  const left = number(Math.max(0, total - used));
  byId("context").title = `${number(used)} tokens of the context are used, ${left} are left`;
  byId("context").setAttribute("aria-label", byId("context").title);
  byId("context").classList.toggle("full", share > 90);
}

function drawLater(record) {
  if (!changed.size) requestAnimationFrame(drawChanged);
  changed.add(record);
}

function drawChanged() {
  for (const record of changed) thread.update(record);
  changed.clear();
  drawContext();
}

/** Chooses another version of a message, with the newest branch below it. */
async function choose(message) {
  const chosen = leafBelow(messages, message.id);
  await store.changeConversation(conversation.id, { current: chosen }).catch(notStored);
  current = chosen;
  const arrow = document.activeElement?.ariaLabel;
  thread.speak(false);
  draw();
  thread.focusArrow(message.id, arrow);
}

// Questions and answers

/** Asks a question below a message; null begins a conversation, or another beginning of it. */
async function ask(text, parent) {
  const now = Date.now();
  const title = cut(text.replace(/\s+/g, " "), 60);
  const fresh = !conversation;
  conversation ??= { id: newId(), title, created: now, updated: now, current: null, deleted: 0 };
  const about = { id: newId(), conversation: conversation.id, parent, created: now };
  const question = { ...about, role: "user", content: text, state: "done" };
  if (fresh) history.pushState(null, "", `#c=${conversation.id}`);
  await answer(question.id, newId(), question);
}

/** Has the server answer the message `parent`; with a new question, that is stored too. */
async function answer(parent, id = newId(), question = null) {
  const record = emptyAnswer(id, conversation.id, parent, info?.model ?? "");
  const added = question ? [question, record] : [record];
  const others = messages.filter((m) => m.id !== id);
  messages = [...others, ...added];
  current = id;
  const made = new Answer(record, pathTo(messages, parent), currentSettings(), drawLater);
  const pressed = byId("thread").contains(document.activeElement); // a button that goes now
  live.set(id, made);
  thread.speak(true);
  draw();
  thread.toEnd();
  if (pressed && !touch.matches) composer.focus();
  announce("The answer arrives");
  await store.addMessages(conversation, added).catch(notStored);
  sidebar.open = record.conversation === conversation?.id ? record.conversation : sidebar.open;
  sidebar.later(0);
  await made.run().catch(notStored);
  live.delete(id);
  changed.delete(record);
  ended(record);
}

/** The answer goes on all the same. */
function notStored(error) {
  toast(`Not stored: ${error.message || error.name}. Copy what you need before you close the page.`);
}

function ended(record) {
  if (record.conversation === conversation?.id) draw();
  thread.update(record);
  sidebar.later(0);
  announce(record.state === "done" ? "The answer is complete" : record.error?.message ?? "Stopped");
  if (record.state === "done") wake();
  const other = info && record.model !== info.model; // the server was started with another model
  if (other || record.error?.status === 0 || record.error?.status === 503) connect();
}

function stopShown() {
  live.get(current)?.stop();
}

/** After a conversation was renamed or deleted here. */
async function afterChange(id) {
  const found = await store.getConversation(id);
  if (!found) live.forEach((made) => made.record.conversation === id && made.stop());
  if (id === conversation?.id) await reload(id);
}

// Files

async function exportTo(name, only) {
  save(toJson(await store.readAll(only)), name);
}

async function importFrom(file) {
  try {
    const given = fromJson(await file.text());
    await store.mergeAll(given);
    toast(given.length === 1 ? "Imported 1 conversation." : `Imported ${given.length} conversations.`);
    sidebar.show();
    reload();
  } catch (error) {
    toast(error.message);
  }
}

// The server

let connecting = false;
let wake = () => {}; // lets connect() try again at once

/** Learns which model there is; tries again until the server answers. */
async function connect() {
  if (connecting) return;
  connecting = true;
  for (let wait = 1000; ; wait = Math.min(2 * wait, 8000)) {
    try {
      info = await serverInfo();
      break;
    } catch (error) {
      banner(error.status === 503 ? `${error.message} …` : error.message);
      await new Promise((resolve) => {
        wake = resolve;
        if (error.status !== 401) setTimeout(resolve, wait);
      });
    }
  }
  connecting = false;
  banner(null);
  byId("model").textContent = info.model;
  byId("model").title = info.nContext ? `${info.model}: context of ${info.nContext.toLocaleString("en")} tokens` : info.model;
  byId("about").textContent = `${info.model} is ready. Conversations stay in this browser.`;
  drawContext();
  thread.renderAgain();
}

function banner(text) {
  const shown = byId("banner");
  shown.hidden = text === null;
  if (text === shown.firstChild?.textContent) return;
  const retry = el("button", { type: "button", class: "link", text: "Try again", on: { click: () => wake() } });
  shown.replaceChildren(...(text === null ? [] : [el("span", { text }), retry]));
}

// The beginning

function keyboard(event) {
  if (composes(event) || document.querySelector("dialog[open]")) return;
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    actions.newChat();
  } else if (event.key === "Escape") {
    if (sidebar.isDrawerOpen) sidebar.drawer(false);
    else stopShown();
  }
}

function wire() {
  for (const node of document.querySelectorAll("[data-icon]")) setIcon(node, node.dataset.icon);
  setUpSettings(() => info);
  onKeyNeeded(askKey);
  document.addEventListener("keydown", keyboard);
  window.addEventListener("popstate", route);
  window.addEventListener("pagehide", () => {
    live.forEach((made) => made.keep());
    store.keep(DRAFT, composer.text || null, "sessionStorage");
  });
  if (!composer.text) composer.fill(store.kept(DRAFT) ?? "");
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    composer.focus();
  });
  byId("to-end").addEventListener("click", () => {
    thread.toEnd();
    if (!touch.matches) composer.focus(); // the button goes
  });
  byId("export").addEventListener("click", () => exportTo("ggpy-conversations.json", null));
  byId("export-one").addEventListener("click", () => exportTo(fileName(conversation.title), conversation.id));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", ({ target }) => {
    if (target.files[0]) importFrom(target.files[0]);
    target.value = "";
  });
  byId("ideas").append(...IDEAS.map(([kind, text]) => {
    const click = () => (composer.fill(text), composer.focus());
    return el("button", { type: "button", on: { click } }, el("b", { text: kind }), el("span", { text }));
  }));
  byId("composer").addEventListener("click", (event) => event.target === event.currentTarget && composer.focus());
}

async function start() {
  wire();
  connect();
  try {
    await store.openStore();
  } catch (error) {
    toast(`This browser stores no conversations: ${error.message}`, null, null, 3600);
  }
  let soon = null;
  store.onOtherTab(({ conversation: id }) => {
    sidebar.later();
    if (id && id !== conversation?.id) return;
    soon ??= setTimeout(() => ((soon = null), reload()), 30);
  });
  await route();
}

start();
