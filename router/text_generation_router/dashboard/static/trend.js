// Sparklines: the rates of a counter of a replica or tenant over the last two minutes.

import { setText } from "./dom.js";

const SECONDS = 120;
const WIDTH = 90;
const HEIGHT = 22;
const SVG = "http://www.w3.org/2000/svg";

/** The counters of items, by key, over the last two minutes. */
export class Trends {
  constructor() {
    this.rows = new Map();
  }

  /** Adds the counters of an item at a time of the server. */
  add(now, key, counters) {
    const rows = this.rows.get(key) ?? [];
    if (rows.length && now <= rows.at(-1).now) return;
    rows.push({ ...counters, now });
    this.rows.set(key, rows.filter((row) => row.now >= now - SECONDS));
    for (const [other, { length, [length - 1]: last }] of this.rows) if (last.now < now - SECONDS) this.rows.delete(other);
  }

  /** Returns [age in seconds, rate] of an item: by how much `name` grew over how much `per` did; null if that did not. */
  rates(key, name, per = "now") {
    const rows = this.rows.get(key) ?? [];
    const last = rows.at(-1)?.now;
    return rows.slice(1).map((row, i) => {
      const units = row[per] - rows[i][per];
      return [last - row.now, units > 0 ? Math.max(0, row[name] - rows[i][name]) / units : null];
    });
  }
}

/** A cell with a sparkline and its last value. `read(item)` returns the rates, `format` writes one. */
export function trendCell(read, format) {
  return () => {
    const svg = document.createElementNS(SVG, "svg");
    const path = document.createElementNS(SVG, "path");
    const amount = document.createElement("span");
    const element = document.createElement("span");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("aria-hidden", "true");
    element.className = "trend";
    amount.className = "amount";
    svg.append(path);
    element.append(svg, amount);
    const show = (item) => {
      const rates = read(item);
      path.setAttribute("d", line(rates));
      setText(amount, format(rates.at(-1)?.[1]));
    };
    return { element, show };
  };
}

function line(rates) {
  const most = Math.max(1e-9, ...rates.map(([, rate]) => rate ?? 0));
  let pen = "M";
  const parts = rates.map(([age, rate]) => {
    if (rate === null) {
      pen = "M";
      return "";
    }
    const part = `${pen}${(WIDTH * (1 - age / SECONDS)).toFixed(1)} ${(HEIGHT - 1.5 - (HEIGHT - 3) * (rate / most)).toFixed(1)}`;
    pen = "L";
    return part;
  });
  return parts.join("");
}
