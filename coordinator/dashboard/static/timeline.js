// The last step of a job: a row a rank, computing above, sends and receives below.
import { bytes, h, nameOf, seconds, svg } from "./dom.js";

const LEFT = 120;
const ROW = 46;
const KINDS = {
  F: ["forward", "good"], B: ["backward", "accent2"], I: ["backward, inputs", "accent2"], W: ["weight gradients", "done"], opt: ["optimizer", "busy"],
  eval: ["evaluate", "done"], wait: ["wait", "off"], load: ["load", "idle"], save: ["save", "idle"], send: ["send", "idle"], recv: ["receive", "warn"],
};
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// step: {step, ranks: [{worker, stage, spans: [[kind, micro, start_s, end_s, peer, bytes]]}]}
export function timeline(step, workers, width) {
  const spans = step.ranks.flatMap((rank) => rank.spans);
  if (!spans.length) return h("p", { class: "none" }, "No spans of a step yet.");
  const begin = Math.min(...spans.map((span) => span[2]));
  const end = Math.max(...spans.map((span) => span[3]));
  const scale = (Math.max(560, width) - LEFT - 12) / Math.max(1e-6, end - begin);
  const x = (at) => LEFT + (at - begin) * scale;
  const height = step.ranks.length * ROW + 24;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => begin + part * (end - begin));
  const seen = [...new Set(spans.map((span) => span[0]))].filter((kind) => KINDS[kind]);
  return [
    h("div", { class: "legend" }, seen.map((kind) => h("span", {}, h("i", { class: `span ${KINDS[kind][1]}`, "aria-hidden": "true" }), KINDS[kind][0])), h("span", {}, `step ${step.step}, ${seconds(end - begin)}`)),
    h("div", { class: "plan" }, svg("svg", { width: LEFT + (end - begin) * scale + 12, height, role: "img", "aria-label": `Timeline of step ${step.step}`, class: "timeline" },
      ticks.map((at) => [svg("line", { x1: x(at), x2: x(at), y1: 0, y2: height - 18, class: "tick" }), svg("text", { x: x(at), y: height - 4, "text-anchor": at === begin ? "start" : at === end ? "end" : "middle", class: "dim", "font-size": 10.5 }, seconds(at - begin))]),
      step.ranks.map((rank, number) => {
        const y = number * ROW;
        return svg("g", {},
          svg("text", { x: 0, y: y + 17, "font-weight": 600 }, cut(nameOf(rank.worker, workers), 16)),
          svg("text", { x: 0, y: y + 32, class: "dim", "font-size": 10.5 }, `stage ${rank.stage}`),
          rank.spans.map(([kind, micro, from, to, peer, size]) => {
            const lane = kind === "send" ? 24 : kind === "recv" ? 31 : 3;
            const [words, tone] = KINDS[kind] || [kind, "idle"];
            return svg("g", {},
              svg("title", {}, `${words}${micro >= 0 ? `, micro-batch ${micro}` : ""}: ${seconds(to - from)}${peer ? ` ${kind === "send" ? "to" : "from"} ${nameOf(peer, workers)}` : ""}${size ? `, ${bytes(size)}` : ""}`),
              svg("rect", { x: x(from), y: y + lane, width: Math.max(1, (to - from) * scale - 0.5), height: lane === 3 ? 18 : 5, rx: 2, class: `span ${tone}` }));
          }));
      })))];
}
