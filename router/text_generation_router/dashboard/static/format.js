// Numbers and times as short texts.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const NONE = "–";

/** 12,345; from a million on 1.2M. */
export function count(value) {
  if (value == null) return NONE;
  return Math.abs(value) < 1e6 ? whole.format(value) : short.format(value);
}

/** A rate: with a decimal below ten. */
export function rate(value) {
  if (value == null) return NONE;
  return value < 10 && value > 0 ? value.toFixed(1) : count(value);
}

/** 850 µs, 12 ms, 1.4 s, 3 min. */
export function seconds(value) {
  if (value == null) return NONE;
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

/** now, 12 s, 3 min: a time ago. */
export const ago = (age) => (age < 1 ? "now" : `${seconds(age)} ago`);

const times = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false, hourCycle: "h23" });

/** 17:05:09, of seconds since 1970. */
export const clock = (time) => times.format(time * 1000);

/** 42 %; below ten percent with a decimal. */
export function percent(share) {
  if (share == null || Number.isNaN(share)) return NONE;
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

/** 71 GB. */
export const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`;
