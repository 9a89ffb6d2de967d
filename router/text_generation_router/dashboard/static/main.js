// The page: the server's events drive tiles, charts and tables.

import { Chart } from "./chart.js";
import { byId, setText } from "./dom.js";
import { follow } from "./feed.js";
import { count, rate } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { showLimits } from "./playground.js";
import { showSettings } from "./settings.js";
import { showTables } from "./tables.js";
import { showTiles } from "./tiles.js";

const history = new History();
let about = null;

const tokens = new Chart("tokens-chart", {
  title: "Tokens a second",
  series: [
    { label: "New", color: "c1", format: rate, fill: true },
    { label: "Prompts", color: "c3", format: rate },
  ],
});
const requests = new Chart("requests-chart", {
  title: "Requests",
  series: [
    { label: "Running", color: "c1", format: count, fill: true },
    { label: "Waiting", color: "c3", format: count },
    { label: "Refused a second", color: "c4", format: rate },
  ],
});
const ttft = new HeatMap("ttft-chart", "Time to first token", "first_token");
const itl = new HeatMap("itl-chart", "Time between tokens", "token_gap");

function draw() {
  if (!about || !history.latest) return;
  const seconds = Number(document.querySelector("#window input:checked").value);
  const points = history.recent(seconds);
  const times = points.map((point) => point.time);
  const perSecond = (name) => points.map((point) => (point.gap ? null : point[name] / point.elapsed));
  const plain = (name) => points.map((point) => (point.gap ? null : point[name]));
  tokens.show([times, perSecond("new_tokens"), perSecond("prompt_tokens")], seconds);
  requests.show([times, plain("running"), plain("waiting"), perSecond("refused")], seconds);
  ttft.show(points, about.buckets.first_token, seconds);
  itl.show(points, about.buckets.token_gap, seconds);
  showTiles(history, about);
}

const pause = follow({
  status(state, text) {
    setText(byId("status"), text);
    byId("status").dataset.state = state;
  },
  server(given) {
    about = given;
    document.title = `${about.model} – dashboard`;
    setText(byId("model"), about.model);
    const parts = [about.engine, about.dtype, about.device, `version ${about.version}`, `up to ${count(about.max_total_tokens)} tokens`];
    setText(byId("about"), parts.filter(Boolean).join(" · "));
    showSettings(about.settings);
    showLimits(about);
  },
  sample(sample) {
    history.push(sample);
    showTables(sample);
    draw();
  },
});

byId("pause").addEventListener("click", ({ target }) => {
  const paused = target.getAttribute("aria-pressed") !== "true";
  target.setAttribute("aria-pressed", String(paused));
  pause(paused);
});
byId("window").addEventListener("change", draw);
