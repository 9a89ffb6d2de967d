// The numbers at the top.

import { byId, make, setText } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";
import { addCounts, quantile } from "./history.js";

const MINUTE_S = 60;
const sum = (points, name) => points.reduce((total, point) => total + point[name], 0);

/** Each tile: a title, and the value and the remark for a sample and the points of the last minute. */
const TILES = [
  ["Running", (s, m, about) => [count(s.running), `of ${count(about.max_concurrent_requests)}; ${percent(s.busy)} busy`]],
  ["Waiting", (s) => [count(s.waiting), `${s.waiting ? `about ${seconds(s.queue_seconds)}` : "none"}; ${count(s.connections)} connections`]],
  ["Failed", (s, m) => [count(sum(m, "failed")), `last minute; ${count(sum(m, "refused"))} refused`, sum(m, "failed") > 0]],
  ["New tokens", (s, m) => [rate(lately(m, "new_tokens")), `a second; ${rate(lately(m, "prompt_tokens"))} of prompts`]],
  ["First token", (s, m, about) => times(m, "first_token", about)],
  ["Between tokens", (s, m, about) => times(m, "token_gap", about)],
  ["KV cache", (s, m) => cache(s, m)],
  ["Prefix hits", (s, m) => [percent(hits(m)), `last minute; ${percent(s.hit_tokens / s.looked_up_tokens)} since start`]],
];

function lately(points, name) {
  const last = points.slice(-5);
  return last.length ? sum(last, name) / sum(last, "elapsed") : null;
}

function times(points, name, about) {
  const counts = addCounts(points.map((point) => point[name]));
  const bounds = about.buckets[name];
  return [seconds(quantile(0.5, counts, bounds)), `median; p95 ${seconds(quantile(0.95, counts, bounds))}`];
}

function cache(sample, points) {
  const total = (name) => sample.replicas.reduce((all, replica) => all + (replica[name] ?? 0), 0);
  const share = total("kv_tokens") ? total("kv_used") / total("kv_tokens") : null;
  const preempted = sum(points, "preemptions");
  return [percent(share), `of ${count(total("kv_tokens"))} tokens${preempted ? `; ${count(preempted)} preempted` : ""}`, share > 0.95];
}

function hits(points) {
  const asked = sum(points, "looked_up_tokens");
  return asked ? sum(points, "hit_tokens") / asked : null;
}

const shown = TILES.map(([title, read]) => {
  const value = make("span", { class: "value" }, "–");
  const remark = make("span", { class: "muted" }, "\u00a0");
  const tile = make("div", { class: "tile panel" }, make("dt", {}, title), make("dd", {}, value, remark));
  byId("tiles").append(tile);
  return { read, value, remark, tile };
});

/** Shows the latest sample and the last minute. */
export function showTiles(history, about) {
  const minute = history.lately(MINUTE_S);
  for (const { read, value, remark, tile } of shown) {
    const [text, words, alarm] = read(history.latest, minute, about);
    setText(value, text);
    setText(remark, words);
    tile.classList.toggle("alarm", Boolean(alarm));
  }
}
