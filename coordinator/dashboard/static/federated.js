// A federated job: its rounds as a strip, its clients, what they showed, bytes a round.
import { bits, bytes, card, count, figure, h, loss, missing, nameOf, pill, seconds, showIf, svg, workerLink } from "./dom.js";
import { Chart } from "./curves.js";
import { Table } from "./table.js";

const ROUNDS = 60;
const HEIGHT = 90;

export class Federated {
  constructor(workers) {
    this.workers = workers;
    this.now = h("div", {});
    this.strip = h("div", {});
    this.traffic = new Chart({ height: 170, unit: "round", format: bytes });
    this.clients = new Table([
      { title: "client", text: (row, key) => nameOf(key, workers()), draw: (row, key) => workerLink(key, workers()) },
      { title: "state", text: (row) => row.state, draw: (row) => pill(row.state) },
      { title: "samples", right: true, text: (row) => (row.n_samples ? count(row.n_samples) : "–"), sort: (row) => row.n_samples },
      { title: "loss", right: true, text: (row) => loss(row.loss), sort: (row) => row.loss },
      { title: "train", right: true, text: (row) => (row.train_s ? seconds(row.train_s) : "–"), sort: (row) => row.train_s },
      { title: "uplink", right: true, text: (row) => (row.uplink_bps ? bits(row.uplink_bps) : "–"), sort: (row) => row.uplink_bps },
      { title: "up", right: true, text: (row) => (row.bytes_up ? bytes(row.bytes_up) : "–"), sort: (row) => row.bytes_up },
      { title: "down", right: true, text: (row) => (row.bytes_down ? bytes(row.bytes_down) : "–"), sort: (row) => row.bytes_down },
      { title: "codec", text: (row) => (row.ratio > 1 ? `${row.codec} ${(+row.ratio).toPrecision(3)}×` : row.codec || "–") },
      { title: "why", wide: true, text: (row) => [row.population ? `speaks for ${count(row.population)} clients` : "", row.reason].filter(Boolean).join("; ") },
    ], { empty: "No client has joined yet.", sort: 1, label: "Clients" });
    this.element = h("div", { class: "stack" },
      h("div", { class: "wide-left" }, card("Rounds", this.strip), card("This round", this.now)),
      h("div", { class: "wide-left" }, card("Bytes a round", this.traffic.element), this.metrics = card("Evaluations", this.figures = h("dl", { class: "facts" }))),
      card("Clients", this.clients.element));
  }

  draw(content) {
    const found = content.facts.federation;
    showIf(this.now, [found, content.facts.step], () => h("dl", { class: "facts" },
      line("strategy", h("strong", {}, found.strategy)), line("data", found.data),
      line("updates", `${found.arrived} of ${found.chosen}${found.dropped ? `, ${found.dropped} dropped` : ""}`),
      line("a round", seconds(found.round_s)),
      line("sent", `${bytes(found.bytes_up)} up, ${bytes(found.bytes_down)} down in all`),
      found.pace ? line("ratios", found.pace) : "", found.assignment ? line("who trains whom", found.assignment) : ""));
    const shown = [
      ...[["owner's data", found.central_loss, found.central_metrics], ["clients' data", found.clients_loss, found.clients_metrics]]
        .filter(([, value]) => !missing(value)),
    ];
    this.metrics.hidden = !shown.length;
    showIf(this.figures, shown, () => shown.map(([name, value, metrics]) => line(name, h("span", {}, "loss ", h("strong", {}, loss(value)), metrics.map((m) => `, ${m.name} ${figure(m.value)}`)))));
    this.traffic.set([["bytes_up", "up"], ["bytes_down", "down"]].filter(([name]) => content.curves[name]).map(([name, label]) => ({ label, points: content.curves[name] })));
    const { participants, dropped } = content.curves;
    showIf(this.strip, [participants && participants[0].length, found.chosen, found.arrived, found.dropped, content.facts.step], () => strip(content));
    this.clients.set(Object.entries(content.tables.clients || {}));
  }
}

const line = (name, value) => [h("dt", {}, name), h("dd", {}, value)];

function strip(content) {
  const { participants, dropped, round_s: took } = content.curves;
  const found = content.facts.federation;
  const at = (curve, step) => {
    const index = curve ? curve[0].indexOf(step) : -1;
    return index < 0 ? 0 : curve[1][index];
  };
  const rounds = (participants ? participants[0] : []).slice(-ROUNDS).map((step) => ({ step, in: at(participants, step), out: at(dropped, step), took: at(took, step) }));
  if (["training", "evaluating", "aggregating"].includes(content.facts.state) && found.chosen) {
    rounds.push({ step: content.facts.step + 1, in: found.arrived, out: found.dropped, open: found.chosen - found.arrived - found.dropped });
  }
  if (!rounds.length) return h("p", { class: "none" }, "No round has closed yet.");
  const most = Math.max(...rounds.map((round) => round.in + round.out + (round.open || 0)), 1);
  const width = Math.max(9, Math.min(26, Math.floor(700 / rounds.length)));
  const unit = HEIGHT / most;
  return [
    h("div", { class: "legend" },
      ["good", "counted", "warn", "dropped", "idle", "awaited"].flatMap((kind, i, all) => (i % 2 ? [] : [h("span", {}, h("i", { class: `swatch ${kind}`, "aria-hidden": "true" }, kind === "warn" ? "!" : ""), all[i + 1])]))),
    h("div", { class: "plan" }, svg("svg", { width: rounds.length * width + 4, height: HEIGHT + 20, role: "img", "aria-label": "Clients by round" },
      rounds.map((round, i) => svg("g", { transform: `translate(${i * width} 0)` },
        svg("title", {}, `round ${round.step}: ${round.in} counted, ${round.out} dropped${round.open ? `, ${round.open} awaited` : ""}${round.took ? `, ${seconds(round.took)}` : ""}`),
        svg("rect", { class: "round good", x: 1, width: width - 2, y: HEIGHT - unit * round.in, height: unit * round.in, rx: 2 }),
        svg("rect", { class: "round warn", x: 1, width: width - 2, y: HEIGHT - unit * (round.in + round.out), height: Math.max(0, unit * round.out - 1), rx: 2 }),
        round.open ? svg("rect", { class: "round idle", x: 1, width: width - 2, y: HEIGHT - unit * (round.in + round.out + round.open), height: unit * round.open - 1, rx: 2 }) : "",
        i % Math.ceil(rounds.length / 12) === 0 ? svg("text", { x: width / 2, y: HEIGHT + 15, "text-anchor": "middle", "font-size": 10.5, class: "dim" }, String(round.step)) : ""))))];
}
