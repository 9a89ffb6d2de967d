// The last hour as points, one a second or coarser: from the server's history at first, then from the differences of samples.

const LONGEST_S = 3600;
const GAP_S = 5;
const REFUSED = ["refused"];
const FAILED = ["error", "expired"];
const COUNTERS = ["new_tokens", "prompt_tokens", "looked_up_tokens", "hit_tokens", "preemptions", "moves"];
const HISTOGRAMS = ["first_token", "token_gap"];
const GAUGES = ["running", "waiting"];
const STATUSES = ["2", "4", "5"];
const SUMS = [...COUNTERS, "elapsed", "refused", "failed", ...STATUSES.map((digit) => `status${digit}`)];

const sum = (values) => values.reduce((total, value) => total + value, 0);
const of = (counts, keys) => sum(keys.map((key) => counts[key] ?? 0));

/** The difference of two counters; of a counter that began anew, the new one. */
const grown = (now, then = 0) => (now < then ? now : now - then);
const grownBy = (now, then) => Object.fromEntries(Object.entries(now).map(([key, count]) => [key, grown(count, then[key])]));

export class History {
  constructor() {
    this.points = [];
    this.latest = null;
    this.offset = null;
    this.buckets = {};
  }

  /** Takes the upper bounds of the histograms. */
  begin(buckets) {
    this.buckets = buckets;
  }

  /** Returns the time here of a time of the server. */
  time(now) {
    return this.offset + now;
  }

  /** Notes that something of the server's time `now` arrived. */
  #arrived(now) {
    const offset = Date.now() / 1000 - now;
    // The message that came fastest is the most exact one, until a clock is set.
    if (this.offset === null || offset < this.offset || offset > this.offset + GAP_S) this.offset = offset;
  }

  /** Takes the server's history; what is older than that stays. */
  load({ rows, last }) {
    this.#arrived(last.now);
    const loaded = rows.map((row) => this.#point(row));
    const from = loaded.length ? loaded[0].time - loaded[0].elapsed : this.time(last.now);
    this.points = this.points.filter((point) => point.time < from);
    if (from - (this.points.at(-1)?.time ?? from) > GAP_S) this.#gap();
    this.points.push(...loaded);
    this.latest = last;
  }

  /** Adds a sample. The first one only begins. */
  push(sample) {
    const before = this.latest;
    this.#arrived(sample.now);
    this.latest = sample;
    if (!before || sample.now <= before.now) return;
    const row = { now: sample.now, elapsed: sample.now - before.now };
    for (const name of ["ended", "responses", ...HISTOGRAMS]) row[name] = grownBy(sample[name], before[name]);
    for (const name of GAUGES) row[name] = sample[name];
    for (const name of COUNTERS) row[name] = grown(sample[name], before[name]);
    const point = this.#point(row);
    if (point.elapsed > GAP_S) this.#gap();
    else this.points.push(point);
    const oldest = point.time - LONGEST_S;
    if (this.points.length && this.points[0].time < oldest - 60) this.points = this.points.filter((each) => each.time >= oldest);
  }

  /** A row as a point: zeros, which rows leave out, and counts of histograms as arrays. */
  #point(row) {
    const point = { time: this.time(row.now), elapsed: row.elapsed, refused: of(row.ended ?? {}, REFUSED), failed: of(row.ended ?? {}, FAILED) };
    for (const digit of STATUSES) point[`status${digit}`] = row.responses?.[digit] ?? 0;
    for (const name of [...GAUGES, ...COUNTERS]) point[name] = row[name] ?? 0;
    for (const name of HISTOGRAMS) {
      point[name] = new Array((this.buckets[name]?.length ?? 0) + 1).fill(0);
      for (const [i, count] of Object.entries(row[name] ?? {})) point[name][i] = count;
    }
    return point;
  }

  /** Marks that samples are missing: lines are interrupted. */
  #gap() {
    const last = this.points.at(-1);
    if (last && !last.gap) this.points.push({ time: last.time + 0.001, gap: true });
  }

  /** The points of the last seconds, without gaps. */
  lately(seconds) {
    const from = Date.now() / 1000 - seconds;
    return this.points.filter((point) => !point.gap && point.time >= from);
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
  const merged = { time: group.at(-1).time };
  for (const name of GAUGES) merged[name] = Math.max(...group.map((point) => point[name]));
  for (const name of SUMS) merged[name] = sum(group.map((point) => point[name]));
  for (const name of HISTOGRAMS) merged[name] = addCounts(group.map((point) => point[name]));
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
