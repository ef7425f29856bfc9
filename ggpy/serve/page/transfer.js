// Conversations as a JSON file and back. A file may come from anywhere: every field is checked.

import { cut, newId } from "./dom.js";

const FORMAT = "ggpy-conversations";
const ROLES = ["user", "assistant"];

export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** Offers a text as a file to be saved. */
export function save(text, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A name for the file of a conversation: letters and digits of its title. */
export function fileName(title) {
  const plain = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${plain.slice(0, 40) || "conversation"}.json`;
}

/** Conversations of a file. Throws an Error that says what is wrong with it. */
export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error("The file has no conversations: import what this page exported.");
  }
  if (data.version !== 1) {
    throw new Error(`The file has version ${data.version}; this page reads version 1.`);
  }
  return data.conversations.map(conversation);
}

function conversation(given, number) {
  if (!Array.isArray(given?.messages)) {
    throw new Error(`Conversation ${number + 1} of the file has no list of messages.`);
  }
  const id = key(given.id) ?? newId();
  const created = time(given.created);
  return {
    id,
    title: cut(string(given.title).trim(), 200) || "Imported",
    created,
    updated: time(given.updated, created),
    current: key(given.current),
    messages: given.messages.map((m, i) => message(m, id, `${i + 1} of conversation ${number + 1}`)),
  };
}

function message(given, conversation, where) {
  if (!ROLES.includes(given?.role) || typeof given.content !== "string") {
    throw new Error(`Message ${where} needs a role (user or assistant) and content.`);
  }
  const made = {
    id: key(given.id) ?? newId(),
    conversation,
    parent: key(given.parent),
    role: given.role,
    content: given.content,
    created: time(given.created),
    state: given.state === "streaming" ? "interrupted" : state(given.state),
  };
  if (given.role === "user") return made;
  return {
    ...made,
    reasoning: string(given.reasoning),
    calls: (Array.isArray(given.calls) ? given.calls : []).map(call),
    model: string(given.model),
    finish: string(given.finish),
    prompt: number(given.prompt),
    generated: number(given.generated),
    speed: number(given.speed),
    first: number(given.first),
    thought: number(given.thought),
    error: given.error ? { message: string(given.error.message), status: 0 } : null,
  };
}

function call(given) {
  const text = { name: string(given?.name), arguments: string(given?.arguments) };
  return { id: string(given?.id), ...text };
}

function state(value) {
  return ["done", "stopped", "interrupted", "failed"].includes(value) ? value : "done";
}

function string(value) {
  return typeof value === "string" ? value : "";
}

function key(value) {
  return typeof value === "string" && /^[\w-]{1,64}$/.test(value) ? value : null;
}

function number(value) {
  return Number.isFinite(value) ? value : null;
}

function time(value, otherwise = Date.now()) {
  return Number.isFinite(value) ? value : otherwise;
}
