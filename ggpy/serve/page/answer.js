// One answer while it arrives: asks the server, grows the record, stores it four times a second.
// Knows nothing of the page; `changed(record)` is called for every piece.

import { ServerError, streamChat } from "./api.js";
import { disown, keepUnfinished, own, putMessage } from "./store.js";

const STORE_EVERY = 250; // ms

/** A new, empty answer to a message. */
export function emptyAnswer(id, conversation, parent, model) {
  return {
    id, conversation, parent, model,
    role: "assistant", content: "", reasoning: "", calls: [],
    created: Date.now(), state: "streaming", error: null, finish: "",
    prompt: null, generated: null, // tokens
    speed: null, // tokens a second
    first: null, thought: null, // ms until the first token, and of reasoning
  };
}

/** The messages of a request: what was said on the way to the answer. */
function messagesOf(path, system) {
  const messages = [];
  for (const { role, content } of path) {
    const last = messages.at(-1);
    // Behind an answer that never came: chat templates want roles that alternate.
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else if (content) messages.push({ role, content });
  }
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

export class Answer {
  /** path: the messages before it. settings: {system, sampling}. */
  constructor(record, path, settings, changed) {
    this.record = record;
    this.changed = changed;
    this.abort = new AbortController();
    this.body = {
      model: record.model,
      messages: messagesOf(path, settings.system),
      ...settings.sampling,
    };
    this.storing = null;
    this.stopped = false;
    own(record.id);
  }

  stop() {
    this.stopped = true;
    this.abort.abort();
  }

  /** Resolves when the answer is complete, stopped or failed, and stored. */
  async run() {
    this.started = performance.now();
    const state = await this.receive();
    if (this.record.thought === null) this.endThought();
    clearTimeout(this.storing);
    try {
      await putMessage({ ...this.record, state });
    } finally {
      this.record.state = state; // after it is stored: what is shown as complete can be relied on
      disown(this.record.id);
    }
  }

  /** The state in which the answer ends. */
  async receive() {
    try {
      await streamChat(this.body, this.abort.signal, (chunk) => this.take(chunk));
      return "done";
    } catch (error) {
      if (this.stopped || error.name === "AbortError") return "stopped";
      const { status = 0, retryAfter } = error;
      const message = retryAfter ? `${error.message} (try again in ${retryAfter} s)` : error.message;
      const full = error instanceof ServerError && error.isContextFull;
      this.record.error = { message, status, full };
      return "failed";
    }
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    if (choice) this.takeChoice(choice);
    if (chunk.usage) {
      this.record.prompt = chunk.usage.prompt_tokens;
      this.record.generated = chunk.usage.completion_tokens;
    }
    if (chunk.model) this.record.model = chunk.model;
    if (chunk.timings) this.takeTimings(chunk.timings);
    this.storing ??= setTimeout(() => this.store(), STORE_EVERY);
    this.changed(this.record);
  }

  takeChoice({ delta = {}, finish_reason: finish }) {
    const { record } = this;
    const more = delta.content || delta.reasoning_content || delta.tool_calls;
    if (more && record.first === null) record.first = performance.now() - this.started;
    if (delta.reasoning_content) record.reasoning += delta.reasoning_content;
    if (delta.content) {
      if (record.thought === null) this.endThought();
      record.content += delta.content;
    }
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    if (finish) record.finish = finish;
  }

  takeCall({ index = 0, id, function: part = {} }) {
    const calls = this.record.calls;
    calls[index] ??= { id: "", name: "", arguments: "" };
    if (id) calls[index].id = id;
    if (part.name) calls[index].name = part.name;
    calls[index].arguments += part.arguments ?? "";
  }

  takeTimings({ prompt_n: read = 0, cache_n: cached = 0, predicted_n: n, predicted_per_second: speed }) {
    this.record.prompt = read + cached;
    this.record.generated = n ?? this.record.generated;
    if (speed > 0) this.record.speed = speed;
  }

  endThought() {
    if (this.record.reasoning) this.record.thought = performance.now() - this.started;
  }

  async store() {
    this.storing = null;
    // A full disk is told at the end, when it matters.
    await putMessage({ ...this.record }).catch(() => {});
  }

  keep() {
    keepUnfinished(this.record);
  }
}
