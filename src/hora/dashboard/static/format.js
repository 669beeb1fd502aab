// Numbers, sizes and times as people read them.

const MINUS = "−";

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : MINUS + "∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replaceAll("-", MINUS);
  if (size >= 1e5) return short(value);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
  return text.replace("-", MINUS);
}

export function short(value) {
  for (const [limit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= limit) return Number((value / limit).toPrecision(3)) + " " + sign;
  }
  return String(Number(value.toPrecision(3))).replace("-", MINUS);
}

export function whole(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [limit, sign] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= limit) return Number((value / limit).toPrecision(3)) + " " + sign;
  }
  return Math.round(value) + " B";
}

// of a step: 1.20 s, 412 ms, 86 µs
export function moment(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds >= 100) return duration(seconds);
  if (seconds >= 1) return seconds.toPrecision(3) + " s";
  if (seconds >= 1e-3) return Number((seconds * 1e3).toPrecision(3)) + " ms";
  return Number((seconds * 1e6).toPrecision(2)) + " µs";
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return (seconds < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)) + " s";
  const total = Math.round(seconds);
  const [days, hours, minutes, rest] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60, total % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : Math.round(share * 100) + " %";
}

// of a worker or server: one whose script ended has "left"
export function stateWord(state) {
  return state === "left" ? "finished" : state;
}

export function date(text) {
  const when = new Date(text);
  if (!text || Number.isNaN(when.getTime())) return "–";
  const now = new Date();
  const clock = when.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (when.toDateString() === now.toDateString()) return `today ${clock}`;
  const year = when.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return when.toLocaleDateString("en-GB", { day: "numeric", month: "short", year }) + " " + clock;
}
