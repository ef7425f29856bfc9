// The list of conversations: search, rename, delete; a drawer where the window is narrow.

import { byId, composes, cut, el, iconButton, toast } from "./dom.js";
import {
  changeConversation, deleteConversation, listConversations, restoreConversation, searchMessages,
} from "./store.js";

const DAY = 24 * 3600 * 1000;

/** The heading under which a conversation stands. */
function groupOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  if (time >= today - 7 * DAY) return "Last 7 days";
  if (time >= today - 30 * DAY) return "Last 30 days";
  return "Older";
}

export class Sidebar {
  /** actions: {newChat(), isLive(id), changed(id)}. */
  constructor(actions) {
    this.actions = actions;
    this.open = null; // id of the conversation that is shown
    this.narrow = window.matchMedia("(max-width: 799px)");
    this.narrow.addEventListener("change", () => this.drawer(false));
    byId("new-chat").addEventListener("click", () => actions.newChat());
    byId("open-sidebar").addEventListener("click", () => this.drawer(true));
    byId("close-sidebar").addEventListener("click", () => this.drawer(false));
    byId("shade").addEventListener("click", () => this.drawer(false));
    byId("search").addEventListener("input", () => this.later(120));
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && event.target.value) {
        event.stopPropagation();
        event.target.value = "";
        this.show();
      }
    });
    this.drawer(false);
  }

  get isDrawerOpen() {
    return this.narrow.matches && document.body.classList.contains("drawer");
  }

  drawer(open) {
    const was = document.body.classList.contains("drawer");
    document.body.classList.toggle("drawer", open);
    byId("sidebar").inert = this.narrow.matches && !open;
    document.querySelector("main").inert = open;
    byId("shade").hidden = !open;
    byId("open-sidebar").setAttribute("aria-expanded", open);
    if (open) byId("new-chat").focus();
    else if (was) byId("open-sidebar").focus();
  }

  /** Shows the list again after some milliseconds, once for all who ask. */
  later(ms = 250) {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.show();
    }, ms);
  }

  async show() {
    const wanted = byId("search").value.trim();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const all = await listConversations();
    const found = wanted ? await searchMessages(wanted) : null;
    if (turn !== this.turn || this.renaming) return;
    const wasShown = this.shown;
    const told = all.map(({ id, title, updated }) => [id, title, groupOf(updated), this.actions.isLive(id)]);
    this.shown = JSON.stringify([told, this.open, found && [...found]]);
    if (this.shown === wasShown) return; // the focus and the mouse stay where they are
    const hit = ({ id, title }) => found.has(id) || title.toLowerCase().includes(wanted.toLowerCase());
    const shown = found ? all.filter(hit) : all;
    const groups = new Map();
    for (const conversation of shown) {
      const name = found ? "Found" : groupOf(conversation.updated);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(this.item(conversation, found?.get(conversation.id)));
    }
    this.draw(groups, found ? "Nothing found." : "No conversations yet.");
  }

  draw(groups, otherwise) {
    const list = byId("conversations");
    const focused = document.activeElement?.closest("#conversations li");
    const href = focused?.querySelector("a")?.getAttribute("href");
    const number = [...list.querySelectorAll("li")].indexOf(focused);
    const part = focused && [...focused.children].indexOf(document.activeElement);
    const parts = [...groups].flatMap(([name, items]) => [
      el("h2", { text: name }),
      el("ul", {}, ...items),
    ]);
    list.replaceChildren(...(parts.length ? parts : [el("p", { class: "none", text: otherwise })]));
    if (!focused) return;
    const links = [...list.querySelectorAll("a")];
    const same = links.find((link) => link.getAttribute("href") === href);
    (same ?? links[Math.min(number, links.length - 1)] ?? byId("new-chat")).focus();
    same?.parentElement.children[part]?.focus(); // buttons can be seen once the link has the focus
  }

  item({ id, title }, excerpt) {
    const current = id === this.open;
    const link = el("a", { href: `#c=${id}`, "aria-current": current ? "page" : null, title },
      el("span", { class: "name", dir: "auto", text: title }),
      excerpt ? el("small", { text: excerpt }) : null);
    if (this.actions.isLive(id)) link.append(el("i", { class: "dot", title: "An answer arrives" }));
    link.addEventListener("click", () => this.narrow.matches && this.drawer(false));
    const item = el("li", {}, link);
    item.append(
      iconButton("edit", `Rename “${title}”`, () => this.rename(item, id, title)),
      iconButton("trash", `Delete “${title}”`, () => this.remove(id, title)),
    );
    return item;
  }

  rename(item, id, title) {
    this.renaming = true;
    this.shown = null;
    const input = el("input", { type: "text", "aria-label": "New name", maxlength: 200 });
    input.value = title;
    const end = async (keep, byKey) => {
      if (!this.renaming) return;
      this.renaming = false;
      const name = input.value.trim();
      if (keep && name && name !== title) await changeConversation(id, { title: name });
      this.actions.changed(id);
      await this.show();
      if (byKey) byId("conversations").querySelector(`a[href="#c=${id}"]`)?.focus();
    };
    input.addEventListener("blur", () => end(true, false));
    input.addEventListener("keydown", (event) => {
      if (composes(event) || !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      end(event.key === "Enter", true);
    });
    item.replaceChildren(input);
    input.select();
  }

  async remove(id, title) {
    await deleteConversation(id);
    this.actions.changed(id);
    await this.show();
    toast(`Deleted “${cut(title, 40)}”.`, "Undo", async () => {
      await restoreConversation(id);
      this.show();
    });
  }
}
