// The page of one run.

import { Chart } from "./chart.js";
import { $, PALETTE, fetchJson, el, syncChildren, setText, set, themeSwitch } from "./dom.js";
import { bytes, date, duration, number, percent, short, stateWord, whole } from "./format.js";
import { Live } from "./live.js";
import { Histograms, Lags, Predictor, showConfig, showEvents } from "./panels.js";
import { Scene } from "./scene.js";
import { Store } from "./store.js";
import { Workers } from "./workers.js";

const FIRST = ["loss", "train_loss", "train/loss"];
const MANY = 9; // charts of values that are shown at once
const STATES = { starting: "starting", running: "running", ended: "ended", failed: "failed", stopped: "stopped", lost: "broken off", unknown: "not connected" };

const name = decodeURIComponent(location.pathname.split("/")[2] ?? "");
const store = new Store();
const charts = new Map();
const scene = new Scene($("scene"), $("scene-caption"));
const workers = new Workers($("workers"), $("strip-axis"));
const lags = new Lags($("lags"));
const histograms = new Histograms($("histograms"));
const predictor = new Predictor(name);
let all = false;
let lost = false; // whether the connection to the dashboard is lost

const live = new Live(name, (kind, info) => {
  if (kind === "whole") store.whole(info);
  else if (kind === "change") store.change(info);
  show();
}, (text) => {
  $("link").hidden = !text;
  setText($("link"), text);
  const changed = lost !== Boolean(text);
  lost = Boolean(text);
  if (changed) show();
}, () => store.now?.state === "ended");

function choice(group) {
  return document.querySelector(`input[name="${group}"]:checked`).value;
}

function show() {
  head();
  problem();
  const now = store.now;
  $("body").hidden = !now;
  if (!now) return;
  banner(now);
  tiles(now);
  curves();
  scene.update(now, store.info.strategy, going() && now.state !== "ended");
  workers.update(store, choice("x"));
  servers(now);
  const words = lags.show(now.lags);
  $("lag-card").hidden = !words;
  setText($("lag-words"), words);
  $("histogram-card").hidden = !Object.keys(store.histograms).length;
  $("histogram-card").classList.toggle("wide", Object.keys(store.histograms).length > 2);
  histograms.show(store.histograms);
  showEvents($("events"), store.events);
  $("no-events").hidden = store.events.length > 0;
  if (going() || !store.info.live) predictor.show(store.info.live ? now.serving : "", store.info.strategy?.synchronous === false ? "update" : "step", !store.info.live);
  $("predict-card").hidden = !(store.info.live && now.serving) && !store.info.run?.serve;
}

function going() {
  return store.info.live && !lost;
}

function head() {
  const { info, now } = store;
  const state = info.live && lost ? "unknown" : info.state ?? "starting";
  setText($("state"), STATES[state] ?? state);
  set($("state"), "class", `pill ${state}`);
  document.title = `${now ? `${short(now.step)} · ` : ""}${name} · Hora`;
  const run = info.run ?? {};
  const strategy = now?.strategy || info.end?.strategy || run.strategy || "";
  const size = now?.workers.length || run.size;
  const parts = [strategy, size ? `${size} ${size === 1 ? "worker" : "workers"}` : "", now?.servers.length ? `${now.servers.length} ${now.servers.length === 1 ? "server" : "servers"}` : "",
    run.host ? `on ${run.host}` : "", run.started ? `since ${date(run.started)}` : "", [].concat(run.command ?? []).join(" ")];
  setText($("about"), parts.filter(Boolean).join(" · "));
  showConfig($("config"), { ...run, ended: info.end ? { ...info.end, summary: undefined } : undefined });
}

function problem() {
  const { info } = store;
  const end = info.end;
  let text = info.problem ?? "";
  if (!text && info.remembered === false) text = info.live ? "The run has not reported anything yet." : "This run has no database, so no curves: it is of an older version of Hora, or its directory could not be written. Its configuration is below.";
  if (!text && ["failed", "stopped"].includes(info.state)) text = `It ended with code ${end?.code}${end?.cause ? `: ${typeof end.cause === "string" ? end.cause : JSON.stringify(end.cause)}` : ""}`;
  if (!text && info.state === "lost") text = "The launcher was killed; this is the last known state.";
  $("problem").hidden = !text;
  setText($("problem"), text);
}

function banner(now) {
  const slow = now.workers.filter((worker) => worker.slow && worker.state === "alive");
  const text = going() ? slow.map((worker) => `${worker.name} is slow: ${number(worker.compute_s * 1000, 3)} ms of compute per step, ${worker.slow.toFixed(1)} times the others'`).join("; ") : "";
  $("banner").classList.toggle("shown", Boolean(text));
  setText($("banner"), text);
}

function tiles(now) {
  const values = Object.entries(now.values);
  const main = values.find(([one]) => FIRST.includes(one)) ?? values[0];
  const epoch = now.epoch !== null && now.epoch !== undefined ? `${now.epoch + 1}${now.epochs ? ` of ${now.epochs}` : ""}` : "";
  const over = now.state === "ended" || !store.info.live;
  const speed = over ? store.info.summary?.samples_per_s ?? now.samples_per_s : now.samples_per_s;
  const found = [
    ["Step", whole(now.step), epoch ? `epoch ${epoch}` : now.steps_per_s && going() && !over ? `${number(now.steps_per_s, 3)} per second` : ""],
    main ? [main[0], number(main[1]), "newest"] : null,
    ["Samples per second", short(speed || 0), `${short(now.samples)} in all`],
    ["Time", duration(now.seconds), over ? "from start to end" : lost ? "when it was last heard of" : now.eta_s ? `about ${duration(now.eta_s)} to go` : "since the start"],
    now.bytes_per_step ? ["Sent per step", bytes(now.bytes_per_step), now.hidden !== null && now.hidden !== undefined ? `${percent(now.hidden)} of it hidden` : "by one worker"] : null,
    now.rounds !== null && now.rounds !== undefined ? ["Rounds", whole(now.rounds), ""] : null,
    ["Checkpoints", whole(now.checkpoints), now.skipped ? `${whole(now.skipped)} steps skipped` : ""],
  ].filter(Boolean);
  syncChildren($("tiles"), found, (tile) => tile[0], (tile) => el("div", { className: "tile" }, el("dt", { text: tile[0], title: tile[0] }), el("dd"), el("p")), (node, tile) => {
    setText(node.children[1], tile[1]);
    setText(node.children[2], tile[2]);
  });
  $("progress").hidden = now.progress === null || now.progress === undefined || over || lost;
  if (!$("progress").hidden) {
    $("progress").value = now.progress;
    set($("progress"), "aria-label", `Progress: ${percent(now.progress)}`);
  }
}

function curves() {
  const [x, log] = [choice("x"), $("log").checked];
  const names = store.names("value/").map((one) => one.slice(6));
  names.sort((a, b) => rankOf(a) - rankOf(b) || a.localeCompare(b));
  const shown = all ? names : names.slice(0, MANY);
  $("more").hidden = names.length <= MANY;
  setText($("more"), all ? "Show fewer" : `Show all ${names.length}`);
  const [first, ...rest] = shown;
  const wanted = new Set();
  const put = (key, holder, options, points, hue) => {
    wanted.add(key);
    let chart = charts.get(key);
    if (!chart) charts.set(key, (chart = new Chart($(holder), options)));
    const newest = store.now.values[options.title]; // the same number as in its tile
    chart.set([{ name: options.title, color: hue, points, newest: key.startsWith("value/") ? newest : undefined }], x, log && key.startsWith("value/"), $("smooth").checked);
  };
  if (first !== undefined) put(`value/${first}`, "main-chart", { title: first }, store.curves.get(`value/${first}`).points, PALETTE[0]);
  else $("main-chart").replaceChildren(el("p", { className: "empty", text: "Nothing was logged yet: job.log(loss=loss) draws a curve here." }));
  if (first !== undefined) $("main-chart").querySelector(".empty")?.remove();
  const speed = store.curves.get("speed");
  if (speed) put("speed", "small-charts", { title: "samples per second", from0: true }, speed.points, PALETTE[5]);
  rest.forEach((one, place) => put(`value/${one}`, "small-charts", { title: one }, store.curves.get(`value/${one}`).points, PALETTE[[2, 1, 4, 3, 6, 7][place % 6]]));
  for (const kind of ["busy", "queue"]) {
    const found = store.now.servers.map((server) => store.curves.get(`server/${server.number}/${kind}`)?.points);
    if (!found.some((points) => points?.length)) continue;
    const key = `server/${kind}`;
    wanted.add(key);
    const title = kind === "busy" ? "servers: busy share" : "servers: queue";
    if (!charts.has(key)) charts.set(key, new Chart($("small-charts"), { title, from0: true, band: false }));
    charts.get(key).set(found.map((points, k) => ({ name: `server ${k}`, short: String(k), color: PALETTE[k % 8], points: points ?? [] })), x, false);
  }
  for (const [key, chart] of charts) {
    if (!wanted.has(key)) {
      chart.root.remove();
      charts.delete(key);
    }
  }
}

function rankOf(value) {
  return FIRST.includes(value) ? 0 : /loss/i.test(value) ? 1 : /acc/i.test(value) ? 2 : 3;
}

function servers(now) {
  $("server-card").hidden = !now.servers.length;
  syncChildren($("servers"), now.servers, (server) => server.number, () => el("tr", {}, ...Array.from({ length: 7 }, () => el("td"))), (row, server) => {
    const cells = [`server ${server.number}${server.state === "alive" ? "" : ` · ${stateWord(server.state)}`}`, bytes(server.load_bytes), percent(server.busy), whole(server.queue), `${number(server.updates_per_s, 3)}/s`,
      `${bytes(server.bytes_in_per_s)}/s`, `${bytes(server.bytes_out_per_s)}/s`];
    cells.forEach((text, place) => setText(row.children[place], text));
  });
}

function redraw() {
  for (const chart of charts.values()) chart.redraw();
  workers.redraw();
  lags.redraw();
  histograms.redraw();
}

setText($("name"), name);
$("compare").href = `/compare?runs=${encodeURIComponent(name)}`;
themeSwitch($("theme"), redraw);
for (const input of document.querySelectorAll('input[name="x"], #log, #smooth')) {
  input.addEventListener("change", () => store.now && (curves(), workers.update(store, choice("x"))));
}
$("more").addEventListener("click", () => {
  all = !all;
  curves();
});
try {
  const info = await fetchJson(`/api/runs/${encodeURIComponent(name)}`);
  store.whole(info);
  show();
  if (info.live) live.start();
} catch (error) {
  $("problem").hidden = false;
  setText($("problem"), error.message);
  setText($("state"), "not found");
}
document.documentElement.dataset.ready = "yes";
