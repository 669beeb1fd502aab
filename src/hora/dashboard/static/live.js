// Live: a run's changes as they come, by server-sent events; where no stream is to be had, by asking now and then.

import { ask } from "./dom.js";

const POLL_MS = 3000;

export class Live {
  // told(kind, message): whole, change, end; link(text): "" while all is well; ended(): whether the run has said its last
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
      else this.link("The page's server is gone; trying again. After a run's end, hora dashboard shows it.");
    });
  }

  #close() {
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
  }

  // the server turned the stream away: ask, and try for a stream again each tenth time
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
      this.link(`The page's server does not answer (${problem.message}); trying again.`);
    }
    if (!this.over) this.timer = setTimeout(() => (times % 10 ? this.#poll(times + 1) : this.#open()), POLL_MS);
  }

  // a page that nobody sees takes no stream: browsers allow few to one server
  #visible() {
    if (this.over) return;
    if (document.hidden) this.#close();
    else this.#open();
  }
}
