// What workers have given, by day and in all.
import { bytes, card, count, energy, h, seconds, show, showIf, svg, workerLink } from "../dom.js";
import { contentOf, start } from "../live.js";
import { filter, Table } from "../table.js";

const HEIGHT = 130;
const page = document.getElementById("page");
const tiles = h("div", { class: "tiles" });
const days = h("div", {});
const search = h("input", { type: "search", placeholder: "filter: alice", "aria-label": "Filter workers", spellcheck: "false", oninput: () => draw() });
const given = () => contentOf("contributions").tables.given || {};
const hours = (value) => (value < 3600 ? seconds(value) : `${count(Math.round(value / 3600))} h`);

const table = new Table([
  { title: "worker", text: (row, key) => row.name || key, draw: (row, key) => workerLink(key, given()) },
  { title: "compute time", right: true, text: (row) => hours(row.compute_s), sort: (row) => row.compute_s },
  { title: "last 30 days", text: (row) => JSON.stringify(row.recent), sort: (row) => row.recent.reduce((a, b) => a + b, 0), draw: (row) => spark(row.recent) },
  { title: "steps", right: true, text: (row) => count(row.steps), sort: (row) => row.steps },
  { title: "samples", right: true, text: (row) => count(row.samples), sort: (row) => row.samples },
  { title: "received", right: true, text: (row) => bytes(row.bytes_in), sort: (row) => row.bytes_in },
  { title: "sent", right: true, text: (row) => bytes(row.bytes_out), sort: (row) => row.bytes_out },
  { title: "energy", right: true, text: (row) => energy(row.energy_j), sort: (row) => row.energy_j },
  { title: "not stored yet", right: true, text: (row) => count(row.pending_steps), sort: (row) => row.pending_steps },
  { title: "discarded", right: true, text: (row) => count(row.discarded_steps), sort: (row) => row.discarded_steps },
  { title: "days", right: true, text: (row) => String(row.days), sort: (row) => row.days },
  { title: "since", text: (row) => row.since },
], { empty: "Nothing has been given yet: the first committed step counts.", sort: 1, down: true, shown: 50, label: "Contributions" });

function spark(values) {
  const most = Math.max(...values, 1);
  return svg("svg", { width: 4 * values.length, height: 20, class: "spark", role: "img", "aria-label": "compute time by day" },
    values.map((value, i) => svg("rect", { x: 4 * i, y: 20 - Math.max(value ? 1 : 0, 20 * value / most), width: 3, height: Math.max(value ? 1 : 0, 20 * value / most), class: "round good" })));
}

function tile(label, value, more) {
  return h("div", { class: "tile" }, h("span", { class: "label" }, label), h("strong", {}, value), h("span", { class: "dim" }, more || "\u00a0"));
}

function drawDays(rows, width) {
  const all = Object.entries(rows).sort(([a], [b]) => a.localeCompare(b)).slice(-Math.max(30, Math.floor(width / 8)));
  if (!all.length) return h("p", { class: "none" }, "No day yet.");
  const most = Math.max(...all.map(([, row]) => row.compute_s), 1);
  const step = Math.min(34, Math.max(7, Math.floor((width - 8) / all.length)));
  return h("div", { class: "plan" }, svg("svg", { width: step * all.length, height: HEIGHT + 20, role: "img", "aria-label": "Compute time by day", class: "timeline" },
    all.map(([day, row], i) => svg("g", { transform: `translate(${i * step} 0)` },
      svg("title", {}, `${day}: ${hours(row.compute_s)} by ${row.workers} workers, ${count(row.steps)} steps, ${bytes(row.bytes_out)} sent`),
      svg("rect", { x: 1, width: step - 2, y: HEIGHT - HEIGHT * row.compute_s / most, height: HEIGHT * row.compute_s / most, rx: 2, class: "round good" }),
      i % Math.ceil(66 / step) === 0 ? svg("text", { x: 1, y: HEIGHT + 16, "font-size": 10.5, class: "dim" }, day.slice(5)) : ""))));
}

function draw() {
  const { facts, tables } = contentOf("contributions");
  if (!facts.totals) return;
  const { totals } = facts;
  showIf(tiles, [totals, facts.days, Object.keys(given()).length], () => [
    tile("Compute time", hours(totals.compute_s), facts.since ? `since ${facts.since}` : ""),
    tile("Workers", count(Object.keys(given()).length), `on ${count(facts.days)} days`),
    tile("Steps", count(totals.steps), totals.discarded_steps ? `${count(totals.discarded_steps)} more were discarded` : `${count(totals.samples)} samples`),
    tile("Sent between workers", bytes(totals.bytes_out), `${count(totals.samples)} samples`),
    facts.measured ? tile("Energy", energy(totals.energy_j), `measured on ${count(facts.measured)} of ${count(Object.keys(given()).length)} workers`) : "",
  ]);
  showIf(days, [tables.days, days.clientWidth], () => drawDays(tables.days || {}, days.clientWidth));
  const test = filter(search.value);
  table.set(Object.entries(given()).filter(([key, row]) => test({ name: row.name, id: key, since: row.since })));
}

show(page, h("h1", {}, "Contributions"), tiles, card("By day (UTC)", days), h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "By worker"), search), table.element));
start(draw);
