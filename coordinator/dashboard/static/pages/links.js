// Rates, delays and ways between all workers.
import { bits, card, count, h, nameOf, seconds, show, showIf, workerLink } from "../dom.js";
import { contentOf, start } from "../live.js";
import { linkLegend, linkMap } from "../links.js";
import { filter, Table } from "../table.js";

const page = document.getElementById("page");
const workers = () => contentOf("fleet").tables.workers || {};
const words = h("p", { class: "dim" });
const map = h("div", {});
const search = h("input", { type: "search", placeholder: "filter: alice relayed rate<20M", "aria-label": "Filter links", spellcheck: "false", oninput: () => draw() });
const table = new Table([
  { title: "from", text: (row) => nameOf(row.source, workers()), draw: (row) => workerLink(row.source, workers()) },
  { title: "to", text: (row) => nameOf(row.target, workers()), draw: (row) => workerLink(row.target, workers()) },
  { title: "rate", right: true, text: (row) => bits(row.bandwidth_bps), sort: (row) => row.bandwidth_bps },
  { title: "delay, one way", right: true, text: (row) => seconds(row.latency_s), sort: (row) => row.latency_s },
  { title: "joined", text: (row) => row.way || "–" },
  { title: "shares", wide: true, text: (row) => row.shared || "–" },
], { empty: "No link matches.", sort: 2, label: "Links" });

function draw() {
  const { facts, tables } = contentOf("fleet");
  const links = Object.values(tables.links || {});
  showIf(map, [tables.links, Object.values(workers()).map((row) => [row.name, row.site])], () => {
    if (!links.length) return h("p", { class: "none" }, "No link has been measured yet.");
    const drawn = linkMap(links, workers());
    words.textContent = `Rows send, columns receive. ${drawn.sites ? "Between sites: the median of their workers' rates. " : ""}${facts.links > links.length ? `The ${count(links.length)} slowest of ${count(facts.links)} links.` : `${count(links.length)} links.`}`;
    return [linkLegend(), drawn.element];
  });
  const test = filter(search.value);
  table.set(Object.entries(tables.links || {}).filter(([, row]) => test({
    from: nameOf(row.source, workers()), to: nameOf(row.target, workers()), rate: row.bandwidth_bps, delay: row.latency_s, joined: row.way, shares: row.shared,
  })));
}

show(page, h("h1", {}, "Links"), card("", words, map), h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "All links"), search), table.element));
start(draw);
