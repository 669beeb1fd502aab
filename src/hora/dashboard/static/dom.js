// DOM helpers. Elements are made of text and attributes only: no text of a run is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, facts = {}, ...children) {
  return fill(document.createElement(name), facts, children);
}

export function svg(name, facts = {}, ...children) {
  return fill(document.createElementNS(SVG, name), facts, children);
}

function fill(node, facts, children) {
  for (const [key, value] of Object.entries(facts)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "text") node.textContent = value;
    else node.setAttribute(key === "className" ? "class" : key, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function $(id) {
  return document.getElementById(id);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

// Make the children match `items`: `make` builds a new one, `update` is called for all; existing nodes are reused.
export function syncChildren(parent, items, key, make, update) {
  const known = parent.horaChildren ?? (parent.horaChildren = new Map());
  const wanted = new Set(items.map(key));
  for (const [name, node] of known) {
    if (!wanted.has(name)) {
      node.remove();
      known.delete(name);
    }
  }
  items.forEach((item, place) => {
    let node = known.get(key(item));
    if (!node) known.set(key(item), (node = make(item)));
    if (parent.children[place] !== node) parent.insertBefore(node, parent.children[place] ?? null);
    update?.(node, item);
  });
}

export async function fetchJson(path, options = {}) {
  const response = await fetch(path, { credentials: "omit", ...options });
  let info = null;
  try {
    info = await response.json();
  } catch {
    throw new Error(`${response.status} without a message`);
  }
  if (!response.ok) throw new Error(info?.error ?? `${response.status}`);
  return info;
}

export function theme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

// The switch in the header; `changed` redraws what has colours of its own.
export function themeSwitch(button, changed) {
  const show = () => {
    button.textContent = theme() === "dark" ? "☀" : "☾";
    button.setAttribute("aria-label", theme() === "dark" ? "Switch to the light theme" : "Switch to the dark theme");
    button.title = button.getAttribute("aria-label");
  };
  button.addEventListener("click", () => {
    const next = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("hora-theme", next); } catch { /* not remembered then */ }
    show();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { show(); changed(); });
  show();
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const PALETTE = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

// The context of a canvas that is so large on the page, cleared; null while it is not shown.
export function clearedContext(canvas, width, height) {
  if (!width || !height) return null;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
