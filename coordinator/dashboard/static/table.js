// Tables of many rows: sorted by a click, filtered, a hundred shown, rows kept in place while figures change.
import { h } from "./dom.js";

const SHOWN = 100;

// columns: {title, text(row, key) -> string, sort?(row, key) -> value, draw?(row, key) -> Node, right?}
export class Table {
  constructor(columns, { empty = "nothing yet", sort = 0, down = false, shown = SHOWN, label = "" } = {}) {
    this.columns = columns;
    this.sort = sort;
    this.down = down;
    this.most = shown;
    this.step = shown;
    this.rows = new Map();
    this.body = h("tbody", {});
    this.heads = columns.map((column, at) => h(
      "th",
      { class: column.right ? "right" : "", scope: "col" },
      h("button", { type: "button", onclick: () => this.sortBy(at) }, column.title),
    ));
    this.none = h("p", { class: "none" }, empty);
    this.more = h("button", { type: "button", class: "more", onclick: () => this.showMore() });
    this.table = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, this.heads)), this.body);
    this.element = h("div", { class: "scroll" }, this.table, this.none, this.more);
    this.entries = [];
  }

  sortBy(at) {
    if (this.sort === at) this.down = !this.down;
    else { this.sort = at; this.down = Boolean(this.columns[at].right); }
    this.draw();
  }

  showMore() {
    this.most += this.step;
    this.draw();
  }

  // entries: [key, row] pairs
  set(entries) {
    this.entries = entries;
    this.draw();
  }

  draw() {
    const column = this.columns[this.sort];
    const value = column.sort || column.text;
    const sign = this.down ? -1 : 1;
    const sorted = this.entries
      .map(([key, row]) => [value(row, key) ?? "", key, row])
      .sort((a, b) => sign * compare(a[0], b[0]) || compare(a[1], b[1]));
    this.heads.forEach((head, at) => head.setAttribute(
      "aria-sort", at !== this.sort ? "none" : this.down ? "descending" : "ascending",
    ));
    const shown = sorted.slice(0, this.most);
    const keys = new Set(shown.map(([, key]) => key));
    for (const [key, kept] of this.rows) {
      if (!keys.has(key)) { kept.element.remove(); this.rows.delete(key); }
    }
    shown.forEach(([, key, row], at) => {
      const element = this.line(key, row);
      if (this.body.children[at] !== element) this.body.insertBefore(element, this.body.children[at] || null);
    });
    this.none.hidden = sorted.length > 0;
    this.table.hidden = sorted.length === 0;
    this.more.hidden = sorted.length <= this.most;
    this.more.textContent = `show more: ${shown.length} of ${sorted.length}`;
  }

  line(key, row) {
    let kept = this.rows.get(key);
    if (!kept) {
      const cells = this.columns.map((column) => h("td", { class: column.right ? "right" : column.wide ? "wide" : "" }));
      kept = { element: h("tr", {}, cells), cells, texts: [] };
      this.rows.set(key, kept);
    }
    this.columns.forEach((column, at) => {
      const text = column.text(row, key);
      if (kept.texts[at] === text) return;
      kept.texts[at] = text;
      if (column.draw) kept.cells[at].replaceChildren(column.draw(row, key));
      else kept.cells[at].textContent = text;
    });
    return kept.element;
  }
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// "site=lab memory>8GiB waits gpu": words that a row must have; NAME=VALUE, NAME>N and NAME<N look at one field.
const UNITS = { k: 1e3, kib: 1024, m: 1e6, mib: 2 ** 20, g: 1e9, gib: 2 ** 30, t: 1e12, tib: 2 ** 40 };

export function filter(text) {
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const found = /^([a-z_]+)([=<>])(.+)$/.exec(word);
    if (!found) return (fields) => Object.values(fields).some((value) => String(value).toLowerCase().includes(word));
    const [, name, how, given] = found;
    if (how === "=") return (fields) => String(fields[name] ?? "").toLowerCase() === given;
    const figure = /^([\d.]+)([a-z]*)$/.exec(given);
    if (!figure) return () => false;
    const bound = Number(figure[1]) * (UNITS[figure[2]] || 1);
    return how === ">" ? (fields) => Number(fields[name]) > bound : (fields) => Number(fields[name]) < bound;
  });
  return (fields) => tests.every((test) => test(fields));
}
