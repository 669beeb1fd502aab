// The list of runs.

import { $, fetchJson, el, syncChildren, setText, set, themeSwitch } from "./dom.js";
import { date, duration, number, short, whole } from "./format.js";

const STATES = { starting: "starting", running: "running", ended: "ended", failed: "failed", stopped: "stopped", lost: "broken off" };
const EVERY_MS = 3000;
const chosen = new Set();
let runs = [];

function show() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter((run) => {
    const text = [run.name, run.strategy, [].concat(run.command ?? []).join(" "), run.state, run.host].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  syncChildren($("runs"), found, (run) => run.name, make, update);
  $("none").hidden = found.length > 0;
  setText($("none"), runs.length ? "No run matches." : "There are no runs yet. Start one with: hora run -n 2 train.py");
  const there = [...chosen].filter((name) => runs.some((run) => run.name === name));
  $("go").disabled = there.length < 2;
  setText($("go"), there.length > 1 ? `Compare ${there.length} runs` : "Compare");
  set($("go"), "title", there.length > 1 ? "" : "Choose two runs or more");
}

function make(run) {
  const box = el("input", { type: "checkbox", "aria-label": `Choose ${run.name}`, onchange: () => {
    if (box.checked) chosen.add(run.name);
    else chosen.delete(run.name);
    show();
  } });
  const link = el("a", { href: `/runs/${encodeURIComponent(run.name)}`, text: run.name });
  const cell = (label, className = "") => el("td", { "data-label": label, className });
  return el("tr", {}, el("td", { className: "box" }, box), el("td", { className: "run-name" }, link, el("span", { className: "sub" })),
    el("td", { className: "state-cell" }, el("span", { className: "pill" })), cell("Strategy"), cell("Workers", "num"), cell("Steps", "num"), cell("Samples/s", "num"), cell("Time", "num"), cell("Values", "values"));
}

function update(row, run) {
  const [, name, state, strategy, size, steps, speed, time, values] = row.children;
  setText(name.children[1], [date(run.started), [].concat(run.command ?? []).join(" ")].filter((text) => text && text !== "–").join(" · "));
  setText(state.firstChild, STATES[run.state] ?? run.state);
  set(state.firstChild, "class", `pill ${run.state}`);
  setText(strategy, run.strategy || "–");
  setText(size, `${run.size ?? run.workers ?? "–"}${run.servers ? ` + ${run.servers}` : ""}`);
  setText(steps, whole(run.steps));
  setText(speed, run.samples_per_s ? short(run.samples_per_s) : "–");
  setText(time, duration(run.seconds));
  const known = Object.entries(run.values ?? {});
  const old = run.problem ? (run.problem.includes("another version") ? "written by another version of Hora" : run.problem) : "";
  setText(values, old || known.slice(0, 3).map(([key, value]) => `${key} ${number(value)}`).join(", ") || (run.remembered ? "–" : "no curves"));
  set(values, "title", run.problem || known.map(([key, value]) => `${key} ${number(value)}`).join(", "));
}

async function refresh() {
  try {
    const info = await fetchJson("/api/runs");
    runs = info.runs;
    const running = runs.filter((run) => run.live).length;
    setText($("about"), `${runs.length} ${runs.length === 1 ? "run" : "runs"}${running ? `, ${running} live` : ""} · ${info.home}`);
    $("problem").hidden = true;
    show();
  } catch (problem) {
    $("problem").hidden = false;
    setText($("problem"), `The dashboard does not answer (${problem.message}); trying again.`);
  }
  document.documentElement.dataset.ready = "yes";
}

themeSwitch($("theme"), () => {});
$("find").addEventListener("input", show);
$("go").addEventListener("click", () => {
  location.href = `/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`;
});
await refresh();
setInterval(() => document.hidden || refresh(), EVERY_MS);
