// What everybody may see of a run: progress, losses, how many take part, what they have given together.
import { bar, bytes, card, count, energy, flops, h, loss, missing, moment, pill, seconds, share, show, showIf, svg, tone } from "../dom.js";
import { Chart } from "../curves.js";
import { contentOf, start, subject } from "../live.js";
import { Table } from "../table.js";

const page = document.getElementById("page");
const title = h("h1", {});
const stateBox = h("span", {});
const tiles = h("div", { class: "tiles" });
const chart = new Chart({ height: 340 });
const people = h("div", { class: "map" });
const thanks = h("p", {});
const days = h("div", {});
const ENDED = ["finished", "failed", "cancelled"];
const hours = (value) => (value < 3600 ? seconds(value) : `${count(Math.round(value / 3600))} hours`);

const others = new Table([
  { title: "run", text: (row, key) => key, draw: (row, key) => h("a", { href: `/runs/${encodeURIComponent(key)}` }, key) },
  { title: "state", text: (row) => row.state, draw: (row) => pill(row.state) },
  { title: "progress", text: (row) => `${row.step}/${row.steps}`, sort: (row) => row.step / (row.steps || 1), draw: (row) => h("span", { class: "progress" }, bar(row.step / (row.steps || 1), `${row.step} of ${row.steps}`, tone(row.state)), ` ${share(row.step / (row.steps || 1))}`) },
  { title: "loss", right: true, text: (row) => loss(row.loss), sort: (row) => row.loss },
  { title: "held-out", right: true, text: (row) => loss(row.eval_loss), sort: (row) => row.eval_loss },
  { title: "time left", right: true, text: (row) => seconds(row.eta_s), sort: (row) => row.eta_s },
], { empty: "No run yet.", down: true, label: "Runs" });

function tile(label, value, more) {
  return h("div", { class: "tile" }, h("span", { class: "label" }, label), h("strong", {}, value), h("span", { class: "dim" }, more || "\u00a0"));
}

function drawPeople(places) {
  return places.map((place) => h("div", { class: "squares" }, ["at work", "idle"].flatMap((word) => Array.from({ length: Math.min(place[word] || 0, 300) }, () => h("i", { class: word === "at work" ? "good" : "idle", title: word })))));
}

function drawDays(rows, width) {
  const all = Object.entries(rows).sort(([a], [b]) => a.localeCompare(b)).slice(-90);
  const most = Math.max(...all.map(([, row]) => row.compute_s), 1);
  const step = Math.max(5, Math.min(28, Math.floor(width / Math.max(1, all.length))));
  return svg("svg", { width: step * all.length, height: 70, role: "img", "aria-label": "Compute time by day" }, all.map(([day, row], i) => svg("g", {}, svg("title", {}, `${day}: ${hours(row.compute_s)}`), svg("rect", { x: i * step + 1, width: step - 2, y: 70 - 70 * row.compute_s / most, height: 70 * row.compute_s / most, rx: 2, class: "round good" }))));
}

// The run that is named, else the one that trains, else the newest.
function chosen(jobs) {
  if (subject) return subject;
  const names = Object.keys(jobs);
  return names.find((name) => jobs[name].state === "training") || names.find((name) => !ENDED.includes(jobs[name].state)) || names.at(-1);
}

function draw() {
  const { facts, tables } = contentOf("public");
  if (!facts.places) return;
  const jobs = tables.jobs || {};
  const name = chosen(jobs);
  if (!subject && name) { location.replace(`/runs/${encodeURIComponent(name)}`); return; }
  const job = jobs[name];
  title.textContent = name || "No run yet";
  if (job) {
    document.title = `${name} · ${share(job.step / (job.steps || 1))}`;
    showIf(stateBox, job.state, () => pill(job.state));
    const done = job.step / (job.steps || 1);
    showIf(tiles, [job, facts.workers, facts.gflops], () => [
      h("div", { class: "tile" }, h("span", { class: "label" }, job.federated ? "Round" : "Step"), h("strong", {}, `${count(job.step)} / ${count(job.steps)}`), bar(done, share(done), `full ${tone(job.state)}`)),
      tile("Time left", missing(job.eta_s) ? "–" : seconds(job.eta_s), missing(job.eta_s) ? "" : `done about ${moment(Date.now() / 1000 + job.eta_s)}`),
      tile("Loss", loss(job.loss), missing(job.eval_loss) ? "" : `held-out ${loss(job.eval_loss)}`),
      tile("Machines", count(facts.workers), `${flops(facts.gflops)} · ${bytes(facts.memory_bytes)} lent`),
    ]);
  }
  const { curves } = contentOf(`public-run:${subject}`);
  const named = { loss: "training loss", eval_loss: "held-out loss", clients_loss: "held-out on clients" };
  chart.set(Object.keys(named).filter((key) => curves[key]).map((key) => ({ label: named[key], points: curves[key] })));
  showIf(people, facts.places, () => drawPeople(facts.places));
  const { totals } = facts;
  thanks.textContent = totals.workers ? `${count(totals.workers)} machines have given ${hours(totals.compute_s)} of computing since ${facts.since}: ${count(totals.steps)} steps, ${count(totals.samples)} samples, ${bytes(totals.bytes_out)} sent to each other${facts.measured ? `; ${energy(totals.energy_j)} measured on ${count(facts.measured)} of them` : ""}. Thank you.` : "The first step is still to come.";
  showIf(days, [tables.days, days.clientWidth], () => drawDays(tables.days || {}, days.clientWidth));
  others.set(Object.entries(jobs).filter(([key]) => key !== name));
}

show(
  page,
  h("div", { class: "head" }, title, stateBox),
  tiles,
  card("Loss", chart.element),
  h("div", { class: "columns" }, card("Who takes part, by place", people), card("Given together", thanks, days)),
  card("Other runs", others.element),
);
start(draw);
