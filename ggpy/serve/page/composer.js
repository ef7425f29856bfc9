// The box where questions are written. Knows nothing of the conversation: it calls what it is given.

import { countTokens } from "./api.js";
import { byId, composes, count } from "./dom.js";

const COUNT_AFTER = 500; // ms without a key

export class Composer {
  /** actions: {send(text), stop(), editLast(), left()}; left(): tokens of the context, or null. */
  constructor(actions) {
    this.actions = actions;
    this.area = byId("question");
    this.busy = false;
    this.area.addEventListener("input", () => this.changed());
    this.area.addEventListener("keydown", (event) => this.key(event));
    byId("stop").addEventListener("click", () => actions.stop());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  key(event) {
    if (composes(event)) return;
    if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.altKey) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.area.value) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  send() {
    const text = this.area.value.trim();
    if (!text || this.busy) return;
    this.fill("");
    this.actions.send(text);
  }

  get text() {
    return this.area.value;
  }

  fill(text) {
    this.area.value = text;
    this.changed();
  }

  focus() {
    this.area.focus();
  }

  /** Whether an answer of this conversation arrives: then there is "stop" instead of "send". */
  setBusy(busy, stoppable) {
    this.busy = busy;
    const focused = [byId("stop"), byId("send")].includes(document.activeElement);
    byId("stop").hidden = !stoppable;
    byId("send").hidden = stoppable;
    if (focused) this.area.focus();
    this.changed();
  }

  changed() {
    const { area } = this;
    byId("send").disabled = this.busy || !area.value.trim();
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, 260)}px`;
    if (area.value !== this.counted) this.countLater();
  }

  countLater() {
    clearTimeout(this.timer);
    this.request?.abort();
    this.counted = this.area.value;
    byId("draft-count").textContent = "";
    if (this.counted.length > 40) this.timer = setTimeout(() => this.count(), COUNT_AFTER);
  }

  async count() {
    this.request = new AbortController();
    const text = this.counted;
    const n = await countTokens(text, this.request.signal).catch(() => null);
    if (n === null || text !== this.area.value) return;
    const left = this.actions.left();
    const over = left !== null && n > left;
    const shown = byId("draft-count");
    shown.textContent = over ? `${count(n, "token")}, but ${count(left, "token")} left` : count(n, "token");
    shown.classList.toggle("over", over);
  }
}
