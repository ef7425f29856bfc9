// Elements, icons, short texts, the clipboard. Knows nothing of conversations or of the server.

const SVG = "http://www.w3.org/2000/svg";

// Strokes in a square of 24.
const ICONS = {
  auto: "M12 3.5a8.5 8.5 0 1 0 0 17z M12 3.5a8.5 8.5 0 0 1 0 17",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9z M5.5 15H5V4h10v1.5",
  dark: "M20 14.2A8.3 8.3 0 0 1 9.8 4a8.3 8.3 0 1 0 10.2 10.2z",
  down: "M12 5v14M6 13l6 6 6-6",
  download: "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M4.5 19.5h15",
  edit: "M5 19l1-4L16.5 4.5l3 3L9 18z M14 7l3 3",
  left: "M14.5 6l-6 6 6 6",
  light: "M12 8a4 4 0 1 0 0 8a4 4 0 0 0 0-8z M12 2.8v2M12 19.2v2M2.8 12h2M19.2 12h2M5.5 5.5l1.4 1.4M17.1 17.1l1.4 1.4M18.5 5.5l-1.4 1.4M6.9 17.1l-1.4 1.4",
  menu: "M4 7h16M4 12h16M4 17h10",
  plus: "M12 5v14M5 12h14",
  retry: "M19.5 12a7.5 7.5 0 1 1-2.3-5.4M19.8 3.5v4h-4",
  right: "M9.5 6l6 6-6 6",
  search: "M10.5 4.5a6 6 0 1 0 0 12a6 6 0 0 0 0-12z M15 15l5 5",
  sliders: "M4 7.5h9M17 7.5h3M4 16.5h3M11 16.5h9M13 5h4v5h-4z M7 14h4v5H7z",
  stop: "M7.5 7.5h9v9h-9z",
  tool: "M14.5 6.2a4 4 0 0 1 5-1l-2.6 2.6 1.3 2.4 3-.8a4 4 0 0 1-5.4 3.2L8.5 20 5 16.5l7.3-7.2a4 4 0 0 1 2.2-3.1z",
  trash: "M5 7h14M9.5 7V4.5h5V7M7 7l.8 12.5h8.4L17 7",
  up: "M12 19V5M6 11l6-6 6 6",
  upload: "M12 15.5V4.5M7.5 9l4.5-4.5L16.5 9M4.5 19.5h15",
};

/** An element: attributes (`on` for listeners, `text` for its text), then children. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, f] of Object.entries(value)) node.addEventListener(event, f);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that is an icon; its label is also its tooltip. */
export function iconButton(name, label, click, more = {}) {
  const attributes = { type: "button", class: "icon", "aria-label": label, title: label, ...more };
  return el("button", { ...attributes, on: { click } }, icon(name));
}

export function setIcon(node, name) {
  node.querySelector(":scope > svg")?.remove();
  node.prepend(icon(name));
}

export function byId(id) {
  return document.getElementById(id);
}

/** Text for the clipboard, on plain http too, where the browser has no clipboard for scripts. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "unseen" });
  area.value = text;
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("The browser did not copy the text.");
}

/** Shows that a button has copied, or why it has not. */
export async function flash(button, work) {
  try {
    await work;
  } catch (error) {
    return void toast(`Not copied: ${error.message}`);
  }
  const show = (name, label) => (button.querySelector("svg") ? setIcon(button, name) : (button.textContent = label));
  show("check", "Copied");
  announce("Copied");
  setTimeout(() => show("copy", "Copy"), 1500);
}

/** Tells screen readers, the same text again too. */
export function announce(text) {
  byId("announcer").replaceChildren(text);
}

/** Whether a key belongs to an input method; Safari says so by its code alone. */
export function composes(event) {
  return event.isComposing || event.keyCode === 229;
}

/** The first characters of a text, whole ones. */
export function cut(text, length) {
  return [...text].slice(0, length).join("");
}

/** A note at the bottom, with an action if there is one, for some seconds. */
export function toast(text, action = null, run = null, seconds = 8) {
  for (const other of byId("toasts").children) if (!action && other.textContent === text) other.remove();
  const note = el("div", { class: "toast" }, el("span", { text }));
  const close = () => note.remove();
  if (action) {
    const click = () => (close(), run());
    note.append(el("button", { type: "button", class: "link", text: action, on: { click } }));
  }
  note.append(iconButton("close", "Close", close));
  byId("toasts").append(note);
  setTimeout(close, seconds * 1000);
}

export function count(n, noun) {
  return `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
}

/** Milliseconds as "0.42 s", "12 s", "3 min". */
export function duration(ms) {
  if (ms < 9950) return `${(ms / 1000).toFixed(ms < 995 ? 2 : 1)} s`;
  return ms < 99500 ? `${Math.round(ms / 1000)} s` : `${Math.round(ms / 60000)} min`;
}

/** An id that no other tab makes; crypto.randomUUID is missing on plain http. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");
}
