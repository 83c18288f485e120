// The page's content: one stream of events, whole at first, then changes (coordinator/dashboard/model.py, `applied`).

const page = document.getElementById("page");
const live = document.getElementById("live");
const away = document.getElementById("away");
const RETRY_MS = 1500;

export const topics = JSON.parse(page.dataset.topics);
export const subject = page.dataset.subject;
const contents = {};
let draw = () => {};
let source = null;
let queued = false;

export const empty = () => ({ facts: {}, tables: {}, curves: {} });
export const contentOf = (topic) => contents[topic] || empty();

export function applied(before, change) {
  const tables = { ...before.tables };
  for (const [name, rows] of Object.entries(change.rows || {})) {
    const table = { ...(tables[name] || {}) };
    for (const [key, row] of Object.entries(rows)) table[key] = { ...(table[key] || {}), ...row };
    tables[name] = table;
  }
  for (const [name, keys] of Object.entries(change.gone || {})) {
    const table = { ...tables[name] };
    for (const key of keys) delete table[key];
    tables[name] = table;
  }
  const curves = { ...before.curves, ...(change.curves || {}) };
  for (const [name, [steps, values]] of Object.entries(change.more || {})) {
    const [x, y] = curves[name];
    curves[name] = [x.concat(steps), y.concat(values)];
  }
  return { facts: { ...before.facts, ...(change.facts || {}) }, tables, curves };
}

function say(words, kind) {
  live.textContent = words;
  live.className = `live ${kind}`;
}

function showAway() {
  const out = topics.map((topic) => contentOf(topic).facts.away).find(Boolean);
  away.hidden = !out;
  if (!out) return;
  const unknown = out.kind === "UsageError";
  away.textContent = unknown
    ? out.why
    : `The coordinator has not answered since ${new Date(out.since_s * 1000).toLocaleTimeString("en-GB")}: ${out.why}. `
      + "What you see is from before; this page goes on by itself.";
}

function changed() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    showAway();
    draw();
    document.body.dataset.drawn = "yes";
  });
}

function open() {
  if (source || document.hidden) return;
  source = new EventSource(`/stream?${topics.map((topic) => `topic=${encodeURIComponent(topic)}`).join("&")}`);
  source.addEventListener("whole", (event) => {
    const found = JSON.parse(event.data);
    contents[found.topic] = { facts: found.facts, tables: found.tables, curves: found.curves };
    say("live", "on");
    changed();
  });
  source.addEventListener("change", (event) => {
    const found = JSON.parse(event.data);
    contents[found.topic] = applied(contentOf(found.topic), found);
    changed();
  });
  source.onopen = () => say("live", "on");
  source.onerror = () => {
    say("reconnecting", "off");
    if (source && source.readyState === EventSource.CLOSED) {
      close();
      setTimeout(ask, RETRY_MS);
    }
  };
}

// The browser gives up a stream that was answered by anything but 200: ask why.
async function ask() {
  try {
    const answer = await fetch(location.pathname, { method: "HEAD", credentials: "same-origin" });
    if (answer.status === 401) { location.reload(); return; }
  } catch { /* the dashboard itself is away */ }
  open();
}

function close() {
  if (source) source.close();
  source = null;
}

// A page that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { close(); say("paused", "off"); } else open();
});
addEventListener("pagehide", close);
addEventListener("pageshow", (event) => { if (event.persisted) open(); });
if (location.hash.startsWith("#key=")) history.replaceState(null, "", location.pathname + location.search);

export function start(make) {
  draw = make;
  changed();
  open();
}
