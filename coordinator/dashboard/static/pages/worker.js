// One machine: what it is, what it does for whom, its links, what happened to it.
import { bits, bytes, card, count, energy, flops, h, jobLink, nameOf, pill, seconds, show, showIf, workerLink } from "../dom.js";
import { contentOf, start, subject } from "../live.js";
import { Table } from "../table.js";
import { eventTable } from "./events.js";

const page = document.getElementById("page");
const title = h("h1", {}, subject);
const stateBox = h("span", {});
const reason = h("p", { class: "reason" });
const facts = h("dl", { class: "facts" });
const limits = h("dl", { class: "facts" });
const work = h("div", {});
const given = h("dl", { class: "facts" });
const workers = () => contentOf("fleet").tables.workers || {};
const events = eventTable(workers, { shown: 25 });
const links = new Table([
  { title: "peer", text: (row) => nameOf(row.peer, workers()), draw: (row) => workerLink(row.peer, workers()) },
  { title: "to it", right: true, text: (row) => bits(row.out), sort: (row) => row.out },
  { title: "from it", right: true, text: (row) => bits(row.in), sort: (row) => row.in },
  { title: "delay", right: true, text: (row) => seconds(row.delay), sort: (row) => row.delay },
  { title: "joined", text: (row) => row.way || "–" },
  { title: "shares", wide: true, text: (row) => row.shared || "–" },
], { empty: "No link of this worker has been measured.", shown: 20, label: "Links" });

function list(element, entries) {
  const told = entries.filter(([, value]) => value !== "" && value !== "–" && value !== null && value !== undefined);
  showIf(element, told, () => told.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function pairs() {
  const found = {};
  for (const row of Object.values(contentOf("fleet").tables.links || {})) {
    const mine = row.source === subject ? "out" : row.target === subject ? "in" : "";
    if (!mine) continue;
    const peer = mine === "out" ? row.target : row.source;
    found[peer] = { ...(found[peer] || { peer }), [mine]: row.bandwidth_bps, delay: row.latency_s, way: row.way || (found[peer] || {}).way, shared: row.shared };
  }
  return Object.entries(found);
}

function draw() {
  const row = workers()[subject];
  if (!row) {
    if (contentOf("fleet").facts.version) show(stateBox, pill("gone"), " this worker is not known, or its coordinator forgot it");
    return;
  }
  title.textContent = row.name || subject;
  document.title = `${row.name || subject} · Atoll`;
  showIf(stateBox, row.state, () => pill(row.state));
  reason.textContent = row.reason;
  const guest = row.guest || {};
  list(facts, [
    ["id", subject], ["site", row.site], ["address", row.address], ["device", row.model || row.kind], ["threads", row.threads || ""],
    ["memory", bytes(row.memory_bytes)], ["speed", flops(row.gflops)], ["system", row.platform], ["torch", row.torch_version],
    ["python", row.python_version], ["atoll", row.atoll_version],
  ]);
  list(limits, [
    ["memory", bytes(guest.memory_limit_bytes || row.memory_limit_bytes)],
    ["compute time", guest.compute_share ? `${Math.round(guest.compute_share * 100)} %` : "all of it"],
    ["upload", guest.upload_bps ? bits(guest.upload_bps) : "not limited"],
    ["download", guest.download_bps ? bits(guest.download_bps) : "not limited"],
    ["paused", guest.paused || "no"],
  ]);
  showIf(work, [row.job, row.stage, row.waits_s, row.waits_for], () => (row.job
    ? h("p", {}, "Works on ", jobLink(row.job), row.stage >= 0 ? `, stage ${row.stage}` : "", row.waits_s ? `; has waited ${seconds(row.waits_s)} for ${row.waits_what}${row.waits_for ? ` from ${nameOf(row.waits_for, workers())}` : ""}` : "", ".")
    : h("p", { class: "dim" }, "Idle: no job has a use for it now.")));
  const row_ = (contentOf("contributions").tables.given || {})[subject];
  list(given, row_ ? [
    ["since", row_.since], ["compute time", seconds(row_.compute_s)], ["steps", `${count(row_.steps)}${row_.discarded_steps ? `, ${count(row_.discarded_steps)} discarded` : ""}`],
    ["samples", count(row_.samples)], ["received", bytes(row_.bytes_in)], ["sent", bytes(row_.bytes_out)],
    ...(row_.energy_j ? [["energy", energy(row_.energy_j)]] : []),
  ] : [["so far", "nothing yet"]]);
  links.set(pairs());
  events.set(Object.entries(contentOf("events").tables.events || {}).filter(([, event]) => event.worker === subject || Object.values(event.fields).includes(subject)));
}

show(
  page,
  h("div", { class: "head" }, title, stateBox),
  reason,
  h("div", { class: "columns" }, h("div", { class: "stack" }, card("Work", work), card("What it has given", given)), card("Machine", facts), card("What its owner lends", limits)),
  card("Links", links.element),
  card("Events", events.element),
);
start(draw);
