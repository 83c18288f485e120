// The log of the fleet, newest first.
import { card, clock, h, jobLink, pill, show, workerLink } from "../dom.js";
import { contentOf, start } from "../live.js";
import { filter, Table } from "../table.js";

const LEVELS = ["debug", "info", "warning", "error"];

export function words(row, workers) {
  return Object.entries(row.fields || {})
    .filter(([name, value]) => value !== "" && name !== "job")
    .map(([name, value]) => `${name}=${(workers && workers[value] && workers[value].name) || value}`)
    .join(" ");
}

// A table of events; `wanted` says which rows.
export function eventTable(workersOf, { withJob = true, shown = 100 } = {}) {
  return new Table([
    { title: "at", text: (row) => clock(row.time_s), sort: (row, key) => Number(key) },
    { title: "level", text: (row) => row.level, draw: (row) => pill(row.level) },
    { title: "event", text: (row) => row.event },
    {
      title: "of",
      text: (row) => `${row.worker} ${row.job} ${(workersOf()[row.worker] || {}).name || ""}`,
      draw: (row) => h("span", {}, row.worker ? workerLink(row.worker, workersOf()) : "", row.worker && row.job && withJob ? " · " : "", withJob ? jobLink(row.job) : ""),
    },
    { title: "what", wide: true, text: (row) => words(row, workersOf()) },
  ], { empty: "No event yet.", sort: 0, down: true, shown, label: "Events" });
}

if (document.getElementById("page").dataset.subject === "" && location.pathname === "/events") {
  const page = document.getElementById("page");
  const workers = () => contentOf("fleet").tables.workers || {};
  const table = eventTable(workers);
  const search = h("input", { type: "search", placeholder: "filter: job=gpt-1 worker.state alice", "aria-label": "Filter events", spellcheck: "false", oninput: () => draw() });
  const level = h("select", { "aria-label": "Least level", onchange: () => draw() }, LEVELS.map((name) => h("option", { value: name, selected: name === "info" }, name)));
  const draw = () => {
    const test = filter(search.value);
    const least = LEVELS.indexOf(level.value);
    table.set(Object.entries(contentOf("events").tables.events || {}).filter(([, row]) => (
      LEVELS.indexOf(row.level) >= least
      && test({ ...row.fields, event: row.event, job: row.job, worker: (workers()[row.worker] || {}).name || row.worker, id: row.worker, level: row.level })
    )));
  };
  show(page, h("div", { class: "head" }, h("h1", {}, "Events"), level, search), card("", table.element));
  start(draw);
}
