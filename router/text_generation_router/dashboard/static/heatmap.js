// A distribution over time: a heat map of the counts by bucket, with percentiles as lines over it.

import { Chart, logTimes, timeAxis } from "./chart.js";
import { color } from "./dom.js";
import { seconds } from "./format.js";
import { addCounts, quantile } from "./history.js";

const SHARES = [0.5, 0.95, 0.99];
const SMOOTH = 5;

export class HeatMap {
  constructor(id, title, name) {
    this.name = name;
    this.bounds = [0.001, 1];
    this.points = [];
    this.chart = new Chart(id, {
      title,
      hint: " stronger: more",
      series: [
        { label: "p50", color: "c2", format: seconds },
        { label: "p95", color: "c3", format: seconds },
        { label: "p99", color: "c4", format: seconds, dash: [4, 3] },
      ],
      scale: logTimes(() => this.#range()),
      axis: timeAxis,
      before: (plot) => this.#draw(plot),
    });
  }

  /** The lower and upper bound of a bucket, both finite and above zero. */
  #edges(i) {
    const { bounds } = this;
    return [i ? bounds[i - 1] : bounds[0] / 2, i < bounds.length ? bounds[i] : 2 * bounds.at(-1)];
  }

  #range() {
    const target = this.chart?.target;
    const total = addCounts(this.points.filter((point) => !point.gap).map((point) => point[this.name]));
    const first = total.findIndex((count) => count > 0);
    if (first < 0) return [0.001, Math.max(1, 2 * (target ?? 0))];
    const last = total.findLastIndex((count) => count > 0);
    const range = [this.#edges(Math.max(0, first - 1))[0], this.#edges(Math.min(this.bounds.length, last + 1))[1]];
    return target ? [Math.min(range[0], target / 2), Math.max(range[1], target * 1.5)] : range;
  }

  #draw(plot) {
    const { ctx, bbox } = plot;
    const points = this.points;
    const most = Math.max(1, ...points.map((point) => (point.gap ? 0 : Math.max(...point[this.name]))));
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = color("c1");
    points.forEach((point, at) => {
      if (point.gap) return;
      const right = Math.ceil(plot.valToPos(point.time, "x", true));
      const left = Math.floor(plot.valToPos(point.time - Math.min(point.elapsed, 60), "x", true));
      point[this.name].forEach((count, i) => {
        if (!count) return;
        const [low, high] = this.#edges(i);
        const top = Math.round(plot.valToPos(high, "y", true));
        ctx.globalAlpha = 0.15 + 0.75 * Math.sqrt(count / most);
        ctx.fillRect(left, top, Math.max(1, right - left), Math.round(plot.valToPos(low, "y", true)) - top);
      });
    });
    ctx.restore();
  }

  /** Shows points of the history; percentiles are over the last few of them. */
  show(points, bounds, window, target) {
    this.points = points;
    this.bounds = bounds;
    this.chart.target = target;
    const lines = SHARES.map(() => []);
    points.forEach((point, at) => {
      const near = point.gap ? [] : points.slice(Math.max(0, at - SMOOTH + 1), at + 1).filter((each) => !each.gap);
      const counts = addCounts(near.map((each) => each[this.name]));
      SHARES.forEach((share, i) => lines[i].push(near.length ? quantile(share, counts, bounds) : null));
    });
    this.chart.show([points.map((point) => point.time), ...lines], window);
  }
}
