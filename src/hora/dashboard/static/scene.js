// Scene: the topology of the run as SVG. Edges light up and carry dots while bytes move along them.

import { setText, set, svg } from "./dom.js";
import { bytes, percent, stateWord, whole } from "./format.js";
import { place, planOf, roundLength } from "./layout.js";

const MAX_DOTS = 48;
const SPEED = 110; // pixels a second
const SPOTS = 48; // of a line, between which a dot moves straight
const FRAME_MS = 30;
const PARTS = ["compute", "wait", "comm"];
const TITLES = {
  ring: "Ring all-reduce: each worker sends to the next", star: "Star: all workers send to rank 0, which sends the sum back",
  tree: "Tree: sums go up, results come down", halving: "Recursive halving and doubling: pairs exchange",
  shared: "Shared memory: each worker reduces its share", engine: "The engine's own all-reduce",
  mesh: "All-reduce; the algorithm is chosen at the first step", ps: "Parameter servers", rounds: "Local steps, then a round",
};

export class Scene {
  constructor(holder, caption) {
    [this.holder, this.caption] = [holder, caption];
    this.root = svg("svg", { className: "scene", role: "img" });
    holder.append(this.root);
    this.key = "";
    this.flash = this.drawn = 0;
    this.lastRounds = null;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.now && this.update(this.now)).observe(holder);
    requestAnimationFrame((at) => this.#frame(at));
  }

  update(now, strategy = this.strategy, live = this.live) {
    [this.now, this.strategy, this.live] = [now, strategy, live];
    const width = Math.floor(this.holder.clientWidth);
    if (!width) return;
    const plan = planOf(now, strategy);
    const key = [width, plan.kind, plan.num, plan.servers, plan.loose, plan.rounds].join(" ");
    if (key !== this.key) this.#build(plan, width, key);
    this.plan = plan;
    this.#workers(now);
    this.#servers(now);
    this.#hub(now);
    this.#edges(now);
    this.#describe(now);
  }

  #build(plan, width, key) {
    this.key = key;
    const layout = (this.layout = place(plan, width));
    set(this.root, "viewBox", `0 0 ${width} ${layout.height}`);
    set(this.root, "height", layout.height);
    set(this.root, "width", width);
    set(this.root, "data-kind", plan.kind);
    const arrow = (id) => svg("marker", { id, viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto", markerUnits: "userSpaceOnUse" },
      svg("path", { d: "M0 0.5 L7 4 L0 7.5 Z", className: id }));
    this.edges = layout.edges.map((edge) => {
      const path = svg("path", { d: edge.path, className: `edge${plan.loose ? " loose" : ""}`, "data-from": edge.from, "data-to": edge.to });
      if (!edge.both) path.setAttribute("marker-end", "url(#arrow)");
      return { ...edge, node: path, rate: 0, dots: [] };
    });
    this.dots = svg("g", { className: "dots" });
    this.nodes = layout.nodes.map((node, rank) => workerNode(node, rank, layout.radius, plan.rounds, width));
    this.boxes = layout.servers.map((box, number) => serverBox(box, number));
    this.middle = layout.hub ? hubNode(layout.hub, plan) : null;
    this.center = plan.kind === "ring" && plan.num > 2 ? centerText(layout) : null;
    const defs = svg("defs", {}, arrow("arrow"), arrow("arrow-lit"));
    this.root.replaceChildren(...[defs, svg("g", {}, ...this.edges.map((edge) => edge.node)), this.dots, this.middle?.root, this.center?.root,
      ...this.boxes.map((box) => box.root), ...this.nodes.map((node) => node.root)].filter(Boolean));
    for (const edge of this.edges) {
      edge.length = edge.node.getTotalLength();
      edge.spots = Array.from({ length: SPOTS + 1 }, (_, spot) => edge.node.getPointAtLength((spot / SPOTS) * edge.length));
    }
  }

  #workers(now) {
    const byRank = new Map(now.workers.map((worker) => [worker.rank, worker]));
    this.nodes.forEach((node, rank) => {
      const worker = byRank.get(rank);
      const state = worker?.state ?? "waiting";
      set(node.root, "class", `node ${state}${worker?.slow ? " slow" : ""}`);
      setText(node.label, state === "died" ? "died" : state === "left" ? "finished" : worker?.slow ? `slow ×${worker.slow.toFixed(1)}` : "");
      setText(node.title, worker ? `${worker.name}: ${stateWord(state)}, step ${worker.step}` : `rank ${rank} has not joined yet`);
      const shares = worker && state === "alive" ? this.#shares(worker, now) : [];
      let start = 0;
      node.arcs.forEach((arc, part) => {
        const share = Math.max(0, Math.min(100, (shares[part] ?? 0) * 100));
        set(arc, "stroke-dasharray", `${share.toFixed(1)} 100`);
        set(arc, "stroke-dashoffset", (-start).toFixed(1));
        start += share;
      });
    });
  }

  // around a worker: what its step is made of, or how far it is in its round
  #shares(worker, now) {
    if (this.plan.rounds) {
      const length = roundLength(this.plan.every, worker.step) ?? Math.max(1, ...now.workers.map((one) => one.local_steps));
      return [Math.min(1, worker.local_steps / length)];
    }
    const parts = PARTS.map((part) => worker[`${part}_s`]);
    const sum = parts.reduce((total, part) => total + part, 0);
    return sum > 0 ? parts.map((part) => part / sum) : [];
  }

  #servers(now) {
    this.boxes.forEach((box, number) => {
      const server = now.servers.find((one) => one.number === number);
      if (!server) return;
      set(box.root, "class", `server ${server.state}`);
      setText(box.load, `${bytes(server.load_bytes)}`);
      setText(box.queue, `queue ${server.queue}`);
      setText(box.share, percent(server.busy));
      set(box.bar, "width", (box.room * Math.max(0, Math.min(1, server.busy))).toFixed(1));
      setText(box.title, `server ${number}: ${bytes(server.load_bytes)} of parameters, busy ${percent(server.busy)}, queue ${server.queue}`);
    });
  }

  #hub(now) {
    const rate = now.workers.reduce((sum, worker) => sum + worker.sent_bytes_per_s, 0);
    if (this.middle) {
      const plan = this.plan;
      const rounds = now.rounds ?? Math.max(0, ...now.workers.map((worker) => worker.rounds ?? 0));
      const texts = {
        shared: ["memory", "shared", rate ? `${bytes(rate)}/s` : ""],
        engine: [plan.options.backend ?? "engine", "", rate ? `${bytes(rate)}/s` : ""],
        rounds: [whole(rounds), "round", plan.every ? `every ${plan.every}` : ""],
      }[plan.kind];
      setText(this.middle.big, texts[0]);
      setText(this.middle.over, texts[1]);
      setText(this.middle.under, texts[2]);
      if (plan.rounds && this.lastRounds !== null && rounds !== this.lastRounds) this.flash = performance.now() + 1500;
      this.lastRounds = rounds;
    }
    if (this.center) {
      const alive = now.workers.filter((worker) => worker.state === "alive").length || 1;
      setText(this.center.big, this.live && rate ? `${bytes(rate / alive)}/s` : this.plan.kind);
      setText(this.center.under, this.live && rate ? "on each edge" : `${this.plan.num} workers`);
      setText(this.center.third, now.hidden === null || now.hidden === undefined ? "" : `${percent(now.hidden)} hidden`);
    }
  }

  #edges(now) {
    const byRank = new Map(now.workers.map((worker) => [worker.rank, worker]));
    const gone = (end) => typeof end === "number" && byRank.has(end) && byRank.get(end).state !== "alive";
    for (const edge of this.edges) edge.rate = this.live && !gone(edge.from) && !gone(edge.to) ? this.#rate(edge, byRank) : 0;
    const flashing = this.plan.rounds && this.flash > performance.now();
    const isLit = (edge) => (this.plan.kind === "rounds" ? flashing : edge.rate > 0);
    const numLit = this.edges.filter(isLit).length;
    const stride = Math.ceil((2 * numLit) / MAX_DOTS);
    this.root.style.setProperty("--edge-alpha", Math.max(0.18, Math.min(0.75, 12 / (numLit || 1))).toFixed(2));
    this.edges.forEach((edge, number) => {
      const lit = isLit(edge);
      edge.node.classList.toggle("lit", lit);
      edge.node.classList.toggle("gone", gone(edge.from) || gone(edge.to));
      if (!edge.both) set(edge.node, "marker-end", lit ? "url(#arrow-lit)" : "url(#arrow)");
      const wanted = !lit || number % stride ? 0 : edge.both ? 2 : edge.length < 60 ? 1 : edge.length > 150 ? 3 : 2;
      while (edge.dots.length < wanted) {
        const dot = svg("circle", { r: edge.length < 60 ? 2.4 : 3, className: "dot" });
        edge.dots.push(dot);
        this.dots.append(dot);
      }
      while (edge.dots.length > wanted) edge.dots.pop().remove();
    });
  }

  #rate(edge, byRank) {
    const worker = byRank.get(edge.from);
    if (!worker) return 0;
    if (typeof edge.to !== "number") return worker.sent_bytes_per_s;
    const known = Object.keys(worker.peers ?? {}).length > 0;
    const back = edge.both ? (byRank.get(edge.to)?.peers?.[edge.from] ?? 0) : 0;
    if (known) return (worker.peers[edge.to] ?? 0) + back;
    return worker.sent_bytes_per_s > 0 ? worker.sent_bytes_per_s : back;
  }

  #frame(at) {
    requestAnimationFrame((next) => this.#frame(next));
    if (!this.edges || document.hidden || at - this.drawn < FRAME_MS) return;
    this.drawn = at;
    this.dots.classList.toggle("still", this.still.matches);
    for (const edge of this.edges) {
      if (!edge.dots.length || this.still.matches) continue;
      edge.dots.forEach((dot, place) => {
        const along = ((at / 1000) * SPEED / edge.length + (edge.both ? 0 : place / edge.dots.length)) % 1;
        const far = (edge.both && place ? 1 - along : along) * SPOTS;
        const [from, to, share] = [edge.spots[Math.floor(far)], edge.spots[Math.min(SPOTS, Math.floor(far) + 1)], far % 1];
        dot.setAttribute("cx", (from.x + (to.x - from.x) * share).toFixed(1));
        dot.setAttribute("cy", (from.y + (to.y - from.y) * share).toFixed(1));
      });
    }
  }

  #describe(now) {
    const { plan } = this;
    const lit = this.edges.filter((edge) => edge.node.classList.contains("lit")).length;
    const slow = now.workers.filter((worker) => worker.slow).map((worker) => `rank ${worker.rank}`);
    const title = plan.kind === "ps"
      ? `${plan.servers} parameter ${plan.servers === 1 ? "server" : "servers"}${plan.loose ? "; workers do not wait for each other" : plan.rounds ? "; workers average in rounds" : "; workers step together"}`
      : TITLES[plan.kind];
    setText(this.caption, plan.isAuto && plan.chosen ? `${title} (chosen by auto)` : title);
    const words = [`${title}. ${plan.num} workers`, lit ? `bytes move on ${lit} of ${this.edges.length} lines` : "no bytes move now"];
    if (plan.rounds) words.push(`round ${now.rounds ?? 0}`);
    if (slow.length) words.push(`slow: ${slow.join(", ")}`);
    set(this.root, "aria-label", words.join("; "));
    set(this.root, "data-lit", lit);
  }
}

function workerNode({ x, y, angle }, rank, radius, rounds, width) {
  const ring = (className) => svg("circle", { cx: x, cy: y, r: radius, className, pathLength: 100, transform: `rotate(-90 ${x} ${y})` });
  const arcs = rounds ? [ring("arc local")] : PARTS.map((part) => ring(`arc ${part}`));
  const way = Math.sign(Math.cos(angle ?? 0));
  const end = x + way * (radius + 72);
  const aside = angle !== undefined && Math.abs(Math.cos(angle)) > 0.5 && end > 0 && end < width; // away from its neighbours
  const up = angle !== undefined && !aside && Math.sin(angle) < 0;
  const label = aside
    ? svg("text", { x: x + way * (radius + 9), y: y + 4, className: `under ${way < 0 ? "end" : "start"}` })
    : svg("text", { x, y: up ? y - radius - 9 : y + radius + 16, className: "under" });
  const title = svg("title");
  const root = svg("g", { className: "node", "data-rank": rank }, title, svg("circle", { cx: x, cy: y, r: radius + 6, className: "halo" }),
    svg("circle", { cx: x, cy: y, r: radius, className: "disc" }), ...arcs, svg("text", { x, y: y + 1, className: "rank", text: rank }), label);
  return { root, arcs, label, title };
}

function serverBox({ x, y, w, h }, number) {
  const small = w < 96;
  const room = w - 16;
  const load = svg("text", { x: small ? x + w / 2 : x + w - 8, y: small ? y + 33 : y + 18, className: small ? "small middle" : "small end" });
  const queue = svg("text", { x: small ? x + w / 2 : x + 8, y: small ? y + h + 12 : y + 35, className: small ? "small middle" : "small" });
  const share = svg("text", { x: x + w - 8, y: y + 35, className: "small end" });
  const bar = svg("rect", { x: x + 8, y: y + h - 16, width: 0, height: 7, rx: 2, className: "busy" });
  const title = svg("title");
  const root = svg("g", { className: "server", "data-server": number }, title, svg("rect", { x, y, width: w, height: h, rx: 7, className: "box" }),
    svg("text", { x: small ? x + w / 2 : x + 8, y: y + 18, className: small ? "name middle" : "name", text: small ? `s${number}` : `server ${number}` }),
    load, small ? null : queue, small ? null : share, svg("rect", { x: x + 8, y: y + h - 16, width: room, height: 7, rx: 2, className: "room" }), bar);
  return { root, load, queue, share, bar, title, room };
}

function hubNode({ x, y, size }, plan) {
  const over = svg("text", { x, y: y - 14, className: "small middle" });
  const big = svg("text", { x, y: y + 5, className: "big middle" });
  const under = svg("text", { x, y: y + 21, className: "small middle" });
  const shape = plan.kind === "shared"
    ? svg("rect", { x: x - size, y: y - size * 0.72, width: 2 * size, height: 1.44 * size, rx: 8, className: "hub" })
    : svg("circle", { cx: x, cy: y, r: size - 2, className: "hub" });
  const cells = plan.kind === "shared" && plan.num <= 32
    ? Array.from({ length: plan.num }, (_, share) => svg("rect", {
      x: x - size + 7 + (share * (2 * size - 14)) / plan.num, y: y + size * 0.72 - 12, width: Math.max(1, (2 * size - 14) / plan.num - 2), height: 5, rx: 1, className: "cell" }))
    : [];
  return { root: svg("g", {}, shape, ...cells, over, big, under), big, over, under };
}

function centerText({ cx, cy }) {
  const big = svg("text", { x: cx, y: cy - 2, className: "big middle" });
  const under = svg("text", { x: cx, y: cy + 15, className: "small middle" });
  const third = svg("text", { x: cx, y: cy + 30, className: "small middle" });
  return { root: svg("g", {}, big, under, third), big, under, third };
}
