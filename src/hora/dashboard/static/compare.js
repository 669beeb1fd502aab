// Runs side by side: their curves over samples and over time, and a table of their summaries.

import { Chart } from "./chart.js";
import { $, PALETTE, fetchJson, el, setText, themeSwitch } from "./dom.js";
import { bytes, duration, number, percent, short, whole } from "./format.js";
import { Store } from "./store.js";

const MOST = 8;
const EVERY_MS = 4000;
const asked = (new URLSearchParams(location.search).get("runs") ?? "").split(",").filter(Boolean);
const known = new Map(); // name -> {store, hue, shown, problem}
const charts = new Map();
let strategies = new Map(); // of all runs, by name

function add(name) {
  if (known.has(name) || known.size >= MOST) return;
  const used = new Set([...known.values()].map((run) => run.hue));
  known.set(name, { store: new Store(), hue: PALETTE.find((hue) => !used.has(hue)), shown: true, problem: "" });
}

async function load(name) {
  const run = known.get(name);
  try {
    run.store.whole(await fetchJson(`/api/runs/${encodeURIComponent(name)}`));
    run.problem = run.store.info.problem ?? "";
  } catch (problem) {
    run.problem = problem.message;
  }
}

function address() {
  history.replaceState(null, "", `/compare?runs=${[...known.keys()].map(encodeURIComponent).join(",")}`);
}

function chooser() {
  const chip = (name, run) => {
    const box = el("input", { type: "checkbox", checked: run?.shown ?? false, onchange: async () => {
      if (run) {
        known.delete(name);
      } else {
        add(name);
        await load(name);
      }
      address();
      chooser();
      show();
      document.querySelector(`input[data-run="${CSS.escape(name)}"]`)?.focus();
    }, "data-run": name });
    const swatch = el("i", { className: "swatch" });
    if (run) swatch.style.background = `var(${run.hue})`;
    return el("label", { className: "chip" }, box, run ? swatch : null, el("span", { text: [name, strategies.get(name)].filter(Boolean).join(" · ") }));
  };
  $("chosen").replaceChildren(el("legend", { text: "Runs" }), ...[...known].map(([name, run]) => chip(name, run)));
  const others = [...strategies.keys()].filter((name) => !known.has(name));
  $("others").replaceChildren(el("legend", { className: "hidden", text: "Further runs" }), ...(others.length ? others.map((name) => chip(name, null)) : [el("p", { className: "empty", text: "There are no further runs." })]));
}

function show() {
  const runs = [...known].filter(([, run]) => run.store.now);
  const values = [...new Set(runs.flatMap(([, run]) => run.store.names("value/").map((name) => name.slice(6))))];
  const order = (value) => (value === "loss" ? 0 : /loss/i.test(value) ? 1 : 2);
  values.sort((a, b) => order(a) - order(b) || a.localeCompare(b));
  const wanted = new Set();
  for (const value of values.slice(0, 12)) {
    for (const x of ["samples", "time"]) {
      const key = `${x} ${value}`;
      wanted.add(key);
      if (!charts.has(key)) charts.set(key, new Chart(rowOf(value), { title: `${value} over ${x}`, band: false }));
      const series = runs.map(([name, run]) => ({ name, color: run.hue, points: run.store.curves.get(`value/${value}`)?.points ?? [] }));
      charts.get(key).set(series.filter((one) => one.points.length), x, $("log").checked, $("smooth").checked);
    }
  }
  for (const [key, chart] of charts) {
    if (!wanted.has(key)) {
      const row = chart.root.parentElement;
      chart.root.remove();
      charts.delete(key);
      if (!row.children.length) row.remove();
    }
  }
  table(runs);
  $("summaries").hidden = !runs.length;
  const problems = [...known].filter(([, run]) => run.problem).map(([name, run]) => `${name}: ${run.problem}`);
  $("problem").hidden = !problems.length;
  setText($("problem"), problems.join("; "));
  setText($("about"), known.size ? "Which run learns faster, per sample and per second." : "Choose two runs or more below.");
  $("others-box").open = $("others-box").open || known.size < 2;
}

function rowOf(value) {
  let row = [...$("charts").children].find((one) => one.dataset.value === value);
  if (!row) {
    row = el("div", { className: "card pair", "data-value": value });
    $("charts").append(row);
  }
  return row;
}

function table(runs) {
  const lines = [
    ["Strategy", (run) => run.now.strategy || "–"],
    ["State", (run) => ({ lost: "broken off" })[run.info.state] ?? run.info.state],
    ["Workers", (run) => whole(run.now.workers.length || run.now.size)],
    ["Steps", (run) => whole(run.now.step)],
    ["Samples", (run) => whole(run.now.samples)],
    ["Time", (run) => duration(run.now.seconds)],
    ["Samples per second", (run) => short((run.info.summary?.samples_per_s ?? run.now.samples_per_s) || 0)],
    ["Sent per step", (run) => bytes(run.now.bytes_per_step)],
    ["Hidden by compute", (run) => percent(run.now.hidden)],
    ["Rounds", (run) => whole(run.now.rounds)],
    ["Slowest", (run) => run.now.slowest || "–"],
    ["Checkpoints", (run) => whole(run.now.checkpoints)],
  ];
  const logged = [...new Set(runs.flatMap(([, run]) => Object.keys(run.store.now.values)))].slice(0, 16);
  for (const value of logged) lines.push([`${value}, newest`, (run) => number(run.now.values[value])]);
  const head = el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "" }), ...runs.map(([name, run]) => {
    const swatch = el("i", { className: "swatch" });
    swatch.style.background = `var(${run.hue})`;
    return el("th", { scope: "col" }, swatch, el("a", { href: `/runs/${encodeURIComponent(name)}`, text: name }));
  })));
  const body = el("tbody", {}, ...lines.map(([title, of]) => el("tr", {}, el("th", { scope: "row", text: title }), ...runs.map(([, run]) => el("td", { text: of(run.store) })))));
  $("table").replaceChildren(head, body);
}

themeSwitch($("theme"), () => {
  for (const chart of charts.values()) chart.redraw();
});
for (const id of ["log", "smooth"]) $(id).addEventListener("change", show);
asked.slice(0, MOST).forEach(add);
try {
  strategies = new Map((await fetchJson("/api/runs")).runs.map((run) => [run.name, run.strategy]));
} catch { /* the choice is then what was asked for */ }
await Promise.all([...known.keys()].map(load));
chooser();
show();
document.documentElement.dataset.ready = "yes";
setInterval(async () => {
  const live = [...known].filter(([, run]) => run.store.info.live).map(([name]) => name);
  if (document.hidden || !live.length) return;
  await Promise.all(live.map(load));
  show();
}, EVERY_MS);
