// Who is here, what trains, who waits and why.
import { bar, bits, bytes, card, count, flops, glyph, h, jobLink, jobPath, loss, missing, nameOf, pill, seconds, share, show, tone, workerLink, workerPath } from "../dom.js";
import { contentOf, start } from "../live.js";
import { filter, Table } from "../table.js";

const GONE = new Set(["dead", "left"]);
const ORDER = ["suspect", "quarantined", "draining", "dead", "assigned", "joined", "pool", "left"];
const WORDS = { assigned: "training", pool: "idle", joined: "joining", suspect: "suspect", draining: "leaving", quarantined: "quarantined", dead: "dead", left: "left" };
const ENDED = ["finished", "failed", "cancelled"];
const MAP_MOST = 5000;

const page = document.getElementById("page");
const tiles = h("div", { class: "tiles" });
const map = h("div", { class: "map" });
const legend = h("div", { class: "legend" });
const squares = new Map();
const sites = new Map();
let workers = {};
let query = () => true;

const search = h("input", {
  type: "search", placeholder: "filter: site=lab memory>8GiB gpu waits", "aria-label": "Filter workers", spellcheck: "false",
  oninput: () => { query = filter(search.value); drawTables(); },
});

const jobs = new Table([
  { title: "job", text: (row, key) => key, draw: (row, key) => h("a", { href: jobPath(key) }, key) },
  { title: "state", text: (row) => row.state, sort: (row) => (ENDED.includes(row.state) ? 2 : row.state === "queued" ? 1 : 0), draw: (row) => pill(row.state) },
  {
    title: "progress",
    text: (row) => `${row.step}/${row.steps}`,
    sort: (row) => row.step / (row.steps || 1),
    draw: (row) => h("span", { class: "progress" }, bar(row.step / (row.steps || 1), `${row.step} of ${row.steps}`, tone(row.state)), ` ${count(row.step)} / ${count(row.steps)}`),
  },
  { title: "loss", right: true, text: (row) => loss(row.loss), sort: (row) => row.loss },
  { title: "held-out", right: true, text: (row) => loss(row.eval_loss), sort: (row) => row.eval_loss },
  { title: "a step", right: true, text: (row) => seconds(row.step_s), sort: (row) => row.step_s },
  { title: "ETA", right: true, text: (row) => seconds(row.eta_s), sort: (row) => row.eta_s },
  { title: "workers", right: true, text: (row) => String(row.workers || "–"), sort: (row) => row.workers },
  { title: "why", wide: true, text: (row) => row.reason },
], { empty: "No jobs yet. Submit one with `atoll submit JOBFILE`.", label: "Jobs" });

const table = new Table([
  { title: "worker", text: (row, key) => row.name || key, draw: (row, key) => workerLink(key, workers) },
  { title: "state", text: (row) => state(row), sort: (row) => (row.waits_s || row.silent_s ? -1 : ORDER.indexOf(row.state)), draw: (row) => pill(state(row)) },
  { title: "device", text: (row) => device(row) },
  { title: "speed", right: true, text: (row) => flops(row.gflops), sort: (row) => row.gflops },
  { title: "memory", right: true, text: (row) => bytes(row.memory_limit_bytes || row.memory_bytes), sort: (row) => row.memory_limit_bytes || row.memory_bytes },
  { title: "site", text: (row) => row.site || "–" },
  { title: "job", text: (row) => (row.job ? `${row.job}${row.stage >= 0 ? ` · stage ${row.stage}` : ""}` : "–"), draw: (row) => (row.job ? h("span", {}, jobLink(row.job), row.stage >= 0 ? ` · stage ${row.stage}` : "") : h("span", {}, "–")) },
  { title: "waits, why", wide: true, text: (row) => [waits(row), row.reason].filter(Boolean).join("; "), sort: (row) => -(row.waits_s || row.silent_s || 0) },
], { empty: "No worker matches.", sort: 1, label: "Workers" });

const links = new Table([
  { title: "link", text: (row) => `${nameOf(row.source, workers)} → ${nameOf(row.target, workers)}` },
  { title: "rate", right: true, text: (row) => bits(row.bandwidth_bps), sort: (row) => row.bandwidth_bps },
  { title: "delay", right: true, text: (row) => seconds(row.latency_s), sort: (row) => row.latency_s },
  { title: "joined", text: (row) => row.way || "–" },
  { title: "shares", wide: true, text: (row) => row.shared || "–" },
], { empty: "No link has been measured yet.", sort: 1, shown: 10, label: "Slowest links" });

const health = h("dl", { class: "facts" });

export const state = (row) => (row.guest && row.guest.paused && row.state !== "dead" ? "paused" : WORDS[row.state] || row.state);
const device = (row) => row.model || (row.kind ? `${row.kind}${row.threads ? ` · ${row.threads} threads` : ""}` : "–");

function waits(row) {
  if (row.silent_s && !GONE.has(row.state)) return `silent for ${seconds(row.silent_s)}`;
  if (!row.waits_s) return "";
  const whom = row.waits_for ? ` from ${nameOf(row.waits_for, workers)}` : "";
  return `${seconds(row.waits_s)} for ${row.waits_what}${whom}`;
}

// On the map those at work come first.
const place = (row) => (ORDER.indexOf(row.state) + 4) % ORDER.length;

function tile(label, value, more) {
  return h("div", { class: "tile" }, h("span", { class: "label" }, label), h("strong", {}, value), h("span", { class: "dim" }, more));
}

function drawTiles(content) {
  const here = Object.values(workers).filter((row) => !GONE.has(row.state));
  const busy = here.filter((row) => row.job).length;
  const all = Object.values(content.tables.jobs || {});
  const running = all.filter((job) => !ENDED.includes(job.state));
  const memory = here.reduce((sum, row) => sum + (row.memory_limit_bytes || row.memory_bytes || 0), 0);
  const speed = here.reduce((sum, row) => sum + (row.gflops || 0), 0);
  const trouble = here.filter((row) => ["suspect", "quarantined"].includes(row.state)).length;
  const places = new Set(here.map((row) => row.site).filter(Boolean)).size;
  show(tiles, [
    tile("Workers", count(here.length), `${busy} at work · ${here.length - busy} idle${trouble ? ` · ${trouble} in trouble` : ""}`),
    tile("Jobs running", count(running.length), `${all.length} in all`),
    tile("Memory lent", bytes(memory), places ? `at ${places} site${places > 1 ? "s" : ""}` : "of all workers"),
    tile("Speed", flops(speed), "as measured on jobs' ops"),
  ]);
}

function drawMap() {
  const rows = Object.entries(workers).filter(([, row]) => row.state !== "left").slice(0, MAP_MOST);
  const largest = Math.max(...rows.map(([, row]) => row.memory_limit_bytes || row.memory_bytes || 1), 1);
  const wanted = new Set(rows.map(([key]) => key));
  for (const [key, square] of squares) if (!wanted.has(key)) { square.remove(); squares.delete(key); }
  const grouped = new Map();
  for (const [key, row] of rows) {
    const site = row.site || "no site given";
    if (!grouped.has(site)) grouped.set(site, []);
    grouped.get(site).push([key, row]);
  }
  for (const [site, group] of sites) if (!grouped.has(site)) { group.element.remove(); sites.delete(site); }
  for (const [site, members] of [...grouped].sort((a, b) => b[1].length - a[1].length)) {
    if (!sites.has(site)) {
      const box = h("div", { class: "squares" });
      const name = h("span", {}, site);
      const number = h("span", { class: "dim" });
      sites.set(site, { element: h("div", { class: "site" }, h("p", {}, name, " ", number), box), box, number });
    }
    const group = sites.get(site);
    group.number.textContent = String(members.length);
    if (group.element.parentNode !== map) map.append(group.element);
    for (const [key, row] of members.sort((a, b) => place(a[1]) - place(b[1]) || a[0].localeCompare(b[0]))) {
      let square = squares.get(key);
      if (!square) {
        square = h("a", { href: workerPath(key) });
        squares.set(key, square);
      }
      const size = Math.sqrt((row.memory_limit_bytes || row.memory_bytes || 1) / largest);
      const words = state(row);
      const shown = `${tone(row.state === "pool" ? "pool" : words)} size${size > 0.75 ? 3 : size > 0.45 ? 2 : 1}`;
      if (square.className !== shown) {
        square.className = shown;
        square.textContent = ["warn", "bad", "off"].includes(tone(words)) ? glyph(words) : "";
      }
      const title = `${row.name || key}: ${words}, ${bytes(row.memory_limit_bytes || row.memory_bytes)}, ${device(row)}${row.reason ? `\n${row.reason}` : ""}`;
      if (square.title !== title) { square.title = title; square.setAttribute("aria-label", title); }
      if (square.parentNode !== group.box) group.box.append(square);
    }
  }
  const numbers = {};
  for (const [, row] of Object.entries(workers)) numbers[state(row)] = (numbers[state(row)] || 0) + 1;
  show(legend, Object.entries(numbers).sort((a, b) => b[1] - a[1]).map(([word, number]) => h(
    "span", {}, h("i", { class: `swatch ${tone(word === "idle" ? "pool" : word)}`, "aria-hidden": "true" }, ["warn", "bad", "off"].includes(tone(word)) ? glyph(word) : ""), `${word} `, h("b", {}, String(number)),
  )), h("span", { class: "dim" }, "larger square: more memory"));
}

function drawTables() {
  const content = contentOf("fleet");
  const now = (row) => ({
    ...row, state: `${row.state} ${state(row)}`, memory: row.memory_limit_bytes || row.memory_bytes, speed: row.gflops,
    gpu: ["cuda", "xpu", "mps"].includes(row.kind) ? "gpu" : "", waits: row.waits_s ? "waits" : "",
    guest: "",
  });
  table.set(Object.entries(workers).filter(([key, row]) => query({ ...now(row), id: key })));
  jobs.set(Object.entries(content.tables.jobs || {}));
  links.set(Object.entries(content.tables.links || {}));
}

function draw() {
  const content = contentOf("fleet");
  workers = content.tables.workers || {};
  drawTiles(content);
  drawMap();
  drawTables();
  const facts = content.facts;
  show(health, Object.entries({
    version: facts.version || "–",
    up: seconds(facts.uptime_s),
    links: `${count(facts.links)} measured`,
    "disk free": bytes(facts.disk_free_bytes || null),
    memory: bytes(facts.memory_bytes || null),
    "slowest write": seconds(facts.append_s),
    "event loop late": seconds(facts.lag_s),
    "messages dropped": count(facts.messages_dropped),
  }).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

jobs.sort = 1;
show(
  page,
  h("h1", {}, "Fleet"),
  tiles,
  card("Jobs", jobs.element),
  card("Map", legend, map),
  h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Workers"), search), table.element),
  h("div", { class: "wide-left" }, card("Slowest links", links.element), card("Coordinator", health)),
);
start(draw);
