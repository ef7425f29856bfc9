// The server's endpoints: OpenAI's chat with llama.cpp's additions, and its Markdown renderer.
// Addresses are relative to the page, so that a prefix in front of it works.

import { keep, kept } from "./store.js";

const KEY = "ggpy.key";
let askForKey = () => Promise.resolve(null);
let asking = null; // one dialog for all requests that wait for a key

/** What the server or the connection answered instead of what was asked for. */
export class ServerError extends Error {
  constructor(message, status = 0, more = {}) {
    super(message);
    this.status = status; // 0: no answer at all
    this.code = more.code ?? more.type ?? null;
    this.nContext = more.n_ctx ?? null;
    this.nPrompt = more.n_prompt_tokens ?? null;
    this.retryAfter = more.retryAfter ?? null; // seconds
  }

  get isContextFull() {
    const named = this.code === "exceed_context_size_error" || this.nContext !== null;
    return named || (this.status === 400 && /context/i.test(this.message));
  }
}

/** `ask(reason)` returns {key, keep}, or null if the user gives none. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function storedKey() {
  return kept(KEY);
}

export function forgetKey() {
  keep(KEY, null);
}

function keepKey({ key, keep: always }) {
  forgetKey();
  keep(KEY, key, always ? "localStorage" : "sessionStorage");
}

/** A text as the bytes of a header, of which a script names only those of Latin-1. */
function bytesOf(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** asks: whether a key that is missing is asked for, instead of an error. */
async function send(path, body, signal, asks = true) {
  const used = storedKey();
  const headers = used ? { Authorization: bytesOf(`Bearer ${used}`) } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it running?");
  }
  if (response.status === 401 && asks && (await newKey(used))) return send(path, body, signal);
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Whether there is another key than the one that was refused. */
async function newKey(refused) {
  if (storedKey() !== refused && storedKey()) return true;
  asking ??= askForKey(refused ? "The server does not know this key." : "The server asks for a key.");
  const given = await asking;
  asking = null;
  if (given) keepKey(given);
  return Boolean(given);
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let told = {};
  try {
    told = JSON.parse(text).error ?? {};
  } catch {
    told = { message: text.length < 300 && !text.startsWith("<") ? text : "" };
  }
  if (typeof told === "string") told = { message: told };
  const status = `${response.status} ${response.statusText}`.trim();
  const retryAfter = Number.parseInt(response.headers.get("Retry-After"), 10) || null;
  return new ServerError(told.message || `The server answered ${status}.`, response.status, { ...told, retryAfter });
}

/** {model, nContext, caps} of the server. */
export async function serverInfo() {
  const props = await (await send("props")).json();
  const info = {
    model: props.model_alias,
    nContext: props.default_generation_settings?.n_ctx ?? props.n_ctx ?? null,
    caps: props.chat_template_caps ?? {},
  };
  if (!info.model) {
    const models = await (await send("v1/models")).json();
    info.model = models.data?.[0]?.id ?? "model";
  }
  return info;
}

export async function renderMarkdown(text) {
  return (await (await send("render", { text }, undefined, false)).json()).html;
}

export async function countTokens(text, signal) {
  const body = { content: text, add_special: false };
  return (await (await send("tokenize", body, signal, false)).json()).tokens.length;
}

/** Calls `take(chunk)` with every chunk of a streamed chat completion. */
export async function streamChat(body, signal, take) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await send("v1/chat/completions", { ...asked, timings_per_token: true }, signal);
  let ended = false;
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The server failed.", 500, chunk.error);
    ended ||= chunk.choices?.some((choice) => choice.finish_reason) ?? false;
    take(chunk);
  }
  if (!ended) throw new ServerError("The connection was lost before the answer ended.");
}

/** The data of server-sent events. */
async function* eventsOf(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await readOrLost(reader);
    rest += decoder.decode(value, { stream: !done });
    const lines = rest.split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trimStart();
    if (done) return;
  }
}

async function readOrLost(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost before the answer ended.");
  }
}
