// Elements and figures. All text goes in as text: names and reasons are strangers' words.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export function show(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== ""));
}

// Replace what an element shows only where `key` says that it would be other than before.
export function showIf(element, key, make) {
  const text = JSON.stringify(key);
  if (element.dataset.shown === text) return;
  element.dataset.shown = text;
  show(element, make());
}

export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", {}, title), ...children);
}

export function pill(state) {
  return h("span", { class: `pill ${tone(state)}` }, h("i", { "aria-hidden": "true" }, glyph(state)), state);
}

export function bar(share, label, kind = "") {
  const inner = h("b", {});
  inner.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
  return h("span", { class: `meter ${kind}`, role: "img", "aria-label": label }, inner);
}

// ---------------------------------------------------------------- states: a tone and a glyph, never colour alone

const TONES = {
  training: "good", assigned: "good", finished: "done", trained: "done", ready: "idle", idle: "idle", pool: "idle", queued: "idle",
  suspect: "warn", draining: "warn", paused: "warn", dropped: "warn", "left out": "warn", "awaiting consent": "warn",
  dead: "bad", failed: "bad", quarantined: "bad", cancelled: "off", left: "off", gone: "off", refused: "bad", unfit: "bad",
  warning: "warn", error: "bad", info: "idle", debug: "off",
};
const GLYPHS = { good: "▶", done: "✓", idle: "•", warn: "!", bad: "✕", off: "–", busy: "◌" };
export const tone = (state) => TONES[state] || "busy";
export const glyph = (state) => GLYPHS[tone(state)];

// ---------------------------------------------------------------- figures

export const missing = (value) => value === null || value === undefined || value === "";
const is = (value) => typeof value === "number" && Number.isFinite(value);

export function bytes(value) {
  if (!is(value)) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(value) < 1024 || unit === "TiB") return `${value.toFixed(unit === "B" || value >= 100 ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
}

// Joules of who measures them; who does not shows none.
export function energy(value) {
  const hours = value / 3600;
  return !value ? "–" : hours < 1000 ? `${+hours.toPrecision(3)} Wh` : `${+(hours / 1000).toPrecision(4)} kWh`;
}

export function seconds(value) {
  if (!is(value)) return "–";
  if (value < 1) return value === 0 ? "0 s" : `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function bits(value) {
  if (!is(value)) return "–";
  for (const unit of ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]) {
    if (value < 1000 || unit === "Gbit/s") return `${value >= 100 ? Math.round(value) : +value.toPrecision(3)} ${unit}`;
    value /= 1000;
  }
}

export function flops(gflops) {
  if (!is(gflops) || !gflops) return "–";
  if (gflops >= 1e6) return `${(gflops / 1e6).toPrecision(3)} PFLOP/s`;
  return gflops >= 1000 ? `${(gflops / 1000).toPrecision(3)} TFLOP/s` : `${+gflops.toPrecision(3)} GFLOP/s`;
}

export const count = (value) => (is(value) ? value.toLocaleString("en").replaceAll(",", "\u202f") : "–");
export const loss = (value) => (missing(value) ? "–" : is(value) ? value.toFixed(4) : String(value));
export const share = (value) => (is(value) ? `${Math.round(100 * value)} %` : "–");
export const figure = (value) => (is(value) ? String(+value.toPrecision(4)) : missing(value) ? "–" : String(value));

export function clock(at) {
  if (!is(at)) return "–";
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function moment(at) {
  if (!is(at)) return "–";
  return new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

// ---------------------------------------------------------------- names

export const workerPath = (id) => `/workers/${id.split("/").map(encodeURIComponent).join("/")}`;
export const jobPath = (id) => `/jobs/${encodeURIComponent(id)}`;
export function workerLink(id, workers) {
  if (!id) return "";
  return h("a", { href: workerPath(id) }, (workers && workers[id] && workers[id].name) || id);
}
export const jobLink = (id) => (id ? h("a", { href: jobPath(id) }, id) : "");
export const nameOf = (id, workers) => (workers && workers[id] && workers[id].name) || id;
