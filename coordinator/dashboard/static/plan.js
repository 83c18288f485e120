// The plan as a graph: a row a replica, a box a stage on its worker, an edge a link; standbys below their stage.
import { bits, bytes, glyph, h, nameOf, seconds, share, svg, tone, workerPath } from "./dom.js";

const BOX = { width: 186, height: 104 };
const GAP = { x: 150, y: 26 };
const ARC = 46;
const STANDBY = 62;
const HOT = 0.9;
const USED = 0.6;

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const text = (x, y, words, attributes = {}) => svg("text", { x, y, ...attributes }, words);

function gauge(x, y, width, value, kind) {
  const part = Math.min(1, Math.max(0, value || 0));
  return svg("g", {},
    svg("rect", { x, y, width, height: 6, rx: 3, class: "track" }),
    svg("rect", { x, y, width: Math.max(part * width, part > 0 ? 3 : 0), height: 6, rx: 3, class: `level ${kind}` }));
}

function spans(stage) {
  return [stage, ...(stage.further || [])].map((piece) => `${piece.start}–${piece.stop - 1}`).join(", ");
}

function box(x, y, place, workers) {
  const { stage, status, predicted, absent } = place;
  const worker = status ? status.worker : stage.workers[0];
  const state = absent ? "gone" : (workers[worker] || {}).state || "";
  const kind = ["suspect", "draining"].includes(state) ? "warn" : ["dead", "left", "quarantined", "gone"].includes(state) ? "bad" : "good";
  const memory = status && status.measured_bytes ? status.measured_bytes : predicted ? predicted.memory_bytes : 0;
  const limit = predicted ? predicted.memory_limit_bytes : 0;
  const busy = status && status.busy_share ? status.busy_share : predicted ? predicted.busy_share : 0;
  const inner = BOX.width - 24;
  const several = (stage.further || []).length ? `${stage.further.length + 1} pieces: ` : "ops ";
  const title = [
    `stage ${place.at} on ${nameOf(worker, workers)}${state ? ` (${state})` : ""}`,
    `${several}${spans(stage)}`,
    `busy: ${share(busy)}, predicted ${share(predicted && predicted.busy_share)}`,
    status ? `forward ${seconds(status.forward_s)}, backward ${seconds(status.backward_s)}` : "",
    `memory: ${bytes(memory)}${limit ? ` of ${bytes(limit)}` : ""}${status && status.planned_bytes ? `, planned ${bytes(status.planned_bytes)}` : ""}`,
    (workers[worker] || {}).reason || "",
  ].filter(Boolean).join("\n");
  return svg("g", { transform: `translate(${x} ${y})` },
    svg("title", {}, title),
    svg("rect", { class: `box ${kind}`, width: BOX.width, height: BOX.height, rx: 10 }),
    text(12, 21, `stage ${place.at}`, { class: "dim" }),
    text(BOX.width - 12, 21, state && kind !== "good" ? `${glyph(state)} ${state}` : "", { "text-anchor": "end", "font-weight": 600 }),
    svg("a", { href: workerPath(worker) }, text(12, 42, cut(nameOf(worker, workers), 22), { "font-weight": 650, "font-size": 14 })),
    text(12, 60, cut(several + spans(stage), 29), { class: "dim", "font-size": 11 }),
    gauge(12, 69, inner - 66, busy, ""), text(BOX.width - 12, 76, `${share(busy)} busy`, { class: "dim", "text-anchor": "end", "font-size": 10.5 }),
    gauge(12, 86, inner - 66, limit ? memory / limit : 0, limit && memory > limit * 0.95 ? "hot" : "memory"), text(BOX.width - 12, 93, bytes(memory), { class: "dim", "text-anchor": "end", "font-size": 10.5 }));
}

function standbyBox(x, y, status, workers) {
  return svg("g", { transform: `translate(${x} ${y})` },
    svg("title", {}, `${nameOf(status.standby, workers)} stands by for stage ${status.stage}: ${status.standby_why}`),
    svg("line", { x1: BOX.width / 2, x2: BOX.width / 2, y1: -14, y2: 0, class: "edge unknown", "stroke-width": 1.5, "stroke-dasharray": "3 3" }),
    svg("rect", { class: "box standby", width: BOX.width, height: 44, rx: 10 }),
    svg("a", { href: workerPath(status.standby) }, text(12, 18, cut(nameOf(status.standby, workers), 22), { "font-weight": 600 })),
    text(12, 34, cut(`stands by: ${status.standby_why}`, 32), { class: "dim", "font-size": 10.5 }));
}

// Bytes a step as a width of 1.5 to 9 pixels.
const width = (n) => Math.min(9, Math.max(1.5, 1.5 + 1.25 * Math.log10(Math.max(1, n / 1024))));

function edge(from, to, link, up) {
  const used = link.measured_bps ? link.bps / link.measured_bps : null;
  const kind = used === null ? "unknown" : used > HOT ? "hot" : used > USED ? "used" : "calm";
  const near = Math.abs(to.column - from.column) === 1;
  const back = to.column < from.column;
  const y = from.y + (back ? BOX.height * 0.7 : BOX.height * 0.36);
  const words = [
    bytes(link.bytes_per_step) + (link.codec && link.codec !== "none" ? ` · ${link.ratio > 1 ? `${link.codec} ${(+link.ratio).toPrecision(2)}×` : link.codec}` : ""),
    link.measured_bps ? `${used > HOT ? "! " : ""}${bits(link.bps).split(" ")[0]} of ${bits(link.measured_bps)}` : link.bps ? bits(link.bps) : "",
  ];
  const title = `${bytes(link.bytes_per_step)} a step${link.dense_bytes_per_step ? `, ${bytes(link.dense_bytes_per_step)} dense` : ""}\n${words.join("\n")}${link.reason ? `\n${link.reason}` : ""}`;
  let path;
  let at;
  if (near) {
    const x1 = back ? from.x : from.x + BOX.width;
    const x2 = back ? to.x + BOX.width : to.x;
    path = `M ${x1 + (back ? -3 : 3)} ${y} L ${x2 + (back ? 8 : -8)} ${y}`;
    at = [(x1 + x2) / 2, y];
  } else {
    const x1 = from.x + BOX.width / 2;
    const x2 = to.x + BOX.width / 2;
    const lift = up ? from.y - ARC + 8 : from.y + BOX.height + 26;
    const border = up ? from.y : from.y + BOX.height;
    path = `M ${x1} ${border} C ${x1} ${lift}, ${x2} ${lift}, ${x2} ${border + (up ? -8 : 8)}`;
    at = [(x1 + x2) / 2, up ? lift + 8 : lift - 2];
  }
  return svg("g", {},
    svg("title", {}, title),
    svg("path", { d: path, class: `edge ${kind}`, "stroke-width": width(link.bytes_per_step), "marker-end": `url(#arrow-${kind})` }),
    text(at[0], near && back ? at[1] + 17 : at[1] - (near ? 21 : 8), words[0], { "text-anchor": "middle", "font-size": 11 }),
    near ? text(at[0], back ? at[1] + 30 : at[1] - 9, words[1], { class: "dim", "text-anchor": "middle", "font-size": 10.5 }) : "");
}

function marker(kind) {
  const arrow = svg("path", { d: "M 0 0 L 8 4 L 0 8 z", class: `arrow ${kind}` });
  return svg("marker", { id: `arrow-${kind}`, markerWidth: 8, markerHeight: 8, refX: 1, refY: 4, orient: "auto", markerUnits: "userSpaceOnUse" }, arrow);
}

export function planGraph(content) {
  const { plan } = content.facts;
  const workers = content.tables.workers || {};
  const stages = content.tables.stages || {};
  const prediction = plan.prediction || { stages: [], links: [] };
  const measured = Object.values(content.tables.links || {});
  const links = measured.length ? measured : prediction.links;
  const places = new Map();
  const parts = [];
  const columns = Math.max(...plan.replicas.map((replica) => replica.stages.length));
  const standby = Object.values(stages).some((row) => row.standby);
  const columnOf = new Map(plan.replicas.flatMap((replica) => replica.stages.map((stage, at) => [stage.workers[0], at])));
  const far = links.some((link) => Math.abs(columnOf.get(link.source) - columnOf.get(link.target)) > 1);
  const top = far ? ARC : 6;
  const row = BOX.height + (standby ? STANDBY : 0) + GAP.y + (far ? ARC : 0);
  const left = plan.replicas.length > 1 ? 92 : 4;
  let rank = 0;
  plan.replicas.forEach((replica, number) => {
    const y = top + number * row;
    if (plan.replicas.length > 1) {
      parts.push(text(0, y + 44, `replica ${number}`, { "font-weight": 600 }), text(0, y + 60, `micro ${replica.start}–${replica.stop - 1}`, { class: "dim", "font-size": 10.5 }));
    }
    replica.stages.forEach((stage, at) => {
      const status = stages[rank];
      const worker = status ? status.worker : stage.workers[0];
      const x = left + at * (BOX.width + GAP.x);
      places.set(worker, { x, y, column: at, row: number });
      parts.push(box(x, y, { stage, status, at, predicted: prediction.stages[rank], absent: (plan.absent || []).includes(rank) }, workers));
      if (status && status.standby) parts.push(standbyBox(x, y + BOX.height + 16, status, workers));
      rank += 1;
    });
  });
  const between = [];
  const edges = links.flatMap((link) => {
    const [from, to] = [places.get(link.source), places.get(link.target)];
    if (!from || !to) return [];
    if (from.row !== to.row) { between.push(link); return []; }
    return [edge(from, to, link, to.column > from.column)];
  });
  const width_ = left + columns * BOX.width + (columns - 1) * GAP.x + 4;
  const height = top + plan.replicas.length * row - GAP.y + 6;
  const picture = svg("svg", { width: width_, viewBox: `0 0 ${width_} ${height}`, role: "img", "aria-label": `Plan: ${plan.replicas.length} replicas of up to ${columns} stages` },
    svg("defs", {}, ["calm", "used", "hot", "unknown"].map(marker)), edges, parts);
  picture.style.minWidth = `${Math.min(width_, Math.round(0.8 * width_))}px`;
  const total = between.reduce((sum, link) => sum + link.bytes_per_step, 0);
  const notes = [];
  if (between.length) notes.push(`Replicas exchange ${bytes(total)} a step over ${between.length} links.`);
  for (const out of plan.left_out || []) notes.push(`Left out: ${nameOf(out.worker, workers)}: ${out.why}`);
  return [h("div", { class: "plan" }, picture), ...notes.map((words) => h("p", { class: "dim" }, words))];
}

const keptWords = (plan) => {
  const found = plan.replicas.flatMap((replica) => replica.stages).map((stage) => stage.keeping || {});
  const named = (field, usual) => new Set(found.map((keeping) => keeping[field]).filter((value) => value && value !== usual));
  return [
    ...[...named("recompute", "off")].map((value) => `recompute ${value}`),
    ...[...named("activations", "exact")].map((value) => `activations in ${value}`),
  ].join(" · ");
};

export const planWords = (plan) => [
  `version ${plan.version}`, plan.partitioner, plan.schedule, `${plan.n_micro} micro-batches`,
  plan.replicas.length > 1 ? `${plan.replicas.length} replicas` : "", keptWords(plan),
].filter(Boolean).join(" · ");

export { tone };
