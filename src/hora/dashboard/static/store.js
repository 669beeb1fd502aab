// Store: the state of a run on this page: its curves, and the newest of everything else.

export const START = 0, STEPS = 1, AT = 2, SAMPLES = 3, MEAN = 4, LOW = 5, HIGH = 6, LAST = 7, COUNT = 8;

export const X = {
  steps: { label: "step", of: (point) => point[START] + point[STEPS] - 1 },
  samples: { label: "samples", of: (point) => point[SAMPLES] },
  time: { label: "time", of: (point) => point[AT] },
};

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.info = {};
    this.now = null;
    this.curves = new Map();
    this.events = [];
    this.histograms = [];
  }

  whole(info) {
    this.clear();
    this.change(info);
  }

  change(info) {
    for (const [name, news] of Object.entries(info.curves ?? {})) this.#grow(name, news);
    if (info.now) this.now = info.now;
    if (info.events?.length) {
      const last = this.events.length ? this.events[this.events.length - 1].number : 0;
      this.events.push(...info.events.filter((event) => event.number > last));
      if (this.events.length > 500) this.events.splice(0, this.events.length - 500);
    }
    if (info.histograms) this.histograms = info.histograms;
    for (const key of ["name", "live", "run", "end", "problem", "remembered", "state", "strategy", "summary", "version"]) {
      if (key in info) this.info[key] = info[key];
    }
  }

  names(prefix) {
    return [...this.curves.keys()].filter((name) => name.startsWith(prefix));
  }

  #grow(name, news) {
    const known = this.curves.get(name);
    if (!known || news.whole) {
      this.curves.set(name, { width: news.width, points: news.points });
      return;
    }
    known.width = news.width;
    for (const point of news.points) {
      let place = known.points.length;
      while (place > 0 && known.points[place - 1][START] >= point[START]) place -= 1;
      const same = known.points[place]?.[START] === point[START];
      known.points.splice(place, same ? 1 : 0, point);
    }
  }
}
