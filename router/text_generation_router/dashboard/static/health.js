// The health of the server in one line, in the title of the tab, and in its icon.

import { byId, setText } from "./dom.js";
import { clock, count } from "./format.js";

const MINUTE_S = 60;
const WORDS = { good: "Healthy", warn: "Degraded", bad: "Not healthy", stale: "No connection" };
let model = "Text generation";
let since = null;

function show(level, details) {
  const element = byId("health");
  const text = [WORDS[level], ...details].join(" · ");
  setText(byId("health-text"), text);
  if (element.dataset.level === level && document.title.endsWith(model)) return;
  element.dataset.level = level;
  document.title = level === "good" ? `Dashboard – ${model}` : `${level === "stale" ? "…" : "⚠"} ${WORDS[level]} – ${model}`;
  document.querySelector("link[rel=icon]").href = level === "good" ? "dashboard/icon.svg" : `dashboard/icon-${level}.svg`;
}

/** Takes the name of the model. */
export function nameModel(name) {
  model = name;
}

/** Shows the health of a server from a sample and its history. */
export function showHealth(sample, history) {
  since = Date.now() / 1000;
  const { serving = 0, taken = 0, hung = 0, refused = 0, joining = 0, draining = 0 } = sample.states;
  const all = Object.values(sample.states).reduce((total, each) => total + each, 0) - taken;
  const failed = history.lately(MINUTE_S).reduce((total, point) => total + point.failed, 0);
  const details = [`${count(serving)} of ${count(all)} replicas`];
  for (const [number, word] of [[hung, "hung"], [refused, "refused"], [joining, "lost or joining"], [draining, "draining"]]) {
    if (number) details.push(`${count(number)} ${word}`);
  }
  details.push(failed ? `${count(failed)} failed in the last minute` : "0 failed");
  const level = hung || failed || (!serving && all) ? "bad" : serving < all ? "warn" : "good";
  show(level, details);
}

/** Shows that there is no connection, and so that all figures are old. */
export function showStale() {
  show("stale", since ? [`figures of ${clock(since)}`] : []);
}
