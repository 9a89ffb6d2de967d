// Charts over time: uPlot with our colours, a legend of texts, and a cursor that keys move too.

import { byId, color, make, setText } from "./dom.js";
import { clock, seconds } from "./format.js";

const charts = new Set();
const HEIGHT = 190;
let marks = () => [];

/** Takes the function that returns the marks on all charts: { time, color }. */
export function markWith(read) {
  marks = read;
}

/**
 * A chart in the figure `id`. Each series has `label`, `color` (a CSS variable), `format`, and perhaps `fill`, `dash`, or
 * `right` for an axis of its own. A chart that cannot be drawn says so, and still shows its last values.
 */
export class Chart {
  constructor(id, { title, series, scale = {}, axis, before, hint = "" }) {
    this.title = title;
    this.series = series;
    this.amounts = series.map(() => make("span", { class: "amount" }));
    this.when = make("span", { class: "muted when" });
    const legend = series.map((each, i) =>
      make("li", {}, make("span", { class: `key ${each.color}${each.dash ? " dash" : ""}`, "aria-hidden": "true" }), `${each.label} `, this.amounts[i]),
    );
    this.box = make("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title });
    const figure = byId(id);
    figure.append(
      make("figcaption", {}, make("strong", {}, title), make("span", { class: "muted" }, hint), this.when),
      this.box,
      make("ul", { class: "legend" }, ...legend),
    );
    this.data = [[], ...series.map(() => [])];
    this.target = null;
    this.plot = null;
    this.#try(() => {
      this.plot = new uPlot(this.#options(scale, axis, before), this.data, this.box);
    });
    this.box.addEventListener("keydown", (event) => this.#move(event));
    this.box.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    charts.add(this);
    new ResizeObserver(() => this.#try(() => this.plot?.setSize({ width: this.box.clientWidth, height: HEIGHT }))).observe(this.box);
  }

  #try(draw) {
    try {
      draw();
    } catch (error) {
      console.warn(error);
      this.plot = null;
      this.box.replaceChildren(make("p", { class: "muted empty" }, `This chart cannot be drawn: ${error.message}`));
    }
  }

  /** Draws the target and the marks over the chart. */
  #over(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    const right = bbox.left + bbox.width;
    const line = (name, ...points) => {
      ctx.strokeStyle = ctx.fillStyle = color(name);
      ctx.beginPath();
      points.forEach(([x, y], i) => (i ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
    };
    for (const mark of marks()) {
      const x = plot.valToPos(mark.time, "x", true);
      if (x < bbox.left || x > right) continue;
      const size = 5 * devicePixelRatio;
      line(mark.color, [x - size, bbox.top], [x + size, bbox.top], [x, bbox.top + 1.5 * size]);
      ctx.fill();
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      line(mark.color, [x, bbox.top], [x, bbox.top + bbox.height]);
      ctx.stroke();
    }
    if (this.target) {
      const y = plot.valToPos(this.target, "y", true);
      ctx.setLineDash([8 * devicePixelRatio, 4 * devicePixelRatio]);
      line("good", [bbox.left, y], [right, y]);
      if (y >= bbox.top && y <= bbox.top + bbox.height) ctx.stroke();
    }
    ctx.restore();
  }

  #options(scale, axis, before) {
    const right = this.series.find((each) => each.right);
    const range = (_, low, high) => [0, Math.max(1, high ?? 1) * 1.08];
    const line = () => color("line");
    const axes = { stroke: () => color("muted"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "12px system-ui" };
    return {
      width: this.box.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 8, 0, 0],
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      scales: { x: { time: true }, y: { range, ...scale }, ...(right && { right: { range } }) },
      series: [
        {},
        ...this.series.map((each) => ({
          label: each.label,
          scale: each.right ? "right" : "y",
          stroke: () => color(each.color),
          width: 1.75,
          dash: each.dash,
          fill: each.fill && (() => `${color(each.color)}26`),
          points: { show: false },
        })),
      ],
      axes: [
        { ...axes, size: 28, values: (_, ticks) => ticks.map((tick) => clock(tick).slice(0, tick % 60 ? 8 : 5)), space: 70 },
        { ...axes, size: 52, ...axis, grid: { ...axes.grid, ...(axis && { filter: axis.filter }) } },
        ...(right ? [{ ...axes, size: 52, scale: "right", side: 1, grid: { show: false } }] : []),
      ],
      hooks: { drawClear: before ? [before] : [], draw: [(plot) => this.#over(plot)], setCursor: [() => this.#showAmounts()] },
    };
  }

  /** Shows columns: times, then the values of each series; the last `window` seconds. */
  show(data, window) {
    this.data = data;
    const now = Date.now() / 1000;
    this.#try(() => {
      this.plot?.batch(() => {
        this.plot.setData(data, false);
        this.plot.setScale("x", { min: now - window, max: now });
      });
    });
    this.#showAmounts();
  }

  #showAmounts() {
    const chosen = this.plot?.cursor.left >= 0 ? this.plot.cursor.idx : null;
    const index = chosen ?? this.#last();
    setText(this.when, chosen == null ? "" : clock(this.data[0][chosen]));
    this.series.forEach((each, i) => setText(this.amounts[i], each.format(this.data[i + 1][index])));
  }

  #last() {
    for (let i = this.data[0].length - 1; i >= 0; i -= 1) if (this.data.slice(1).some((column) => column[i] != null)) return i;
    return -1;
  }

  /** Describes the chart for screen readers. */
  describe() {
    const parts = this.series.map((each, i) => {
      const values = this.data[i + 1].filter((value) => value != null);
      return values.length ? `${each.label} now ${each.format(values.at(-1))}, most ${each.format(Math.max(...values))}` : `${each.label} none`;
    });
    this.box.setAttribute("aria-label", `${this.title}: ${parts.join("; ")}. Arrow keys show values.`);
  }

  #move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!this.plot || !step || !this.data[0].length) return;
    event.preventDefault();
    const at = this.plot.cursor.left >= 0 ? this.plot.cursor.idx : this.data[0].length;
    const index = Math.min(this.data[0].length - 1, Math.max(0, (at ?? this.data[0].length) + step));
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][index], "x"), top: 10 });
  }
}

/** A scale of times, logarithmic, around the values that there are. */
export const logTimes = (range) => ({ distr: 3, range });

const round = (_, ticks) => {
  const digits = ticks.at(-1) > 2000 * ticks[0] ? /^1(\.0*)?e/ : /^[125](\.0*)?e/;
  return ticks.map((tick) => (tick && digits.test(tick.toExponential(3)) ? tick : null));
};

/** An axis of times: lines and labels at 1, 2 and 5 times powers of ten; at powers of ten, if it is long. */
export const timeAxis = { filter: round, values: (_, ticks) => ticks.map((tick) => (tick ? seconds(tick) : "")) };

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.plot?.redraw(false)));
setInterval(() => charts.forEach((chart) => chart.describe()), 10_000);
