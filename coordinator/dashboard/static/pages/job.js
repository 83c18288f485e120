// One job: is it going, when is it done, what holds it up, what would a loss cost.
import { bar, bits, bytes, card, count, figure, h, jobLink, loss, missing, moment, nameOf, pill, seconds, share, show, showIf, tone, workerLink } from "../dom.js";
import { Chart } from "../curves.js";
import { Federated } from "../federated.js";
import { contentOf, start, subject, topics } from "../live.js";
import { matrix } from "../links.js";
import { planGraph, planWords } from "../plan.js";
import { Table } from "../table.js";
import { timeline } from "../timeline.js";
import { eventTable } from "./events.js";

const page = document.getElementById("page");
const mine = topics.find((topic) => topic.startsWith("job:"));
const content = () => contentOf(mine);
const workers = () => content().tables.workers || {};
const stateBox = h("span", {});
const reason = h("p", { class: "reason" });
const tiles = h("div", { class: "tiles" });
const chart = new Chart({ height: 280 });
const heldOut = h("p", { class: "dim" });
const verdict = h("div", {});
const plan = h("div", {});
const planHead = h("span", { class: "dim" });
const losses = h("div", {});
const kept = h("div", {});
const command = h("div", {});
const planCard = h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Plan"), planHead), plan);
const lossCard = card("If a worker were lost now", losses);
const predictionCard = card("Predicted and measured", verdict);
const commandCard = card("Reproduce", command);
const federated = new Federated(workers);
const last = h("div", {});
const lastCard = card("Timeline of the last step", last);
const exchanged = h("div", {});
const exchangeCard = card("Exchange between replicas", exchanged);
const events = eventTable(workers, { withJob: false, shown: 20 });

const prices = new Table([
  { title: "stage", text: (row) => String(row.stage), sort: (row, key) => Number(key) },
  { title: "worker", text: (row) => nameOf(row.worker, workers()), draw: (row) => workerLink(row.worker, workers()) },
  { title: "standstill", right: true, text: (row) => seconds(row.replace_s), sort: (row) => row.replace_s },
  { title: "how it goes on", wide: true, text: (row) => [row.replace_why, row.copy ? `its tensors are ${row.copy}` : "", row.standby ? `${nameOf(row.standby, workers())} stands by: ${row.standby_why}` : ""].filter(Boolean).join("; ") },
], { empty: "Not known yet.", shown: 20, label: "What the loss of each worker would cost" });

const checkpoints = new Table([
  { title: "step", text: (row) => count(row.step), sort: (row) => row.step },
  { title: "stored", text: (row) => moment(row.at_s), sort: (row) => row.at_s },
  { title: "size", right: true, text: (row) => bytes(row.bytes), sort: (row) => row.bytes },
  { title: "", wide: true, text: (row) => [row.best ? "best held-out loss" : "", row.torn].filter(Boolean).join("; ") },
], { empty: "No checkpoint yet.", down: true, shown: 8, label: "Checkpoints" });

show(losses, h("p", { class: "dim" }), prices.element);
show(kept, checkpoints.element);

function tile(label, value, more) {
  return h("div", { class: "tile" }, h("span", { class: "label" }, label), h("strong", {}, value), h("span", { class: "dim" }, more || "\u00a0"));
}

function drawHead(facts) {
  document.title = `${subject} · ${share(facts.step / (facts.steps || 1))} · Atoll`;
  showIf(stateBox, facts.state, () => pill(facts.state));
  reason.textContent = facts.reason || "";
  const what = facts.federated ? "round" : "step";
  const done = facts.step / (facts.steps || 1);
  showIf(tiles, [facts.step, facts.steps, facts.state, facts.eta_s, facts.step_s, facts.samples_per_s, facts.loss, facts.eval_loss, facts.best_eval_loss, facts.checkpoint_step], () => [
    h("div", { class: "tile" }, h("span", { class: "label" }, `${what[0].toUpperCase()}${what.slice(1)}`), h("strong", {}, `${count(facts.step)} / ${count(facts.steps)}`), bar(done, share(done), `full ${tone(facts.state)}`)),
    tile("Time left", missing(facts.eta_s) ? "–" : seconds(facts.eta_s), missing(facts.eta_s) ? "" : `done about ${moment(Date.now() / 1000 + facts.eta_s)}`),
    tile(`A ${what}`, seconds(facts.step_s), missing(facts.samples_per_s) ? "" : `${figure(facts.samples_per_s)} samples a second`),
    tile("Loss", loss(facts.loss), missing(facts.eval_loss) ? "" : `held-out ${loss(facts.eval_loss)}${missing(facts.best_eval_loss) ? "" : ` · best ${loss(facts.best_eval_loss)}`}`),
  ]);
}

function drawCurves(found, facts) {
  const named = { loss: "training loss", eval_loss: "held-out loss", eval_loss_coded: "held-out, through codecs", clients_loss: "held-out on clients" };
  const all = Object.keys(named).filter((name) => found.curves[name]);
  chart.set(all.map((name) => ({ label: named[name], points: found.curves[name] })));
  const words = [];
  if (!missing(facts.best_eval_loss)) {
    words.push(`Best held-out loss ${loss(facts.best_eval_loss)} after step ${count(facts.best_step)}`);
    words.push(facts.best_checkpoint ? `the checkpoint of step ${count(facts.best_checkpoint)} is kept for it` : "no checkpoint is kept of it yet");
  }
  if (facts.held_out_rows && facts.eval_rows < facts.held_out_rows) words.push(`over ${count(facts.eval_rows)} of ${count(facts.held_out_rows)} rows`);
  for (const metric of facts.eval_metrics || []) words.push(`${metric.name} ${figure(metric.value)}`);
  heldOut.textContent = words.join("; ");
}

function drawVerdict(facts) {
  const found = facts.plan && facts.plan.prediction;
  predictionCard.hidden = !found;
  if (!found) return;
  showIf(verdict, [found, facts.step_s, facts.commit_s, facts.spot_checks, facts.exchange], () => {
    const most = Math.max(found.step_s, facts.step_s || 0, found.lower_bound_s) || 1;
    const line = (name, value, kind) => [h("dt", {}, name), h("dd", {}, bar(value / most, seconds(value), kind), ` ${seconds(value)}`)];
    const off = facts.step_s ? facts.step_s / found.step_s : null;
    return [
      h("dl", { class: "facts" },
        line("measured", facts.step_s, off && off > 1.15 ? "warn" : "good"), line("predicted", found.step_s, "idle"), line("lower bound", found.lower_bound_s, "done"),
        off ? [h("dt", {}, "off by"), h("dd", {}, h("strong", {}, `${off >= 1 ? "+" : "−"}${Math.abs(Math.round(100 * (off - 1)))} %`), ` of the prediction; ${(facts.step_s / found.lower_bound_s).toFixed(2)} × the bound`)] : "",
        [h("dt", {}, "bottleneck"), h("dd", {}, h("strong", {}, found.bottleneck))],
        missing(found.single_machine_s) ? "" : [h("dt", {}, "one machine"), h("dd", {}, `${seconds(found.single_machine_s)} on ${nameOf(found.single_machine, workers())}`)],
        missing(facts.commit_s) ? "" : [h("dt", {}, "commit"), h("dd", {}, `${seconds(facts.commit_s)} of each step`)],
        facts.exchange ? [h("dt", {}, "exchange"), h("dd", {}, facts.exchange)] : "",
        facts.spot_checks ? [h("dt", {}, "spot checks"), h("dd", {}, facts.spot_checks)] : ""),
      h("p", { class: "dim" }, found.reason), found.notes.map((note) => h("p", { class: "dim" }, note)),
    ];
  });
}

function drawPlan(found, facts) {
  planCard.hidden = !facts.plan;
  lossCard.hidden = !facts.plan || !["loading", "training", "evaluating", "storing"].includes(facts.state);
  if (!facts.plan) return;
  planHead.textContent = planWords(facts.plan);
  showIf(plan, [facts.plan, found.tables.stages, found.tables.links, found.tables.workers], () => planGraph(found));
  losses.firstChild.textContent = facts.loss_now || "";
  prices.set(Object.entries(found.tables.stages || {}));
}

function drawTimeline() {
  const { facts } = contentOf(topics.find((topic) => topic.startsWith("timeline:")));
  lastCard.hidden = !(facts.ranks && facts.ranks.length);
  if (!lastCard.hidden) showIf(last, [facts.step, facts.ranks.length, last.clientWidth, Object.keys(workers()).length], () => timeline(facts, workers(), last.clientWidth));
}

// Who sent how much to whom between replicas, and what the round showed.
function drawExchange(found, facts) {
  const replicas = facts.plan ? facts.plan.replicas : [];
  const of = new Map(replicas.flatMap((replica, number) => replica.stages.map((stage) => [stage.workers[0], number])));
  for (const [rank, row] of Object.entries(found.tables.stages || {})) of.set(row.worker, rankReplica(replicas, Number(rank)));
  const links = Object.values(found.tables.links || {}).filter((link) => of.get(link.source) !== of.get(link.target));
  exchangeCard.hidden = replicas.length < 2 || !links.length;
  if (exchangeCard.hidden) return;
  showIf(exchanged, [links, facts.exchange, found.tables.workers], () => {
    const ends = [...of.keys()];
    const most = Math.max(...links.map((link) => link.bytes_per_step), 1);
    return [
      h("p", { class: "dim" }, facts.exchange || "", facts.exchange ? ". " : "", "Rows send, columns receive; bluer is more."),
      matrix(ends, links.map((link) => ({
        source: link.source, target: link.target, step: 3 + Math.min(3, Math.floor(4 * Math.log1p(link.bytes_per_step) / Math.log1p(most) - 0.01)), sign: "",
        title: `${nameOf(link.source, workers())} → ${nameOf(link.target, workers())}\n${bytes(link.bytes_per_step)} a step, ${bits(link.bps)}${link.codec && link.codec !== "none" ? `, ${link.codec}` : ""}`,
      })), (id) => nameOf(id, workers())),
    ];
  });
}

function rankReplica(replicas, rank) {
  let number = 0;
  for (let left = rank; number < replicas.length && left >= replicas[number].stages.length; number += 1) left -= replicas[number].stages.length;
  return number;
}

function drawCommand(facts) {
  commandCard.hidden = !(facts.settings || []).length;
  const sets = (facts.settings || []).map((setting) => `  --set ${setting}`);
  showIf(command, [facts.settings, facts.state], () => [
    h("code", { class: "command" }, [`atoll submit JOBFILE`, ...sets].join(" \\\n")),
    h("p", { class: "dim" }, "JOBFILE is the file that was submitted", facts.plan && facts.plan.dag_hash ? `; its graph is ${facts.plan.dag_hash.slice(0, 12)}` : "", "."),
    h("p", {}, h("a", { class: "button", href: `/jobs/${encodeURIComponent(subject)}/trace`, download: true }, "Timeline for Perfetto"), " ", h("code", {}, `atoll export ${subject}`)),
  ]);
}

function draw() {
  const found = content();
  const { facts } = found;
  if (!facts.state) return;
  drawHead(facts);
  drawCurves(found, facts);
  drawVerdict(facts);
  drawPlan(found, facts);
  drawExchange(found, facts);
  drawTimeline();
  federated.element.hidden = !facts.federation;
  if (facts.federation) federated.draw(found);
  checkpoints.set(Object.entries(found.tables.checkpoints || {}));
  drawCommand(facts);
  events.set(Object.entries(contentOf("events").tables.events || {}).filter(([, row]) => row.job === subject));
}

show(
  page,
  h("div", { class: "head" }, h("h1", {}, subject), stateBox),
  reason,
  tiles,
  h("div", { class: "wide-left" }, card("Loss", chart.element, heldOut), predictionCard),
  federated.element,
  planCard,
  exchangeCard,
  lastCard,
  h("div", { class: "wide-left" }, h("div", { class: "stack" }, lossCard, card("Checkpoints", kept)), commandCard),
  card("Events", events.element),
);
start(draw);
