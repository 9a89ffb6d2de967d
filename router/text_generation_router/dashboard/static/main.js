// The page: the server's events drive the health line, tiles, charts and tables.

import { Chart, markWith } from "./chart.js";
import { byId, setText } from "./dom.js";
import { showErrors } from "./errors.js";
import { addEvents, marks } from "./events.js";
import { follow } from "./feed.js";
import { count, rate } from "./format.js";
import { nameModel, showHealth, showStale } from "./health.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { showLimits } from "./playground.js";
import { loadReplicas, showReplicas } from "./replicas.js";
import { showSettings } from "./settings.js";
import { showTiles } from "./tiles.js";

const history = new History();
let about = null;

const tokens = new Chart("tokens-chart", {
  title: "Tokens a second",
  hint: " prompts: right axis",
  series: [
    { label: "New", color: "c1", format: rate, fill: true },
    { label: "Prompts", color: "c3", format: rate, right: true },
  ],
});
const requests = new Chart("requests-chart", {
  title: "Requests",
  series: [
    { label: "Running", color: "c1", format: count, fill: true },
    { label: "Waiting", color: "c3", format: count },
  ],
});
const responses = new Chart("responses-chart", {
  title: "Responses a second",
  series: [
    { label: "2xx", color: "c1", format: rate, fill: true },
    { label: "4xx", color: "c3", format: rate },
    { label: "5xx", color: "c4", format: rate },
    { label: "Failed generations", color: "c4", format: rate, dash: [4, 3] },
  ],
});
const ttft = new HeatMap("ttft-chart", "Time to first token", "first_token");
const itl = new HeatMap("itl-chart", "Time between tokens", "token_gap");
markWith(marks);

/** Runs the parts of an update: one that fails stops no other, and not the feed. */
function each(...parts) {
  for (const part of parts) {
    try {
      part();
    } catch (error) {
      console.error(error);
    }
  }
}

function draw() {
  if (!about || !history.latest) return;
  const seconds = Number(document.querySelector("#window input:checked").value);
  const points = history.recent(seconds);
  const times = points.map((point) => point.time);
  const perSecond = (name) => points.map((point) => (point.gap ? null : point[name] / point.elapsed));
  const plain = (name) => points.map((point) => (point.gap ? null : point[name]));
  const { buckets, targets } = about;
  each(
    () => tokens.show([times, perSecond("new_tokens"), perSecond("prompt_tokens")], seconds),
    () => requests.show([times, plain("running"), plain("waiting")], seconds),
    () => responses.show([times, ...["status2", "status4", "status5", "failed"].map(perSecond)], seconds),
    () => ttft.show(points, buckets.first_token, seconds, targets.first_token),
    () => itl.show(points, buckets.token_gap, seconds, targets.token_gap),
    () => showTiles(history, about),
  );
}

function takeEvents(events) {
  addEvents(events, (at) => history.time(at));
}

const pause = follow({
  status(state, text) {
    setText(byId("status"), text);
    byId("status").dataset.state = document.body.dataset.connection = state;
    if (state === "lost") showStale();
  },
  server(given) {
    about = given;
    nameModel(about.model);
    history.begin(about.buckets);
    setText(byId("model"), about.model);
    const parts = [about.engine, about.dtype, about.device, `version ${about.version}`, `up to ${count(about.max_total_tokens)} tokens`];
    setText(byId("about"), parts.filter(Boolean).join(" · "));
    each(() => showSettings(about.settings), () => showLimits(about));
  },
  history(given) {
    history.load(given);
    each(() => takeEvents(given.events), () => loadReplicas(given), draw);
  },
  sample(sample) {
    history.push(sample);
    each(() => takeEvents(sample.events), () => showHealth(sample, history), () => showReplicas(sample), () => showErrors(sample), draw);
  },
});

byId("pause").addEventListener("click", ({ target }) => {
  const paused = target.getAttribute("aria-pressed") !== "true";
  target.setAttribute("aria-pressed", String(paused));
  pause(paused);
});
byId("window").addEventListener("change", draw);
