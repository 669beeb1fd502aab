// Panels: events, configuration, histograms, lag and the box that asks the predictor.

import { Bars } from "./bars.js";
import { $, fetchJson, el, syncChildren, setText } from "./dom.js";
import { bytes, duration, number, short, stateWord } from "./format.js";

const ICONS = { joined: "+", left: "−", died: "✕", slow: "▲", even: "=", checkpoint: "◆", restore: "↺", skipped: "⊘", stop: "■", serving: "»", end: "●" };
const MAX_SHOWN = 200;

export function showEvents(list, events) {
  const newest = events.slice(-MAX_SHOWN).reverse();
  syncChildren(list, newest, (event) => event.number, (event) =>
    el("li", { className: `event kind-${/^[a-z]+$/.test(event.kind) ? event.kind : "other"}` },
      el("span", { className: "icon", "aria-hidden": "true", text: ICONS[event.kind] ?? "•" }),
      el("span", { className: "kind", text: stateWord(event.kind) }),
      el("span", { className: "text", text: wordsOf(event) }),
      el("span", { className: "when", text: `${duration(event.at)} · step ${event.step.toLocaleString("en")}` })));
}

// the kind of these events says what happened; the text must say to whom
function wordsOf({ kind, who, text }) {
  if (!["joined", "left", "died"].includes(kind)) return text || who;
  const why = kind === "joined" ? "" : text;
  return [who, why].filter(Boolean).join(": ");
}

const INTERNAL = ["name", "run", "module", "color", "fork", "progress", "bind", "pid", "ended.data"]; // of run.json and end.json: not of interest here

// Nested facts as one list: serve.port 8000
export function showConfig(list, facts) {
  const rows = [];
  const walk = (prefix, value) => {
    if (value === null || value === undefined || value === "" || value === false || INTERNAL.includes(prefix)) return;
    if (prefix === "ended.auto") {
      const words = Object.values(value).map(choicesOf).filter(Boolean);
      if (words.length) rows.push([prefix, words.join("\n")]);
    } else if (Array.isArray(value)) {
      if (value.length) rows.push([prefix, value.map((one) => (typeof one === "object" ? JSON.stringify(one) : String(one))).join(prefix === "ended.lost" ? "\n" : " ")]);
    } else if (typeof value === "object") {
      for (const [key, inner] of Object.entries(value)) walk(prefix ? `${prefix}.${key}` : key, inner);
    } else rows.push([prefix, prefix.startsWith("ended.peak_bytes") ? bytes(value) : String(value)]);
  };
  walk("", facts);
  const text = JSON.stringify(rows);
  if (list.dataset.shown === text) return;
  list.dataset.shown = text;
  list.replaceChildren(...rows.map(([key, value]) => el("div", {}, el("dt", { text: key }), el("dd", { text: value }))));
}

// What auto chose, from the JSON in end.json: star up to 2.9 kB, then halving
function choicesOf(json) {
  try {
    const parts = JSON.parse(json).rows.map((row) => [String(row.algorithm), row.up_to_bytes]);
    const joined = parts.filter(([name], place) => name !== parts[place + 1]?.[0]);
    return joined.map(([name, top]) => (top === null ? name : `${name} up to ${bytes(top)}`)).join(", then ");
  } catch {
    return "";
  }
}

export class Lags {
  constructor(holder) {
    this.bars = new Bars(holder);
  }

  show(lags) {
    const found = Object.entries(lags).map(([lag, count]) => [Number(lag), count]).sort((a, b) => a[0] - b[0]);
    const top = found.length ? found[found.length - 1][0] : 0;
    const width = Math.max(1, Math.ceil((top + 1) / 48));
    const bars = new Array(Math.floor(top / width) + 1).fill(0);
    let [sum, all] = [0, 0];
    for (const [lag, count] of found) {
      bars[Math.floor(lag / width)] += count;
      sum += lag * count;
      all += count;
    }
    const name = (place) => (width === 1 ? String(place) : `${place * width}–${(place + 1) * width - 1}`);
    this.bars.set(bars, bars.map((_, place) => ({ at: (place + 0.5) / bars.length, text: name(place) })),
      `Staleness: ${short(all)} block updates, mean lag ${number(sum / (all || 1), 3)}, largest ${top}`);
    this.bars.canvas.hidden = top === 0;
    if (all && !top) return `none: none of ${short(all)} block updates was stale`;
    return all ? `mean ${number(sum / all, 3)}, largest ${top}, ${short(all)} block updates` : "";
  }

  redraw() {
    this.bars.redraw();
  }
}

// Logged histograms: the newest of each name, with a slider to earlier ones.
export class Histograms {
  constructor(holder) {
    this.holder = holder;
    this.shown = new Map();
  }

  show(found) {
    const names = Object.keys(found).sort();
    syncChildren(this.holder, names, (name) => name, (name) => this.#make(name), (_, name) => this.#update(name, found[name]));
  }

  redraw() {
    for (const one of this.shown.values()) one.bars.redraw();
  }

  #make(name) {
    const root = el("figure", { className: "chart" });
    const step = el("span", { className: "newest" });
    const slider = el("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": `Step of the histogram ${name}` });
    root.append(el("h3", {}, el("span", { text: name, title: name }), step));
    const one = { bars: new Bars(root), slider, step, rows: [], newest: true };
    root.append(slider);
    slider.addEventListener("input", () => {
      one.newest = Number(slider.value) === one.rows.length - 1;
      this.#draw(name, one);
    });
    this.shown.set(name, one);
    return root;
  }

  #update(name, rows) {
    const one = this.shown.get(name);
    const step = one.rows[Number(one.slider.value)]?.step;
    one.rows = rows;
    one.slider.max = rows.length - 1;
    one.slider.hidden = rows.length < 2;
    const same = rows.findIndex((row) => row.step === step);
    one.slider.value = one.newest || same < 0 ? rows.length - 1 : same;
    this.#draw(name, one);
  }

  #draw(name, one) {
    const row = one.rows[Number(one.slider.value)];
    if (!row) return;
    setText(one.step, `step ${row.step.toLocaleString("en")}`);
    const all = row.counts.reduce((sum, count) => sum + count, 0);
    one.bars.set(row.counts, [{ at: 0, text: number(row.low, 3) }, { at: 0.5, text: number((row.low + row.high) / 2, 3) }, { at: 1, text: number(row.high, 3) }],
      `${name} at step ${row.step}: ${short(all)} elements from ${number(row.low, 3)} to ${number(row.high, 3)}`);
  }
}

// The prediction service: its state, and a box to try it.
export class Predictor {
  constructor(name) {
    this.path = `/api/runs/${encodeURIComponent(name)}`;
    this.serving = null;
    this.example = false;
    $("predict-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
  }

  // unit of the parameters' version: step or update; ended: whether the run is over
  async show(serving, unit = "step", ended = false) {
    const changed = serving !== this.serving;
    this.serving = serving;
    $("predict-form").hidden = !serving;
    if (!serving) {
      setText($("predict-state"), ended ? "The run has ended, and its predictor with it." : "The predictor does not answer yet.");
      return;
    }
    if (!changed && this.asked && performance.now() - this.asked < 3000) return;
    this.asked = performance.now();
    let info;
    try {
      info = await fetchJson(`${this.path}/predictor`);
    } catch (problem) {
      setText($("predict-state"), problem.message);
      return;
    }
    const state = info.problem || (info.ready ? `answers with the parameters of ${unit} ${Number(info.step).toLocaleString("en")}` : "has no parameters yet");
    setText($("predict-state"), `${info.serving || serving} ${info.problem ? "· " : ""}${state}`);
    if (!this.example && info.inputs?.length) {
      this.example = true;
      const text = exampleOf(info.inputs);
      if (text && !$("predict-body").value) $("predict-body").value = text;
    }
  }

  async #ask() {
    const [out, button] = [$("predict-answer"), $("predict-button")];
    const body = $("predict-body").value;
    out.hidden = false;
    try {
      JSON.parse(body);
    } catch (problem) {
      out.className = "answer bad";
      setText(out, `This is not JSON: ${problem.message}`);
      return;
    }
    button.disabled = true;
    const begun = performance.now();
    try {
      const info = await fetchJson(`${this.path}/predict`, { method: "POST", body, headers: { "Content-Type": "application/json" } });
      out.className = "answer";
      setText(out, `${JSON.stringify(info)}\n${Math.round(performance.now() - begun)} ms`);
    } catch (problem) {
      out.className = "answer bad";
      setText(out, problem.message);
    } finally {
      button.disabled = false;
    }
  }
}

function exampleOf(inputs) {
  const zeros = (shape) => (shape.length ? Array.from({ length: shape[0] < 0 ? 1 : shape[0] }, () => zeros(shape.slice(1))) : 0);
  const numel = inputs.reduce((sum, input) => sum + input.shape.reduce((product, size) => product * Math.abs(size), 1), 0);
  if (numel > 256) return "";
  if (inputs.length === 1) return JSON.stringify(zeros(inputs[0].shape));
  return JSON.stringify({ inputs: Object.fromEntries(inputs.map((input) => [input.name, zeros(input.shape)])) });
}
