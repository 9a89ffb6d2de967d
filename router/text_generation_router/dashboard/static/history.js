// The samples of the last hour as columns, and what follows from the differences of their counters.

const LONGEST_S = 3600;
const GAP_S = 5;
const REFUSED = ["refused"];
const FAILED = ["error", "expired"];
const COUNTERS = ["new_tokens", "prompt_tokens", "looked_up_tokens", "hit_tokens", "preemptions", "moves"];

const sum = (values) => values.reduce((total, value) => total + value, 0);
const ended = (sample, reasons) => sum(reasons.map((reason) => sample.ended[reason] ?? 0));

/** One second of the server: gauges, rates and counts by bucket. */
function pointOf(sample, before) {
  const elapsed = sample.now - before.now;
  const difference = (now, then) => Math.max(0, now - then);
  const point = { time: Date.now() / 1000, elapsed, running: sample.running, waiting: sample.waiting };
  for (const name of COUNTERS) point[name] = difference(sample[name], before[name]);
  point.refused = difference(ended(sample, REFUSED), ended(before, REFUSED));
  point.failed = difference(ended(sample, FAILED), ended(before, FAILED));
  for (const name of ["first_token", "token_gap"]) point[name] = sample[name].map((count, i) => difference(count, before[name][i]));
  return point;
}

export class History {
  constructor() {
    this.points = [];
    this.latest = null;
  }

  /** Adds a sample. The first one, and one after a gap or a restart, only begins. */
  push(sample) {
    const before = this.latest;
    this.latest = sample;
    if (!before || sample.now <= before.now || sample.new_tokens < before.new_tokens) {
      this.gap();
      return;
    }
    const point = pointOf(sample, before);
    if (point.elapsed > GAP_S) this.gap();
    else this.points.push(point);
    const oldest = point.time - LONGEST_S;
    if (this.points.length && this.points[0].time < oldest - 60) this.points = this.points.filter((each) => each.time >= oldest);
  }

  /** Marks that samples are missing: lines are interrupted. */
  gap() {
    const last = this.points.at(-1);
    if (last && !last.gap) this.points.push({ time: last.time + 0.001, gap: true });
  }

  /** The points of the last seconds, merged so that there are at most 300. */
  recent(seconds) {
    const from = Date.now() / 1000 - seconds;
    const size = Math.max(1, Math.ceil(seconds / 300));
    const points = this.points.filter((point) => point.time >= from);
    return size === 1 ? points : merge(points, size);
  }
}

function merge(points, size) {
  const merged = [];
  let group = [];
  const flush = () => {
    if (group.length) merged.push(mergeGroup(group));
    group = [];
  };
  for (const point of points) {
    if (point.gap) {
      flush();
      merged.push(point);
    } else {
      if (group.length && Math.floor(group[0].time / size) !== Math.floor(point.time / size)) flush();
      group.push(point);
    }
  }
  flush();
  return merged;
}

function mergeGroup(group) {
  const merged = { time: group[0].time };
  for (const name of ["running", "waiting"]) merged[name] = sum(group.map((point) => point[name])) / group.length;
  for (const name of [...COUNTERS, "elapsed", "refused", "failed"]) merged[name] = sum(group.map((point) => point[name]));
  for (const name of ["first_token", "token_gap"]) merged[name] = addCounts(group.map((point) => point[name]));
  return merged;
}

/** Adds counts by bucket. */
export function addCounts(rows) {
  const total = rows.length ? [...rows[0]] : [];
  for (const row of rows.slice(1)) row.forEach((count, i) => (total[i] += count));
  return total;
}

/** Estimates a quantile from counts by bucket, as histogram_quantile does; null without observations. */
export function quantile(share, counts, bounds) {
  const rank = share * sum(counts);
  if (!rank) return null;
  let below = 0;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] && below + counts[i] >= rank) {
      if (i === bounds.length) return bounds.at(-1);
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (rank - below)) / counts[i];
    }
    below += counts[i];
  }
  return bounds.at(-1);
}
