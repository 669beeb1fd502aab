// Axis ticks at round values, and their labels.

import { duration, number, short } from "./format.js";

export const FONT = '11px system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';

const CLOCK = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

export function ticks(low, high, count) {
  const step = nice((high - low) / Math.max(1, count));
  return between(low, high, step);
}

function timeTicks(low, high, count) {
  const wanted = (high - low) / Math.max(1, count);
  const step = CLOCK.find((one) => one >= wanted) ?? Math.ceil(wanted / 86400) * 86400;
  return between(low, high, wanted < 0.1 ? nice(wanted) : step);
}

export function logTicks(low, high) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const found = [];
  const every = Math.max(1, Math.ceil((to - from) / 5));
  const parts = to - from <= 2 ? [1, 2, 5] : [1];
  for (let power = from; power <= to; power += every) {
    for (const part of parts) {
      const tick = part * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) found.push(tick);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4).filter((tick) => tick > 0);
}

export function label(value, found) {
  const step = found.length > 1 ? Math.abs(found[1] - found[0]) : Math.abs(value);
  const size = Math.max(...found.map(Math.abs));
  if (size >= 1e4) return short(value);
  if (size < 1e-3 && size > 0) return number(value, 2);
  let digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step || 1) + 1e-9)));
  if (Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1; // 0.25
  return value.toFixed(digits).replace("-", "−");
}

// Ticks of an x axis over steps, samples or time: [{value, text}]
export function xTicks(x, low, high, count) {
  const time = x === "time";
  const found = (time ? timeTicks : ticks)(low, high, count).filter((tick) => time || Number.isInteger(tick));
  return found.map((value) => ({ value, text: time ? timeLabel(value) : label(value, found) }));
}

// Draws [{x, text}] centred at y, inside of width; labels that would touch the one before are left out.
export function drawLabels(context, labels, y, width, gap = 8) {
  context.textAlign = "center";
  let end = -Infinity;
  for (const { x, text } of labels) {
    const half = context.measureText(text).width / 2;
    const at = Math.min(Math.max(x, half), width - half);
    if (at - half < end + gap) continue;
    context.fillText(text, at, y);
    end = at + half;
  }
}

export function timeLabel(value) {
  return value === 0 ? "0" : duration(value);
}

// From where to where the axis of values from low to high goes
export function range(low, high, from0) {
  if (high - low > Math.abs(high) * 1e-9) return [from0 && low === 0 ? 0 : low - (high - low) * 0.04, high + (high - low) * 0.06];
  if (high === 0) return [0, 1];
  return from0 && high > 0 ? [0, high * 1.2] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
}

function nice(step) {
  if (!(step > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(step));
  const part = step / power;
  return (part <= 1 ? 1 : part <= 2 ? 2 : part <= 2.5 ? 2.5 : part <= 5 ? 5 : 10) * power;
}

function between(low, high, step) {
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6 && found.length < 50; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return found;
}
