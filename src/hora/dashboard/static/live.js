// Live changes of a run by server-sent events; by polling where the server rejects the stream.

import { ask } from "./dom.js";

const POLL_MS = 3000;

export class Live {
  // told(kind, message): whole, change, end; link(text): a connection problem or ""; ended(): whether the run is over
  constructor(name, told, link, ended) {
    this.path = `/api/runs/${encodeURIComponent(name)}`;
    [this.told, this.link, this.ended] = [told, link, ended];
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
        this.link("");
        this.told(kind, JSON.parse(event.data));
      });
    }
    source.addEventListener("end", () => {
      this.stop();
      this.told("end", null);
    });
    source.addEventListener("error", () => {
      if (this.over) return;
      if (this.ended()) return this.stop();
      if (source.readyState === EventSource.CLOSED) this.#poll();
      else this.link("The dashboard is gone; trying again. After the end of a run, start hora dashboard to see it.");
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
      const told = await ask(this.path);
      this.link("");
      this.told("whole", told);
      if (!told.live) {
        this.stop();
        this.told("end", null);
        return;
      }
    } catch (problem) {
      this.link(`The dashboard does not answer (${problem.message}); trying again.`);
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
