// Live changes of a run by server-sent events; by polling where the server rejects the stream.

import { fetchJson } from "./dom.js";

const POLL_MS = 3000;

export class Live {
  // onMessage(kind, message): whole, change, end; onConnection(text): a connection problem or ""; isOver(): whether the run is over
  constructor(name, onMessage, onConnection, isOver) {
    this.path = `/api/runs/${encodeURIComponent(name)}`;
    [this.onMessage, this.onConnection, this.isOver] = [onMessage, onConnection, isOver];
    document.addEventListener("visibilitychange", () => this.#visible());
  }

  start() {
    this.over = false;
    this.#open();
  }

  stop() {
    this.over = true;
    this.#close();
  }

  #open() {
    this.#close();
    const source = (this.source = new EventSource(`${this.path}/live`));
    for (const kind of ["whole", "change"]) {
      source.addEventListener(kind, (event) => {
        this.onConnection("");
        this.onMessage(kind, JSON.parse(event.data));
      });
    }
    source.addEventListener("end", () => {
      this.stop();
      this.onMessage("end", null);
    });
    source.addEventListener("error", () => {
      if (this.over) return;
      if (this.isOver()) return this.stop();
      if (source.readyState === EventSource.CLOSED) this.#poll();
      else this.onConnection("The dashboard is gone; trying again. After the end of a run, start hora dashboard to see it.");
    });
  }

  #close() {
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
  }

  // poll, and try to open a stream again every tenth time
  async #poll(times = 1) {
    this.#close();
    if (this.over || document.hidden) return;
    try {
      const run = await fetchJson(this.path);
      this.onConnection("");
      this.onMessage("whole", run);
      if (!run.live) {
        this.stop();
        this.onMessage("end", null);
        return;
      }
    } catch (problem) {
      this.onConnection(`The dashboard does not answer (${problem.message}); trying again.`);
    }
    if (!this.over) this.timer = setTimeout(() => (times % 10 ? this.#poll(times + 1) : this.#open()), POLL_MS);
  }

  // a hidden page holds no stream: browsers allow few per server
  #visible() {
    if (this.over) return;
    if (document.hidden) this.#close();
    else this.#open();
  }
}
