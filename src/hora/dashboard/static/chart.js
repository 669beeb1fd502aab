// Chart: curves with their low-high bands on a canvas. Pointer and arrow keys read a point.

import { FONT, drawLabels, label, logTicks, range, ticks, timeLabel, xTicks } from "./axes.js";
import { color, el, clearedContext, setText } from "./dom.js";
import { number } from "./format.js";
import { HIGH, LOW, MEAN, X } from "./store.js";

const MARGIN = { top: 8, right: 12, bottom: 20 };

export class Chart {
  // options: title, unit, from0 (the axis begins at 0), band, swatches (the legend names colours)
  constructor(parent, options) {
    this.options = { band: true, ...options };
    this.title = options.title;
    this.series = [];
    this.x = "steps";
    this.log = this.smooth = false;
    this.reading = null;
    this.canvas = el("canvas", { className: "plot", role: "img", tabindex: "0" });
    this.tip = el("div", { className: "tip", hidden: true });
    this.newest = el("span", { className: "newest" });
    this.heading = el("h3", {}, el("span", { text: options.title, title: options.title }), this.newest);
    this.root = el("figure", { className: "chart" }, this.heading, el("div", { className: "holder" }, this.canvas, this.tip));
    parent.append(this.root);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.#read(null));
    this.canvas.addEventListener("blur", () => this.#read(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  // series: [{name, color (a CSS variable), points, newest (shown in the heading; else the mean of the last point)}]
  set(series, x = this.x, log = false, smooth = false) {
    [this.series, this.x, this.log, this.smooth] = [series, x, log, smooth];
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.#draw();
    });
  }

  #draw() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const context = clearedContext(canvas, width, height);
    if (!context) return;
    context.font = FONT;
    this.#describe();
    this.drawn = this.series.map((one) => ({ ...one, points: ordered(one.points, X[this.x].of) }));
    const area = this.#area(width, height, context);
    if (!area) {
      context.fillStyle = color("--muted");
      context.textAlign = "center";
      context.fillText("nothing yet", width / 2, height / 2);
      return;
    }
    this.#axes(context, area);
    context.save();
    context.beginPath();
    context.rect(area.left, area.top - 2, area.right - area.left + 4, area.bottom - area.top + 4);
    context.clip();
    if (this.options.band) for (const one of this.drawn) this.#band(context, area, one);
    for (const one of this.drawn) this.#line(context, area, one);
    context.restore();
    this.#readings(context, area);
  }

  #area(width, height, context) {
    const of = X[this.x].of;
    let [x0, x1, y0, y1, any] = [Infinity, -Infinity, Infinity, -Infinity, false];
    const [lows, highs] = [[], []];
    for (const { points } of this.drawn) {
      for (const point of points) {
        const mean = point[MEAN];
        if (mean === null || (this.log && mean <= 0)) continue;
        any = true;
        const x = of(point);
        if (x < x0) x0 = x;
        if (x > x1) x1 = x;
        if (mean < y0) y0 = mean;
        if (mean > y1) y1 = mean;
        if (this.options.band) {
          if (!this.log || point[LOW] > 0) lows.push(point[LOW]);
          highs.push(point[HIGH]);
        }
      }
    }
    if (!any) return null;
    // a few outliers in the band do not press the curve flat
    if (lows.length > 20) y0 = Math.min(y0, quantile(lows, 0.02));
    else if (lows.length) y0 = Math.min(y0, ...lows);
    if (highs.length) y1 = Math.max(y1, highs.length > 20 ? quantile(highs, 0.98) : Math.max(...highs));
    if (this.options.from0) y0 = Math.min(0, y0);
    if (x0 > 0 && x0 < (x1 - x0) * 0.2) x0 = 0;
    if (x1 <= x0) [x0, x1] = [x0 - 0.5, x0 + 0.5];
    if (this.log) [y0, y1] = y1 > y0 * 1.01 ? [y0 / 1.05, y1 * 1.05] : [y0 / 1.5, y1 * 1.5];
    else [y0, y1] = range(y0, y1, this.options.from0);
    const rows = Math.max(2, Math.floor((height - MARGIN.top - MARGIN.bottom) / 26));
    const yTicks = this.log ? logTicks(y0, y1) : ticks(y0, y1, rows);
    const yLabels = yTicks.map((tick) => (this.log ? number(tick, 2) : label(tick, yTicks)));
    const left = Math.ceil(Math.max(18, ...yLabels.map((text) => context.measureText(text).width))) + 8;
    const [top, right, bottom] = [MARGIN.top, width - MARGIN.right, height - MARGIN.bottom];
    const toY = this.log ? (v) => (Math.log(v) - Math.log(y0)) / (Math.log(y1) - Math.log(y0)) : (v) => (v - y0) / (y1 - y0);
    return {
      left, top, right, bottom, x0, x1, yTicks, yLabels,
      x: (value) => left + ((value - x0) / (x1 - x0)) * (right - left),
      y: (value) => bottom - (this.log && value <= 0 ? -1 : toY(value)) * (bottom - top),
    };
  }

  #axes(context, area) {
    context.lineWidth = 1;
    context.strokeStyle = color("--grid");
    context.fillStyle = color("--muted");
    context.textBaseline = "middle";
    context.textAlign = "right";
    area.yTicks.forEach((tick, place) => {
      const y = Math.round(area.y(tick)) + 0.5;
      if (y < area.top - 1 || y > area.bottom + 1) return;
      context.beginPath();
      context.moveTo(area.left, y);
      context.lineTo(area.right, y);
      context.stroke();
      context.fillText(area.yLabels[place], area.left - 6, y);
    });
    const columns = Math.max(2, Math.floor((area.right - area.left) / (this.x === "time" ? 64 : 48)));
    const found = xTicks(this.x, area.x0, area.x1, columns).map(({ value, text }) => ({ x: area.x(value), text }));
    context.textBaseline = "alphabetic";
    drawLabels(context, found, area.bottom + 15, area.right + MARGIN.right);
  }

  #band(context, area, one) {
    const of = X[this.x].of;
    context.fillStyle = color(one.color);
    context.globalAlpha = 0.16;
    for (const run of runs(one.points, this.log)) {
      if (run.length < 2) continue;
      context.beginPath();
      for (const point of run) context.lineTo(area.x(of(point)), area.y(point[HIGH]));
      for (let place = run.length - 1; place >= 0; place -= 1) context.lineTo(area.x(of(run[place])), area.y(run[place][LOW]));
      context.fill();
    }
    context.globalAlpha = 1;
  }

  #line(context, area, one) {
    const of = X[this.x].of;
    context.strokeStyle = context.fillStyle = color(one.color);
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    for (const run of runs(one.points, this.log)) {
      context.globalAlpha = this.smooth ? 0.3 : 1;
      context.beginPath();
      for (const point of run) context.lineTo(area.x(of(point)), area.y(point[MEAN]));
      context.stroke();
      context.globalAlpha = 1;
      if (this.smooth) {
        context.beginPath();
        for (const [point, mean] of smoothed(run)) context.lineTo(area.x(of(point)), area.y(mean));
        context.stroke();
      }
      const last = run[run.length - 1];
      if (run.length === 1 || last === one.points[one.points.length - 1]) {
        context.beginPath();
        context.arc(area.x(of(last)), area.y(last[MEAN]), 2.6, 0, 7);
        context.fill();
      }
    }
  }

  #readings(context, area) {
    this.area = area;
    if (this.reading === null) {
      this.tip.hidden = true;
      return;
    }
    const at = Math.min(Math.max(this.reading, area.x0), area.x1);
    const of = X[this.x].of;
    const found = this.drawn.map((one) => ({ one, point: nearest(one.points, of, at) })).filter(({ point }) => point);
    if (!found.length) return;
    const close = found.reduce((best, next) => (Math.abs(of(next.point) - at) < Math.abs(of(best.point) - at) ? next : best));
    const x = area.x(of(close.point));
    context.strokeStyle = color("--muted");
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, area.top);
    context.lineTo(Math.round(x) + 0.5, area.bottom);
    context.stroke();
    context.setLineDash([]);
    for (const { one, point } of found) {
      if (point[MEAN] === null) continue;
      context.fillStyle = color(one.color);
      context.beginPath();
      context.arc(area.x(of(point)), area.y(point[MEAN]), 3.5, 0, 7);
      context.fill();
    }
    const shownX = this.x === "time" ? timeLabel(of(close.point)) : of(close.point).toLocaleString("en");
    const lines = [el("b", { text: `${X[this.x].label} ${shownX}` })];
    for (const { one, point } of found) {
      const spread = point[HIGH] > point[LOW] && this.options.band ? ` (${number(point[LOW])} to ${number(point[HIGH])})` : "";
      const named = this.series.length > 1 ? `${one.name}: ` : "";
      lines.push(el("span", { text: `${named}${number(point[MEAN])}${spread}` }));
    }
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    const room = this.canvas.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(room, x > this.canvas.clientWidth / 2 ? x - this.tip.offsetWidth - 10 : x + 10))}px`;
  }

  #describe() {
    const parts = this.series.filter((one) => one.points.length).map((one) => {
      const value = number(one.newest ?? last(one.points));
      return this.series.length > 1 ? `${one.name} ${value}` : value;
    });
    const points = this.series.reduce((sum, one) => sum + one.points.length, 0);
    const end = Math.max(...this.series.filter((one) => one.points.length).map((one) => X.steps.of(one.points[one.points.length - 1])));
    this.canvas.dataset.points = points;
    this.canvas.dataset.end = points ? end : "";
    const what = parts.length ? `newest ${parts.join(", ")} at step ${end}` : "nothing yet";
    this.canvas.setAttribute("aria-label", `${this.title} over ${X[this.x].label}: ${what}`);
    this.#legend(parts);
  }

  // beside the title: the newest value, or with several curves whose colour is whose
  #legend(parts) {
    this.heading.classList.toggle("several", this.series.length > 1);
    if (this.series.length < 2) {
      setText(this.newest, parts[0] ?? "");
      this.legend = "";
      return;
    }
    const key = JSON.stringify(this.series.map((one) => [one.name, one.color]));
    if (key === this.legend) return;
    this.legend = key;
    this.newest.replaceChildren(...this.series.map((one) => {
      const swatch = el("i", { className: "swatch" });
      swatch.style.background = `var(${one.color})`;
      return el("span", {}, swatch, one.short ?? one.name);
    }));
  }

  #point(offset) {
    if (!this.area) return;
    const { left, right, x0, x1 } = this.area;
    this.#read(x0 + ((offset - left) / (right - left)) * (x1 - x0));
  }

  #read(at) {
    this.reading = at;
    this.redraw();
  }

  #key(event) {
    if (!this.area) return;
    if (event.key === "Escape") return this.#read(null);
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const { x0, x1 } = this.area;
    this.#read(Math.min(x1, Math.max(x0, (this.reading ?? x1) + (way * (x1 - x0)) / 50)));
  }
}

// points by their x: steps of several workers may come to an end in another order than they are counted in
export function ordered(points, of) {
  const isOrdered = points.every((point, place) => !place || of(points[place - 1]) <= of(point));
  return isOrdered ? points : [...points].sort((a, b) => of(a) - of(b));
}

// stretches without a gap
function* runs(points, log) {
  let run = [];
  for (const point of points) {
    if (point[MEAN] === null || (log && point[MEAN] <= 0)) {
      if (run.length) yield run;
      run = [];
    } else run.push(point);
  }
  if (run.length) yield run;
}

// the mean over about a thirtieth of the curve around each point
function* smoothed(run) {
  const reach = Math.max(1, Math.round(run.length / 60));
  const sums = [0];
  for (const point of run) sums.push(sums[sums.length - 1] + point[MEAN]);
  for (let place = 0; place < run.length; place += 1) {
    const room = Math.min(reach, place, run.length - 1 - place); // as far to both sides, so that it leans to neither
    yield [run[place], (sums[place + room + 1] - sums[place - room]) / (2 * room + 1)];
  }
}

function last(points) {
  for (let place = points.length - 1; place >= 0; place -= 1) if (points[place][MEAN] !== null) return points[place][MEAN];
  return NaN;
}

function nearest(points, of, at) {
  if (!points.length) return null;
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (of(points[middle]) < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - of(points[low - 1]) < of(points[low]) - at ? points[low - 1] : points[low];
}

function quantile(values, share) {
  const sorted = Float64Array.from(values.filter((value) => value !== null)).sort();
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
