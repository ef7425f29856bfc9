// The messages of the branch that is shown. An element is made once for a message and changed in
// place, so that selections, open details and the place in a long text survive. Knows neither
// storage nor how an answer is asked for: `actions` has what its buttons do.

import { renderMarkdown } from "./api.js";
import { byId, composes, copyText, count, duration, el, flash, icon, iconButton } from "./dom.js";

const RENDER_EVERY = 200; // ms, at the least: the server renders the growing answer
const RETRY_RENDER = 3000; // ms
const AT_END = 48; // pixels from the end that count as the end
const BLOCKS = "p, ul, ol, li, blockquote, figure, pre, pre > code, h1, h2, h3, h4";
const rendered = new Map(); // text -> its HTML, of the last texts

let free = 2; // renderings of finished texts at the same time
const waiting = [];

/** HTML of a text; `first` does not wait for its turn. */
async function htmlOf(text, first) {
  if (rendered.has(text)) return rendered.get(text);
  if (!first && free === 0) await new Promise((resolve) => waiting.push(resolve));
  if (!first) free -= 1;
  try {
    const html = await renderMarkdown(text);
    if (!first) rendered.set(text, html);
    if (rendered.size > 300) rendered.delete(rendered.keys().next().value);
    return html;
  } finally {
    if (!first) {
      free += 1;
      waiting.pop()?.(); // the last message first: it is what is looked at
    }
  }
}

/** Makes the children of `host` those of `wanted`; what is equal stays. */
function patch(host, wanted) {
  const old = [...host.childNodes];
  const made = [...wanted.childNodes];
  let i = 0;
  while (i < old.length && i < made.length && old[i].isEqualNode(made[i])) i += 1;
  const both = old[i]?.nodeType === 1 && made[i]?.nodeType === 1;
  if (both && old[i].cloneNode(false).isEqualNode(made[i].cloneNode(false))) {
    patch(old[i], made[i]);
    i += 1;
  }
  for (const node of old.slice(i)) node.remove();
  host.append(...made.slice(i));
}

/** What of `more` is code where `done` ends in a code block: not its language, nor what follows it. */
function codeTail(done, more) {
  const fence = /^\s*(?:`{3}|~{3})/m;
  const lines = done.split("\n");
  if (lines.filter((line) => fence.test(line)).length % 2 === 0) return ""; // it has ended
  const code = fence.test(lines.at(-1)) ? more.split("\n").slice(1).join("\n") : more;
  return code.split(fence)[0];
}

/** A Markdown text: rendered as often as is allowed, with what came since as plain text. */
class Prose {
  /** lost(): called when the server does not answer, or wants a key. */
  constructor(host, lost) {
    Object.assign(this, { host, lost, text: "", done: "", busy: false, timer: null, next: 0, tail: null });
  }

  set(text, live) {
    if (text === this.text && live === this.live) return;
    this.text = text;
    this.live = live;
    this.showTail();
    this.schedule();
  }

  schedule() {
    if (this.busy || this.timer || this.text === this.done) return;
    const wait = Math.max(0, this.next - performance.now());
    this.timer = setTimeout(() => this.render(), wait);
  }

  async render() {
    const text = this.text;
    const start = performance.now();
    this.timer = null;
    this.busy = true;
    this.next = start + RENDER_EVERY;
    try {
      this.paint(text ? await htmlOf(text, this.live) : "");
      this.done = text;
      this.next = Math.max(this.next, start + 4 * (performance.now() - start));
    } catch (error) {
      if ([0, 401].includes(error.status)) this.lost();
      this.host.textContent = this.text;
      this.host.classList.add("plain");
      this.done = this.live ? null : text; // a finished text waits for renderAgain()
      this.tail = null;
      this.next = performance.now() + RETRY_RENDER;
    }
    this.busy = false;
    this.showTail();
    this.schedule();
  }

  /** Tries again what could not be rendered. */
  again() {
    if (!this.host.classList.contains("plain")) return;
    this.done = null;
    this.schedule();
  }

  paint(html) {
    const template = document.createElement("template");
    template.innerHTML = html;
    for (const block of template.content.children) block.dir = "auto"; // Arabic begins at the right
    this.tail?.remove();
    this.tail = null;
    if (this.host.classList.contains("plain")) this.host.replaceChildren();
    this.host.classList.remove("plain");
    patch(this.host, template.content);
  }

  showTail() {
    if (this.host.classList.contains("plain")) {
      this.host.textContent = this.text;
      return;
    }
    const done = this.done ?? "";
    const more = this.text.startsWith(done) ? this.text.slice(done.length) : "";
    const place = more ? this.tailPlace() : null;
    const verbatim = place?.matches("code, .prose");
    const shown = place?.matches("code") ? codeTail(done, more) : more;
    // A new line may begin anything: it waits for its rendering.
    if (!place || (!verbatim && done.endsWith("\n"))) return void this.tail?.remove();
    this.tail ??= document.createTextNode("");
    const space = done.endsWith(" ") ? " " : ""; // which the renderer drops at the end
    this.tail.data = verbatim ? shown : space + more.split("\n")[0];
    if (this.tail.parentNode !== place) place.append(this.tail);
  }

  tailPlace() {
    let node = this.host;
    while (node.lastElementChild?.matches(BLOCKS)) node = node.lastElementChild;
    if (node === this.host) return node.lastElementChild ? null : node;
    return node.matches("p, li, pre > code, h1, h2, h3, h4") ? node : null;
  }
}

export class Thread {
  constructor(root, scroller, actions) {
    this.root = root;
    this.scroller = scroller;
    this.actions = actions;
    this.views = new Map(); // id -> MessageView
    this.atEnd = true;
    scroller.addEventListener("scroll", () => this.noteScroll(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(root);
    new ResizeObserver(() => this.follow()).observe(scroller);
    root.addEventListener("click", (event) => this.copyCode(event));
  }

  /** path: messages. siblings(message): those in its place. */
  show(path, siblings) {
    const wanted = new Set(path.map((m) => m.id));
    for (const [id, view] of this.views) {
      if (wanted.has(id)) continue;
      view.node.remove();
      this.views.delete(id);
    }
    let last = null;
    for (const message of path) {
      const view = this.views.get(message.id) ?? this.add(message);
      view.fill(message, siblings(message));
      const next = last ? last.nextSibling : this.root.firstChild;
      if (next !== view.node) this.root.insertBefore(view.node, next);
      last = view.node;
    }
  }

  add(message) {
    const made = message.role === "user" ? new Question(this.actions) : new Reply(this.actions);
    this.views.set(message.id, made);
    return made;
  }

  update(message) {
    this.views.get(message.id)?.fill(message);
  }

  renderAgain() {
    for (const view of this.views.values()) view.prose?.again();
  }

  edit(id) {
    this.views.get(id)?.edit();
  }

  /** Whether screen readers tell what comes: answers, but not what was said long ago. */
  speak(on) {
    this.root.setAttribute("aria-live", on ? "polite" : "off");
  }

  /** Focuses one of the arrows between versions of a message, that of a label if it can be pressed. */
  focusArrow(id, label) {
    const arrows = [...(this.views.get(id)?.siblings.querySelectorAll("button:enabled") ?? [])];
    (arrows.find((arrow) => arrow.ariaLabel === label) ?? arrows[0])?.focus();
  }

  noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.atEnd = scrollHeight - scrollTop - clientHeight < AT_END;
    byId("to-end").hidden = this.atEnd;
  }

  follow() {
    if (this.atEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
    else this.noteScroll();
  }

  toEnd() {
    this.atEnd = true;
    this.follow();
  }

  copyCode({ target }) {
    const button = target.closest?.("button.copy-code");
    const code = button?.closest("figure")?.querySelector("code");
    if (code) flash(button, copyText(code.textContent));
  }
}

/** What questions and replies have in common: a place among siblings, and copying. */
class MessageView {
  constructor(actions, kind, label) {
    this.actions = actions;
    this.siblings = el("span", { class: "siblings" });
    this.tools = el("footer", {}, this.siblings);
    this.node = el("article", { class: `message ${kind}`, "aria-label": label });
  }

  copyButton() {
    const button = iconButton("copy", "Copy", () => flash(button, copyText(this.message.content)));
    return button;
  }

  fillSiblings(all) {
    const at = all.findIndex((m) => m.id === this.message.id);
    const go = (step) => () => this.actions.choose(all[at + step]);
    this.siblings.replaceChildren();
    if (all.length < 2) return;
    this.siblings.append(
      iconButton("left", "Previous version", go(-1), { disabled: at === 0 }),
      el("span", { text: `${at + 1}/${all.length}`, "aria-label": `Version ${at + 1} of ${all.length}` }),
      iconButton("right", "Next version", go(1), { disabled: at === all.length - 1 }),
    );
  }
}

class Question extends MessageView {
  constructor(actions) {
    super(actions, "question", "You");
    this.text = el("div", { class: "text", dir: "auto" });
    this.tools.append(this.copyButton(), iconButton("edit", "Edit", () => this.edit()));
    this.node.append(this.text, this.tools);
  }

  fill(message, siblings = null) {
    this.message = message;
    this.node.dataset.id = message.id;
    if (this.text.textContent !== message.content) this.text.textContent = message.content;
    if (siblings) this.fillSiblings(siblings);
  }

  edit() {
    if (this.form) return this.form.querySelector("textarea").focus();
    const area = el("textarea", { "aria-label": "Edit the question", rows: 3, dir: "auto" });
    area.value = this.message.content;
    const end = () => {
      this.form.remove();
      this.form = null;
      this.text.hidden = this.tools.hidden = false;
      byId("question").focus();
    };
    const submit = (event) => {
      event?.preventDefault();
      if (!area.value.trim()) return;
      const text = area.value;
      end();
      this.actions.edited(this.message, text);
    };
    const keydown = (event) => {
      if (composes(event)) return;
      if (event.key === "Escape") (event.stopPropagation(), end());
      if (event.key === "Enter" && !event.shiftKey) submit(event);
    };
    area.addEventListener("keydown", keydown);
    const cancel = el("button", { type: "button", class: "plain", text: "Cancel", on: { click: end } });
    const send = el("button", { type: "submit", class: "primary", text: "Send" });
    this.form = el("form", { class: "edit", on: { submit } }, area, el("div", { class: "buttons" }, cancel, send));
    this.text.hidden = this.tools.hidden = true;
    this.node.prepend(this.form);
    area.style.height = `${Math.min(area.scrollHeight + 4, 320)}px`;
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

class Reply extends MessageView {
  constructor(actions) {
    super(actions, "reply", "Answer");
    this.thought = null;
    this.content = el("div", { class: "prose" });
    this.prose = new Prose(this.content, actions.lost);
    this.wait = el("div", { class: "wait", "aria-hidden": "true" }, el("i"), el("i"), el("i"));
    this.calls = el("div", { class: "calls" });
    this.notice = el("div", { class: "notice", hidden: true });
    this.stats = el("span", { class: "stats" });
    const again = iconButton("retry", "Regenerate", () => actions.regenerate(this.message));
    this.buttons = el("span", { class: "actions" }, this.copyButton(), again);
    this.tools.append(this.buttons, this.stats);
    this.node.append(this.content, this.wait, this.calls, this.notice, this.tools);
  }

  fill(message, siblings = null) {
    this.message = message;
    const live = message.state === "streaming";
    this.node.dataset.id = message.id;
    this.node.setAttribute("aria-busy", live);
    this.prose.set(message.content, live);
    this.fillThought(live);
    this.fillCalls();
    this.fillNotice();
    this.wait.hidden = !live || Boolean(message.content || message.reasoning || message.calls?.length);
    this.buttons.hidden = live;
    this.fillStats();
    if (siblings) this.fillSiblings(siblings);
  }

  fillThought(live) {
    const { reasoning, content, thought } = this.message;
    if (!reasoning) {
      this.thought?.remove();
      this.thought = null;
      return;
    }
    if (!this.thought) {
      this.thought = el("details", { class: "thought" }, el("summary", {}, el("span")), el("div", { class: "prose" }));
      this.thinking = new Prose(this.thought.lastChild, this.actions.lost);
      this.thought.addEventListener("toggle", () => this.fillThought(this.message.state === "streaming"));
      this.node.prepend(this.thought);
    }
    const now = live && !content;
    this.thought.classList.toggle("now", now);
    const label = now ? "Thinking…" : thought ? `Thought for ${duration(thought)}` : "Thoughts";
    const shown = this.thought.querySelector("summary span");
    if (shown.textContent !== label) shown.textContent = label;
    if (this.thought.open) this.thinking.set(reasoning, live);
  }

  fillCalls() {
    const calls = (this.message.calls ?? []).filter(Boolean);
    const key = JSON.stringify(calls);
    if (this.shownCalls === key) return;
    this.shownCalls = key;
    this.calls.replaceChildren(...calls.map(callView));
  }

  fillNotice() {
    const { state, error, finish } = this.message;
    const key = `${state} ${finish} ${error?.message}`;
    if (this.shownNotice === key) return;
    this.shownNotice = key;
    const told = noticeOf(this.message, this.actions.left());
    this.notice.hidden = !told;
    this.notice.classList.toggle("error", state === "failed");
    this.notice.replaceChildren(el("span", { text: told ?? "" }));
    if (state === "failed") this.notice.setAttribute("role", "alert");
    else this.notice.removeAttribute("role");
    const button = (text, click) =>
      this.notice.append(el("button", { type: "button", class: "link", text, on: { click } }));
    if (["failed", "interrupted"].includes(state)) {
      button("Try again", () => this.actions.retry(this.message));
    }
    if (error?.full) button("New chat", () => this.actions.newChat());
  }

  fillStats() {
    const { speed, first, generated, model, created } = this.message;
    const parts = [];
    if (speed) parts.push(`${speed.toFixed(speed < 10 ? 2 : speed < 100 ? 1 : 0)} tokens/s`);
    if (first !== null && first !== undefined) parts.push(`first after ${duration(first)}`);
    if (generated) parts.push(count(generated, "token"));
    this.stats.textContent = parts.join(" · ");
    this.stats.title = `${model}, ${new Date(created).toLocaleString()}`;
  }
}

function noticeOf({ state, error, finish, content, reasoning, calls }, left) {
  if (state === "failed") return error?.message ?? "The answer failed.";
  if (state === "interrupted") return "The page was closed before the answer ended.";
  if (state === "stopped") return "Stopped.";
  if (state === "done" && !content && !reasoning && !calls?.length) return "The answer is empty.";
  if (finish !== "length") return null;
  if (left !== null && left < 2) return "The context is full: start a new chat, or edit a question.";
  return "The answer ended at its limit of tokens.";
}

function callView(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // It is still arriving.
  }
  const summary = el("summary", {}, icon("tool"), el("span", { text: `Calls ${call.name}` }));
  return el("details", { class: "call", open: true }, summary, el("pre", { text }));
}
