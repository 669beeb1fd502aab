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
    this.told = {};
    this.now = null;
    this.curves = new Map();
    this.events = [];
    this.histograms = [];
  }

  whole(told) {
    this.clear();
    this.change(told);
  }

  change(told) {
    for (const [name, news] of Object.entries(told.curves ?? {})) this.#grow(name, news);
    if (told.now) this.now = told.now;
    if (told.events?.length) {
      const last = this.events.length ? this.events[this.events.length - 1].number : 0;
      this.events.push(...told.events.filter((event) => event.number > last));
      if (this.events.length > 500) this.events.splice(0, this.events.length - 500);
    }
    if (told.histograms) this.histograms = told.histograms;
    for (const key of ["name", "live", "run", "end", "problem", "remembered", "state", "strategy", "summary", "version"]) {
      if (key in told) this.told[key] = told[key];
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
