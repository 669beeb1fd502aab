// Bars: a histogram on a canvas.

import { FONT, drawLabels } from "./axes.js";
import { clearedContext, color, el } from "./dom.js";
import { short } from "./format.js";

export class Bars {
  constructor(parent) {
    this.canvas = el("canvas", { className: "bars", role: "img" });
    this.bars = [];
    parent.append(this.canvas);
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  // bars: heights; labels: [{at: 0 to 1, text}] below; words for screen readers
  set(bars, labels, words) {
    [this.bars, this.labels] = [bars, labels];
    this.canvas.setAttribute("aria-label", words);
    this.redraw();
  }

  redraw() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const context = clearedContext(this.canvas, width, height);
    if (!context || !this.bars.length) return;
    context.font = FONT;
    const most = Math.max(...this.bars, 1e-12);
    const [top, bottom, step] = [16, height - 18, Math.min(64, width / this.bars.length)];
    context.fillStyle = color("--grid");
    context.fillRect(0, bottom, width, 1);
    context.fillStyle = color("--compute");
    this.bars.forEach((value, place) => {
      if (!value) return;
      const tall = Math.max(1, (value / most) * (bottom - top));
      context.fillRect(place * step + 0.5, bottom - tall, Math.max(1, step - (step > 4 ? 1.5 : 0)), tall);
    });
    context.fillStyle = color("--muted");
    context.textAlign = "left";
    context.fillText(`most ${short(most)}`, 0, 10);
    drawLabels(context, this.labels.map(({ at, text }) => ({ x: at * step * this.bars.length, text })), height - 4, width, 6);
  }
}
