// The system prompt, how answers are sampled, the theme, the API key: kept per browser.

import { forgetKey, storedKey } from "./api.js";
import { byId, el, setIcon } from "./dom.js";
import { keep, kept } from "./store.js";

const STORED = "ggpy.settings";
const THEMES = ["auto", "light", "dark"];

// name of the request's field, label, smallest, largest, step, what it does
const SAMPLING = [
  ["temperature", "Temperature", 0, 5, 0.05, "0 takes the likeliest token; more is more varied"],
  ["top_k", "Top k", 0, 1000, 1, "the k likeliest tokens alone; 0 is all"],
  ["top_p", "Top p", 0, 1, 0.01, "the likeliest tokens that have this probability together"],
  ["min_p", "Min p", 0, 1, 0.01, "least probability, relative to the likeliest token"],
  ["repeat_penalty", "Repeat penalty", 0, 5, 0.05, "above 1 makes repetition less likely"],
  ["max_tokens", "Max tokens", 1, 1000000, 1, "an answer ends there"],
  ["seed", "Seed", 0, 4294967295, 1, "the same seed repeats an answer"],
];

function read() {
  try {
    return JSON.parse(kept(STORED)) ?? {};
  } catch {
    return {};
  }
}

/** {system, sampling}: what a request says; fields that are empty or out of range are left out. */
export function currentSettings() {
  const stored = read();
  const sampling = {};
  for (const [name, , low, high, step] of SAMPLING) {
    const value = Number.parseFloat(stored[name]);
    const counts = step < 1 || Number.isInteger(value);
    if (counts && value >= low && value <= high) sampling[name] = value;
  }
  return { system: (stored.system ?? "").trim(), sampling };
}

function change(name, value) {
  keep(STORED, JSON.stringify({ ...read(), [name]: value }));
}

function fields(info) {
  const stored = read();
  const system = el("textarea", { id: "set-system", rows: 4, placeholder: "Empty: none", dir: "auto" });
  system.value = stored.system ?? "";
  system.addEventListener("input", () => change("system", system.value));
  const none = info?.caps?.supports_system_role === false;
  const note = none ? "The template of this model has no system role: the server may refuse it." : "";
  return [
    el("label", { class: "wide" }, el("span", { text: "System prompt" }), system,
      note ? el("small", { text: note }) : null),
    el("div", { class: "grid" }, ...SAMPLING.map((row) => field(row, stored))),
  ];
}

function field([name, label, min, max, step, told], stored) {
  const attributes = { id: `set-${name}`, type: "number", min, max, step, inputmode: "decimal" };
  const input = el("input", { ...attributes, placeholder: "default", "aria-describedby": `say-${name}` });
  input.value = stored[name] ?? "";
  input.addEventListener("input", () => change(name, input.value));
  const says = el("small", { id: `say-${name}`, text: told });
  return el("label", {}, el("span", { text: label }), input, says);
}

/** Wires the settings' dialog and the theme's button. info(): what is known of the server. */
export function setUpSettings(info) {
  const dialog = byId("settings");
  const show = () => byId("fields").replaceChildren(...fields(info()));
  byId("open-settings").addEventListener("click", () => {
    show();
    byId("forget-key").hidden = !storedKey();
    dialog.showModal();
  });
  byId("reset-settings").addEventListener("click", () => {
    keep(STORED, null);
    show();
  });
  byId("forget-key").addEventListener("click", () => {
    forgetKey();
    byId("forget-key").hidden = true;
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  setUpTheme();
}

function setUpTheme() {
  const button = byId("theme");
  const stored = () => kept("ggpy.theme") ?? "auto";
  const show = () => {
    const theme = THEMES.includes(stored()) ? stored() : "auto";
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const label = `Theme: ${theme === "auto" ? "system" : theme}`;
    button.setAttribute("aria-label", label);
    button.title = label;
    setIcon(button, theme);
  };
  button.addEventListener("click", () => {
    keep("ggpy.theme", THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length]);
    show();
  });
  window.addEventListener("storage", show);
  show();
}

/** Asks for the API key: {key, keep}, or null. */
export function askKey(reason) {
  const dialog = byId("key");
  byId("key-note").textContent = reason;
  byId("key-value").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  byId("key-value").focus();
  byId("key-cancel").onclick = () => dialog.close("");
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (document.activeElement === document.body) byId("question").focus();
      const key = byId("key-value").value.trim();
      const given = dialog.returnValue === "ok" && key;
      resolve(given ? { key, keep: byId("key-keep").checked } : null);
    }, { once: true });
  });
}
