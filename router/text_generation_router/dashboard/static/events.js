// The events of replicas, requests and processes: a list, and the marks on the charts.

import { byId, make } from "./dom.js";
import { clock, count } from "./format.js";

const MOST = 200;
const LEVELS = {
  ...Object.fromEntries(["lost", "hung", "refused", "audit"].map((kind) => [kind, "bad"])),
  ...Object.fromEntries(["moved", "preempted", "draining", "stopped", "left", "taken", "isolated"].map((kind) => [kind, "warn"])),
};
let known = new Map();

/** Takes events of a sample or of the history, which may be known or have grown. */
export function addEvents(events, timeOf) {
  const changed = events.filter((event) => {
    const before = known.get(event.id);
    return !before || before.count !== event.count;
  });
  if (!changed.length) return;
  for (const event of changed) known.set(event.id, { ...event, time: timeOf(event.began), level: LEVELS[event.kind] ?? "good" });
  known = new Map([...known.values()].sort((a, b) => a.id - b.id).slice(-MOST).map((event) => [event.id, event]));
  byId("events-list").replaceChildren(...[...known.values()].reverse().map(row));
  byId("events-empty").hidden = known.size > 0;
}

function row({ time, level, kind, text, count: times, reason }) {
  const words = [make("span", {}, times ? `${text}: ${count(times)}` : text)];
  if (reason) words.push(make("span", { class: "muted below" }, reason));
  return make(
    "li",
    {},
    make("time", { class: "muted", datetime: new Date(time * 1000).toISOString() }, clock(time)),
    make("span", { class: "badge", "data-state": level }, kind),
    make("span", { class: "words" }, ...words),
  );
}

/** Returns the events as marks on charts, { time, color }: the worst ones last, over the others. */
export function marks() {
  const shown = [...known.values()].filter(({ kind }) => kind !== "preempted");
  return Object.entries({ good: "good", warn: "c3", bad: "c4" }).flatMap(([wanted, color]) => shown.filter(({ level }) => level === wanted).map(({ time }) => ({ time, color })));
}
