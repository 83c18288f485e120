// Heat maps: rates between workers or between sites, and who exchanged how much with whom.
import { bits, h, nameOf, seconds, svg } from "./dom.js";

const CELL = 22;
const MOST_WORKERS = 60;
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// From vermilion (slow) over grey to blue (fast), by the logarithm; each cell also has a digit.
const STEPS = ["#a63900", "#d55e00", "#e69f00", "#cfc58a", "#9ecae1", "#56b4e9", "#0072b2"];
const INK = ["#fff", "#fff", "#1a1f26", "#1a1f26", "#1a1f26", "#1a1f26", "#fff"];
const BORDERS = [1e6, 5e6, 2e7, 1e8, 3e8, 8e8];
const LABELS = ["under 1", "1–5", "5–20", "20–100", "100–300", "300–800", "over 800"];
const stepOf = (bps) => BORDERS.findIndex((border) => bps < border) === -1 ? STEPS.length - 1 : BORDERS.findIndex((border) => bps < border);

const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];

// Between places: the median of the rates between their workers, and how many there are.
export function bySite(links, workers) {
  const found = new Map();
  for (const link of links) {
    const [from, to] = [link.source, link.target].map((id) => (workers[id] || {}).site || "no site given");
    const key = JSON.stringify([from, to]);
    if (!found.has(key)) found.set(key, { source: from, target: to, rates: [], delays: [], ways: new Set(), shared: "" });
    const one = found.get(key);
    one.rates.push(link.bandwidth_bps);
    one.delays.push(link.latency_s);
    one.ways.add(link.way || "not joined");
    one.shared = one.shared || link.shared;
  }
  return [...found.values()].map((one) => ({
    source: one.source, target: one.target, bandwidth_bps: median(one.rates), latency_s: median(one.delays),
    way: [...one.ways].join(", "), shared: one.shared, count: one.rates.length,
  }));
}

export function linkMap(links, workers) {
  const ids = [...new Set(links.flatMap((link) => [link.source, link.target]))];
  const sites = ids.length > MOST_WORKERS;
  const shown = sites ? bySite(links, workers) : links;
  const site = (id) => (workers[id] || {}).site || "";
  const ends = [...new Set(shown.flatMap((link) => [link.source, link.target]))]
    .sort((a, b) => site(a).localeCompare(site(b)) || nameOf(a, workers).localeCompare(nameOf(b, workers)));
  return { sites, element: matrix(ends, shown.map((link) => ({
    source: link.source,
    target: link.target,
    step: stepOf(link.bandwidth_bps),
    sign: { relayed: "r", reversed: "v", local: "l" }[link.way] || "",
    title: `${nameOf(link.source, workers)} → ${nameOf(link.target, workers)}${link.count ? ` (${link.count} links)` : ""}\n${bits(link.bandwidth_bps)}, ${seconds(link.latency_s)} one way, ${link.way || "not joined"}${link.shared ? `\nshares ${link.shared}` : ""}`,
  })), (id) => nameOf(id, workers)) };
}

export function matrix(ends, cells, name) {
  const at = new Map(ends.map((end, number) => [end, number]));
  const left = 8 + 7.2 * Math.min(18, Math.max(...ends.map((end) => name(end).length), 4));
  const top = left * 0.78;
  const size = ends.length * CELL;
  return h("div", { class: "plan" }, svg("svg", { width: left + size + 60, height: top + size + 4, role: "img", "aria-label": "Matrix, from rows to columns", class: "matrix" },
    ends.map((end, i) => [
      svg("text", { x: left - 6, y: top + i * CELL + 15, "text-anchor": "end", "font-size": 11 }, cut(name(end), 18)),
      svg("text", { transform: `translate(${left + i * CELL + 14} ${top - 6}) rotate(-48)`, "font-size": 11 }, cut(name(end), 18)),
      svg("rect", { x: left + i * CELL, y: top + i * CELL, width: CELL - 2, height: CELL - 2, rx: 4, class: "track" }),
    ]),
    cells.map((cell) => {
      const [x, y] = [left + at.get(cell.target) * CELL, top + at.get(cell.source) * CELL];
      return svg("g", {}, svg("title", {}, cell.title),
        svg("rect", { x, y, width: CELL - 2, height: CELL - 2, rx: 4, fill: STEPS[cell.step] }),
        cell.sign ? svg("text", { x: x + 10, y: y + 14, "text-anchor": "middle", "font-size": 11, "font-weight": 700, class: `on${cell.step}` }, cell.sign) : "");
    })));
}

export function linkLegend() {
  return h("div", { class: "legend" }, LABELS.map((label, step) => {
    const swatch = h("i", { "aria-hidden": "true" });
    swatch.style.background = STEPS[step];
    return h("span", {}, swatch, label);
  }), h("span", {}, "Mbit/s · r relayed · v dialled by the target · l on one machine"));
}

export { INK };
