// The tables of replicas and tenants.

import { byId } from "./dom.js";
import { count, gigabytes, percent, rate, seconds } from "./format.js";
import { KeyedTable, badgeCell, meterCell, textCell, twoLineCell } from "./tables.js";
import { Trends, trendCell } from "./trend.js";

const ofReplicas = new Trends();
const ofTenants = new Trends();
const share = (part, whole) => (whole ? part / whole : 0);

function gpus(replica) {
  const shown = (replica.gpus ?? []).map((gpu) => {
    const parts = [`${gpu.index}:`];
    if (gpu.utilization != null) parts.push(percent(gpu.utilization));
    if (gpu.memory_total_bytes != null) parts.push(`${gigabytes(gpu.memory_used_bytes ?? 0)} of ${gigabytes(gpu.memory_total_bytes)}`);
    if (gpu.power_watts != null) parts.push(`${Math.round(gpu.power_watts)} W`);
    if (gpu.temperature_celsius != null) parts.push(`${Math.round(gpu.temperature_celsius)} °C`);
    return parts.join(" ");
  });
  return shown.join("; ") || "–";
}

const tokens = (each) => ofReplicas.rates(each.number, "new_tokens");
const stepTimes = (each) => ofReplicas.rates(each.number, "step_seconds", "steps");
const last = (rates) => rates.at(-1)?.[1];

const replicas = new KeyedTable("replicas-table", "Replicas", [
  { title: "Replica", cell: textCell((each) => each.number), sort: (each) => each.number },
  { title: "State", cell: badgeCell((each) => [each.state, each.state]), sort: (each) => each.state },
  { title: "New tokens a second", cell: trendCell(tokens, rate), sort: (each) => last(tokens(each)) },
  { title: "Step time", cell: trendCell(stepTimes, seconds), sort: (each) => last(stepTimes(each)) },
  { title: "Batch", cell: meterCell((each) => [share(each.batch, each.slots), each.slots ? `${count(each.batch)} of ${count(each.slots)}` : "–"]), sort: (each) => each.batch },
  { title: "KV cache", cell: meterCell((each) => [share(each.kv_used, each.kv_tokens), each.kv_tokens ? `${percent(share(each.kv_used, each.kv_tokens))} of ${count(each.kv_tokens)}` : "–"]), sort: (each) => share(each.kv_used, each.kv_tokens) },
  { title: "Prefix hits", number: true, cell: textCell((each) => (each.looked_up_tokens ? percent(each.hit_tokens / each.looked_up_tokens) : "–")), sort: (each) => share(each.hit_tokens, each.looked_up_tokens) },
  { title: "Up", number: true, cell: textCell((each) => seconds(each.uptime)), sort: (each) => each.uptime },
  { title: "Restarts", number: true, cell: textCell((each) => count(each.restarts)), sort: (each) => each.restarts },
  { title: "GPUs", cell: textCell(gpus) },
  { title: "Address", class: "long", cell: twoLineCell((each) => [each.address ?? "–", each.reason ?? ""]) },
], "No replica is a member.");

const tenants = new KeyedTable("tenants-table", "Tenants with requests", [
  { title: "Tenant", class: "long", cell: textCell((each) => each.name || "(no name)"), sort: (each) => each.name },
  { title: "Tokens a second", cell: trendCell((each) => ofTenants.rates(each.name, "tokens"), rate), sort: (each) => last(ofTenants.rates(each.name, "tokens")) },
  { title: "Running", cell: meterCell((each) => [share(each.running, each.all_running), `${count(each.running)} (${percent(share(each.running, each.all_running))})`]), sort: (each) => each.running },
  { title: "Waiting", number: true, cell: textCell((each) => count(each.waiting)), sort: (each) => each.waiting },
  { title: "Fair share", number: true, cell: textCell((each) => percent(each.share)), sort: (each) => each.share },
  { title: "Weight", number: true, cell: textCell((each) => each.weight), sort: (each) => each.weight },
], "No tenant has a request now.");

/** Takes what the replicas did in the last minutes. */
export function loadReplicas({ work }) {
  for (const row of work) {
    for (const [number, new_tokens, steps, step_seconds] of row.replicas) ofReplicas.add(row.now, number, { new_tokens, steps, step_seconds });
  }
}

/** Shows the replicas and tenants of a sample. A key that may not see other tenants gets none of them. */
export function showReplicas(sample) {
  for (const each of sample.replicas) ofReplicas.add(sample.now, each.number, each);
  replicas.show(sample.replicas, (each) => each.number);
  byId("tenants").hidden = !sample.tenants;
  if (!sample.tenants) return;
  const all = sample.tenants.reduce((total, each) => total + each.running, 0);
  for (const each of sample.tenants) ofTenants.add(sample.now, each.name, each);
  tenants.show(sample.tenants.map((each) => ({ ...each, all_running: all })), (each) => each.name);
}
