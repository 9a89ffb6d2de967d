// A table with a row for each item. Rows stay the same elements, so that a selection survives an update.

import { byId, make, meter, setText } from "./dom.js";

/**
 * A table with rows by key. Each column has `title`, and `cell()`: { element, show(item) }; with `sort(item)` its head sorts.
 * Roles are set, because a phone shows rows as cards, which are no table to a browser.
 */
export class KeyedTable {
  constructor(id, caption, columns, empty) {
    this.columns = columns;
    this.rows = new Map();
    this.items = [];
    this.order = null;
    this.body = make("tbody", { role: "rowgroup" });
    this.empty = make("tr", { role: "row" }, make("td", { colspan: String(columns.length), class: "muted empty", role: "cell" }, empty));
    this.heads = columns.map((column) => this.#head(column));
    const table = byId(id);
    table.setAttribute("role", "table");
    table.append(make("caption", { class: "hidden" }, caption), make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...this.heads)), this.body);
    this.body.append(this.empty);
  }

  #head(column) {
    const { title, number, sort } = column;
    if (!sort) return make("th", { scope: "col", role: "columnheader", class: number && "number" }, title);
    const button = make("button", { type: "button", class: "sort" }, title);
    button.addEventListener("click", () => this.#sortBy(column));
    return make("th", { scope: "col", role: "columnheader", class: number && "number" }, button);
  }

  /** Sorts by a column: the largest first, then the smallest, then as the server did. */
  #sortBy(column) {
    const next = this.order?.column !== column ? "descending" : this.order.direction === "descending" ? "ascending" : null;
    this.order = next && { column, direction: next };
    this.heads.forEach((head, i) => {
      if (this.columns[i] === column && next) head.setAttribute("aria-sort", next);
      else head.removeAttribute("aria-sort");
    });
    this.show(this.items, this.key);
  }

  #sorted(items) {
    if (!this.order) return items;
    const { column, direction } = this.order;
    const sign = direction === "ascending" ? 1 : -1;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en") : (a ?? -1) - (b ?? -1));
    return [...items].sort((a, b) => sign * compare(column.sort(a), column.sort(b)));
  }

  /** Shows items, in their order or sorted; `key` names an item. */
  show(items, key) {
    Object.assign(this, { items, key });
    const shown = this.#sorted(items);
    const keys = shown.map(key);
    for (const old of this.rows.keys()) {
      if (keys.includes(old)) continue;
      this.rows.get(old).element.remove();
      this.rows.delete(old);
    }
    shown.forEach((item, at) => {
      if (!this.rows.has(keys[at])) this.rows.set(keys[at], this.#row());
      const row = this.rows.get(keys[at]);
      if (this.body.children[at] !== row.element) this.body.insertBefore(row.element, this.body.children[at] ?? null);
      row.cells.forEach((cell) => cell.show(item));
    });
    if (items.length) this.empty.remove();
    else this.body.append(this.empty);
  }

  #row() {
    const cells = this.columns.map(({ cell }) => cell());
    const shown = cells.map((cell, i) => {
      const { title, number, class: name } = this.columns[i];
      return make("td", { role: "cell", class: number ? "number" : name, "data-title": title }, cell.element);
    });
    return { element: make("tr", { role: "row" }, ...shown), cells };
  }
}

/** A cell of text. */
export function textCell(read) {
  return () => {
    const element = make("span");
    return { element, show: (item) => setText(element, String(read(item) ?? "")) };
  };
}

/** A cell of a text and a smaller one below it. */
export function twoLineCell(read) {
  return () => {
    const [main, below] = [make("span", { class: "clamped" }), make("span", { class: "muted below" })];
    const show = (item) => {
      const [text, words] = read(item);
      setText(main, text);
      setText(below, words);
    };
    return { element: make("span", {}, main, below), show };
  };
}

/** A cell with a bar and a text. */
export function meterCell(read, kind) {
  return () => {
    const { element, show } = meter(kind);
    return { element, show: (item) => show(...read(item)) };
  };
}

/** A cell of a text on a colour; `read(item)` returns the text, and the state that has the colour. */
export function badgeCell(read) {
  return () => {
    const element = make("span", { class: "badge" });
    const show = (item) => {
      const [text, state] = read(item);
      setText(element, text);
      element.dataset.state = state;
    };
    return { element, show };
  };
}
