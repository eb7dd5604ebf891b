// Curves (by uPlot) and the timeline. Whatever text comes in is put into text nodes, never into markup.
"use strict";

const MOST_LINES = 8; // of a chart; of more ranks the least, the median and the greatest are drawn
const COLOURS = 8;
const dark = matchMedia("(prefers-color-scheme: dark)");
const kinds = new Map(); // a part's name: its colour, the same in curves and in the timeline

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function colour(index) {
  return variable(`--c${index % COLOURS}`);
}

function kindColour(name) {
  if (!kinds.has(name)) kinds.set(name, name === "other" ? 7 : kinds.size % (COLOURS - 1));
  return kinds.get(name);
}

function element(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) made[name] = value;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function duration(ms) {
  return ms >= 1000 ? `${short(ms / 1000)} s` : ms >= 1 || ms === 0 ? `${short(ms)} ms` : `${short(ms * 1000)} µs`;
}

function clock(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const minutes = Math.floor(whole / 60);
  return minutes >= 60
    ? `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${String(whole % 60).padStart(2, "0")}`
    : `${minutes}:${String(whole % 60).padStart(2, "0")}`;
}

// One card with a chart: its lines by label, as {x: [...], y: [...]} each.
class Chart {
  constructor(parent, title, unit, { time = false, stacked = false } = {}) {
    Object.assign(this, { unit, time, stacked, plot: null, labels: "", data: null, lines: null });
    this.place = element("div");
    this.card = element("section", {}, element("h2", {}, title, element("small", {}, unit)), this.place);
    parent.append(this.card);
    new ResizeObserver(() => this.resize()).observe(this.place);
    dark.addEventListener("change", () => { this.labels = ""; if (this.lines) this.show(this.lines); });
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width > 50 && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
  }

  show(lines) {
    this.lines = lines;
    const labels = [...lines.keys()];
    let data = uPlot.join([...lines.values()].map((line) => [line.x, line.y]));
    if (this.stacked) data = stack(data);
    if (JSON.stringify(labels) !== this.labels) {
      this.labels = JSON.stringify(labels);
      this.plot?.destroy();
      this.plot = new uPlot(this.options(labels), data, this.place);
    } else {
      this.plot.setData(data);
    }
  }

  options(labels) {
    const axis = { stroke: variable("--soft"), grid: { stroke: variable("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const series = labels.map((label, i) => {
      const stroke = this.stacked ? colour(kindColour(label)) : colour(i);
      const shown = (u, _, s, at) => short(this.value(u.data, s, at)); // the last one, while the mouse is elsewhere
      return { label, stroke, width: this.stacked ? 1 : 1.75, fill: this.stacked ? stroke : undefined, points: { show: false }, spanGaps: false, value: shown };
    });
    return {
      width: Math.max(200, this.place.clientWidth), height: 220,
      scales: { x: { time: false }, y: { range: (u, low, high) => low === null ? [0, 1] : this.range(low, high) } },
      axes: [{ ...axis, values: (u, marks) => this.marks(marks), space: 60, size: 28 },
        { ...axis, size: 56, values: (u, marks) => marks.map(short) }],
      series: [{ label: this.time ? "at" : "step", value: (u, _, s, at) => { const v = this.value(u.data, s, at); return this.time ? clock(v) : String(v); } }, ...series],
      cursor: { drag: { x: true, y: false } },
    };
  }

  marks(marks) {
    const seconds = marks.length && marks[marks.length - 1] - marks[0] < 60;
    return marks.map((mark) => !this.time ? String(mark) : seconds ? `${Number(mark.toFixed(2))} s` : clock(mark));
  }

  value(data, s, at) {
    if (at === null) for (at = data[0].length - 1; at > 0 && (data[s][at] ?? null) === null;) at--;
    return this.stacked && s > 0 && s + 1 < data.length ? data[s][at] - data[s + 1][at] : data[s][at];
  }

  range(low, high) {
    if (this.time || low >= 0 && low < high / 2) return [0, high * 1.08 || 1];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }
}

// Sums such that a line lies above all that come behind it: areas are painted one over the other.
function stack(data) {
  const [x, ...parts] = data;
  const sums = parts.map((part) => part.map((value) => value ?? 0));
  for (let i = sums.length - 2; i >= 0; i--) sums[i] = sums[i].map((value, at) => value + sums[i + 1][at]);
  return [x, ...sums];
}

// The lines of ranks; of many ranks the least, the median and the greatest value.
function ofRanks(ranks) {
  const sorted = [...ranks].sort((a, b) => a[0] - b[0]);
  if (sorted.length <= MOST_LINES) return new Map(sorted.map(([rank, line]) => [`rank ${rank}`, line]));
  const [x, ...ys] = uPlot.join(sorted.map(([, line]) => [line.x, line.y]));
  const columns = x.map((_, at) => ys.map((y) => y[at]).filter((v) => v !== null && v !== undefined).sort((a, b) => a - b));
  const pick = (share) => columns.map((c) => c.length ? c[Math.round(share * (c.length - 1))] : null);
  return new Map([["most", { x, y: pick(1) }], ["median", { x, y: pick(0.5) }], ["least", { x, y: pick(0) }]]);
}

class Curves {
  constructor(parent) {
    this.parent = parent;
    this.charts = new Map();
    this.lines = new Map(); // of a chart: by rank, or by part
  }

  add(news) {
    const changed = new Set();
    for (const [kind, name, rank, start, xs, ys] of news) {
      const chart = kind === "scalar" ? `scalar ${name}` : kind;
      if (!this.lines.has(chart)) this.lines.set(chart, new Map());
      const lines = this.lines.get(chart), key = kind === "part" ? name : rank;
      const line = start > 0 && lines.has(key) ? lines.get(key) : { x: [], y: [] };
      lines.set(key, { x: line.x.slice(0, start).concat(xs), y: line.y.slice(0, start).concat(ys) });
      changed.add(chart);
    }
    for (const chart of changed) this.draw(chart);
  }

  draw(name) {
    const lines = this.lines.get(name);
    if (![...lines.values()].some((line) => line.x.length > 1)) return; // a point is no curve
    if (!this.charts.has(name)) {
      const made = name === "step" ? new Chart(this.parent, "Step time", "ms", { time: true })
        : name === "part" ? new Chart(this.parent, "Parts of a step", "ms, mean of all ranks", { time: true, stacked: true })
        : new Chart(this.parent, name.slice("scalar ".length), "by step");
      made.card.dataset.chart = name;
      made.card.style.order = name === "step" ? -2 : name === "part" ? -1 : 0;
      this.charts.set(name, made);
    }
    if (name === "part") [...lines.keys()].forEach(kindColour);
    this.charts.get(name).show(name === "part" ? lines : ofRanks(lines));
  }
}

function drawTimeline(place, timeline) {
  place.hidden = !timeline;
  if (!timeline) return;
  const seen = new Set();
  const tracks = timeline.rows.map((row) => {
    const lane = element("div", { className: "lane" });
    for (const [name, kind, start, end] of row.bars) {
      seen.add(kind);
      const left = Math.max(0, start), width = Math.min(end, timeline.length_ms) - left;
      const bar = element("i", { className: `k${kindColour(kind)}`, textContent: name, title: `${name}: ${duration(end - start)}` });
      bar.style.left = `${100 * left / timeline.length_ms}%`;
      bar.style.width = `${100 * width / timeline.length_ms}%`;
      lane.append(bar);
    }
    return element("div", { className: "track" }, element("span", { className: "soft", textContent: `rank ${row.rank}` }), lane);
  });
  const legend = element("div", { className: "legend" }, ...[...seen].map((kind) => element("span", {}, element("i", { className: `k${kindColour(kind)}` }), kind)));
  const title = element("h2", {}, "Timeline", element("small", {}, `${timeline.title}, ${duration(timeline.length_ms)}`));
  place.replaceChildren(title, legend, ...tracks);
}
