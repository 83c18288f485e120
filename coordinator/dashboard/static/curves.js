// A chart of some metrics of a job by its steps, in colours that the colour-blind can tell apart.
import { h } from "./dom.js";

const HEIGHT = 260;
export const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8a8a8a"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [], [7, 4], [2, 3]];
const dark = matchMedia("(prefers-color-scheme: dark)");
const number = (value) => (typeof value === "number" ? value : null);

// Points of several curves over one axis of steps: null where a curve has none.
function joined(curves) {
  const steps = [...new Set(curves.flatMap(([x]) => x))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, number) => [step, number]));
  return [steps, ...curves.map(([x, y]) => {
    const row = new Array(steps.length).fill(null);
    x.forEach((step, i) => { row[at.get(step)] = number(y[i]); });
    return row;
  })];
}

export class Chart {
  // lines: [[metric, label], ...]; log: whether the axis is logarithmic where all values are positive
  constructor({ height = HEIGHT, unit = "step", format = (v) => String(+v.toPrecision(4)) } = {}) {
    this.height = height;
    this.unit = unit;
    this.format = format;
    this.box = h("div", { class: "chart" });
    this.legend = h("div", { class: "legend" });
    this.none = h("p", { class: "none" }, "no points yet");
    this.element = h("div", {}, this.legend, this.box, this.none);
    this.plot = null;
    this.names = "";
    new ResizeObserver(() => this.fit()).observe(this.box);
    dark.addEventListener("change", () => { this.names = ""; this.set(this.last || []); });
  }

  fit() {
    if (this.plot && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: this.height });
  }

  // curves: [{label, points: [steps, values]}]
  set(curves) {
    this.last = curves;
    const shown = curves.filter((curve) => curve.points && curve.points[0].length);
    this.none.hidden = shown.length > 0;
    this.box.hidden = this.legend.hidden = shown.length === 0;
    if (!shown.length) return;
    const data = joined(shown.map((curve) => curve.points));
    const names = JSON.stringify(shown.map((curve) => curve.label));
    if (this.names !== names || !this.plot) this.make(shown, data, names);
    else this.plot.setData(data);
    this.newest(shown);
  }

  newest(shown, at = null) {
    this.legend.replaceChildren(...shown.map((curve, i) => {
      const [steps, values] = curve.points;
      let index = steps.length - 1;
      if (at !== null) { index = steps.findLastIndex((step) => step <= at); }
      const swatch = h("i", { "aria-hidden": "true" });
      swatch.style.background = PALETTE[i % PALETTE.length];
      const value = index < 0 ? "–" : typeof values[index] === "number" ? this.format(values[index]) : String(values[index]);
      return h("span", {}, swatch, curve.label, " ", h("b", {}, value));
    }), at === null ? "" : h("span", { class: "dim" }, `${this.unit} ${at}`));
  }

  make(shown, data, names) {
    if (this.plot) this.plot.destroy();
    this.names = names;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--dim").trim();
    const grid = style.getPropertyValue("--line").trim();
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
    const options = {
      width: this.box.clientWidth || 600,
      height: this.height,
      legend: { show: false },
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false } },
      axes: [
        { ...axis, size: 28, space: 60 },
        { ...axis, size: 54, space: 34, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
      ],
      series: [{}, ...shown.map((curve, i) => ({
        label: curve.label,
        stroke: PALETTE[i % PALETTE.length],
        dash: DASHES[i % DASHES.length],
        width: 1.8,
        spanGaps: true,
        points: { show: curve.points[0].length < 40, size: 5 },
      }))],
      hooks: {
        setCursor: [(plot) => {
          const at = plot.cursor.idx;
          this.newest(this.last.filter((c) => c.points && c.points[0].length), at === null || at === undefined ? null : plot.data[0][at]);
        }],
      },
    };
    this.box.replaceChildren();
    this.plot = new uPlot(options, data, this.box);
  }
}
