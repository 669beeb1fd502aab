// Workers: a row for each, with the time breakdown of its step now and over the run.

import { FONT, drawLabels, xTicks } from "./axes.js";
import { color, el, syncChildren, clearedContext, setText, set } from "./dom.js";
import { bytes, moment, short, stateWord } from "./format.js";
import { MEAN, START, X } from "./store.js";

const PARTS = ["compute", "wait", "comm"];
const WORDS = { compute: "compute", wait: "wait", comm: "communication" };
const COLORS = { compute: "--compute", wait: "--wait", comm: "--comm" };

export class Workers {
  constructor(list, axis) {
    [this.list, this.axis] = [list, axis];
    this.rows = new Map();
    new ResizeObserver(() => this.redraw()).observe(axis);
  }

  update(store, x) {
    [this.store, this.x] = [store, x];
    const workers = [...store.now.workers].sort((a, b) => a.rank - b.rank);
    const longest = Math.max(1e-9, ...workers.filter((worker) => worker.state === "alive").map(total));
    syncChildren(this.list, workers, (worker) => worker.rank, (worker) => this.#make(worker), (node, worker) => this.#show(worker, longest));
    this.redraw();
  }

  redraw() {
    if (this.waiting || !this.store) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.#drawBreakdowns();
    });
  }

  #make({ rank }) {
    const bars = PARTS.map((part) => el("i", { className: part }));
    const row = {
      node: el("li", { className: "worker", "data-rank": rank }),
      name: el("span", { className: "who" }),
      bar: el("span", { className: "bar", role: "img" }, ...bars),
      bars,
      time: el("span", { className: "num" }),
      breakdown: el("canvas", { className: "strip", role: "img" }),
      rate: el("span", { className: "num wide" }),
      sent: el("span", { className: "num wide" }),
    };
    row.node.append(row.name, row.bar, row.time, row.breakdown, row.rate, row.sent);
    this.rows.set(rank, row);
    return row.node;
  }

  #show(worker, longest) {
    const row = this.rows.get(worker.rank);
    const alive = worker.state === "alive";
    set(row.node, "class", `worker ${worker.state}${worker.slow ? " slow" : ""}`);
    setText(row.name, `rank ${worker.rank}${alive ? (worker.slow ? " · slow" : "") : ` · ${stateWord(worker.state)}`}`);
    set(row.name, "title", worker.name);
    PARTS.forEach((part, place) => {
      row.bars[place].style.width = `${alive ? ((100 * worker[`${part}_s`]) / longest).toFixed(2) : 0}%`;
    });
    setText(row.time, alive ? moment(total(worker)) : "–");
    setText(row.rate, alive ? `${short(worker.samples_per_s)}/s` : "–");
    setText(row.sent, alive ? `${bytes(worker.sent_bytes_per_s)}/s` : "–");
    const words = PARTS.map((part) => `${WORDS[part]} ${moment(worker[`${part}_s`])}`).join(", ");
    set(row.bar, "aria-label", `${worker.name}: ${words} per step`);
    set(row.bar, "title", words);
    set(row.breakdown, "aria-label", `${worker.name}: the same over ${X[this.x].label}`);
  }

  #drawBreakdowns() {
    const all = new Map();
    let [x0, x1] = [Infinity, -Infinity];
    const heights = [];
    for (const rank of this.rows.keys()) {
      const stack = this.#stack(rank);
      all.set(rank, stack);
      for (const one of stack) {
        heights.push(one.tops[2]);
        x0 = Math.min(x0, one.from);
        x1 = Math.max(x1, one.to);
      }
    }
    heights.sort((a, b) => a - b);
    const most = (heights[Math.floor(heights.length * 0.98)] ?? 1) * 1.08 || 1;
    for (const [rank, row] of this.rows) this.#drawBreakdown(row.breakdown, all.get(rank), x0, x1, most);
    this.#axis(x0, x1);
  }

  // the stacked breakdown of a worker: [{from, to, tops}]
  #stack(rank) {
    const of = X[this.x].of;
    const points = this.store.curves.get(`rank/${rank}/compute`)?.points ?? [];
    const others = ["wait", "comm"].map((part) => new Map((this.store.curves.get(`rank/${rank}/${part}`)?.points ?? []).map((point) => [point[START], point[MEAN]])));
    const found = [];
    let from = null;
    for (const point of points) {
      const to = of(point) + (this.x === "steps" ? 1 : 0); // a report stands for all that was since the one before
      if (point[MEAN] !== null) {
        const compute = point[MEAN];
        const wait = compute + (others[0].get(point[START]) ?? 0);
        found.push({ from: from ?? (this.x === "steps" ? point[START] : to), to, tops: [compute, wait, wait + (others[1].get(point[START]) ?? 0)] });
      }
      from = to;
    }
    return found;
  }

  #drawBreakdown(canvas, stack, x0, x1, most) {
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const context = clearedContext(canvas, width, height);
    if (!context || !stack.length || x1 <= x0) return;
    const x = (value) => ((value - x0) / (x1 - x0)) * width;
    for (const [place, part] of [[2, "comm"], [1, "wait"], [0, "compute"]]) {
      context.fillStyle = color(COLORS[part]);
      context.beginPath();
      let end = null;
      for (const { from, to, tops } of stack) {
        const top = height - Math.min(1, tops[place] / most) * height;
        if (end === null || from > end + (x1 - x0) / width + 1e-9) {
          if (end !== null) context.lineTo(x(end), height);
          context.moveTo(x(from), height);
        }
        context.lineTo(x(from), top);
        context.lineTo(x(to), top);
        end = to;
      }
      context.lineTo(x(end), height);
      context.fill();
    }
    canvas.dataset.points = stack.length;
  }

  #axis(x0, x1) {
    const [width, height] = [this.axis.clientWidth, this.axis.clientHeight];
    const context = clearedContext(this.axis, width, height);
    if (!context || x1 <= x0) return;
    context.font = FONT;
    context.fillStyle = color("--muted");
    const found = xTicks(this.x, x0, x1, Math.max(2, Math.floor(width / (this.x === "time" ? 80 : 60))));
    drawLabels(context, found.map(({ value, text }) => ({ x: ((value - x0) / (x1 - x0)) * width, text })), 12, width);
  }
}

function total(worker) {
  return worker.compute_s + worker.wait_s + worker.comm_s;
}
