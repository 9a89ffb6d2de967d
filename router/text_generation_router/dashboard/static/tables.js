// The tables of replicas, tenants and errors. Rows stay the same elements, so that a selection survives an update.

import { byId, make, meter, setText } from "./dom.js";
import { count, gigabytes, percent, seconds } from "./format.js";

/** A table with rows by key. Each column has `title`, and `cell()`: { element, show(item) }. */
export class KeyedTable {
  constructor(id, caption, columns, empty) {
    this.columns = columns;
    this.rows = new Map();
    this.body = make("tbody");
    this.empty = make("tr", {}, make("td", { colspan: String(columns.length), class: "muted empty" }, empty));
    const head = columns.map(({ title, number }) => make("th", { scope: "col", class: number && "number" }, title));
    byId(id).append(make("caption", { class: "hidden" }, caption), make("thead", {}, make("tr", {}, ...head)), this.body);
    this.body.append(this.empty);
  }

  /** Shows items, in their order; `key` names an item. */
  show(items, key) {
    const keys = items.map(key);
    for (const old of this.rows.keys()) {
      if (keys.includes(old)) continue;
      this.rows.get(old).element.remove();
      this.rows.delete(old);
    }
    items.forEach((item, at) => {
      if (!this.rows.has(keys[at])) this.rows.set(keys[at], this.#row());
      const row = this.rows.get(keys[at]);
      if (this.body.children[at] !== row.element) this.body.insertBefore(row.element, this.body.children[at] ?? null);
      row.cells.forEach((cell) => cell.show(item));
    });
    if (items.length) this.empty.remove();
    else this.body.append(this.empty);
  }

  #row() {
    const cells = this.columns.map(({ cell }) => cell());
    const shown = cells.map((cell, i) => make("td", { class: this.columns[i].number ? "number" : this.columns[i].class }, cell.element));
    return { element: make("tr", {}, ...shown), cells };
  }
}

/** A cell of text. */
export function textCell(read) {
  return () => {
    const element = make("span");
    return { element, show: (item) => setText(element, String(read(item) ?? "")) };
  };
}

function meterCell(read, kind) {
  return () => {
    const { element, show } = meter(kind);
    return { element, show: (item) => show(...read(item)) };
  };
}

function badgeCell(read) {
  return () => {
    const element = make("span", { class: "badge" });
    return {
      element,
      show: (item) => {
        setText(element, String(read(item)));
        element.dataset.state = read(item);
      },
    };
  };
}

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

const replicas = new KeyedTable("replicas-table", "Replicas", [
  { title: "Replica", cell: textCell((each) => each.number) },
  { title: "State", cell: badgeCell((each) => each.state) },
  { title: "Batch", cell: meterCell((each) => [share(each.batch, each.slots), each.slots ? `${count(each.batch)} of ${count(each.slots)}` : "–"]) },
  { title: "KV cache", cell: meterCell((each) => [share(each.kv_used, each.kv_tokens), each.kv_tokens ? `${percent(share(each.kv_used, each.kv_tokens))} of ${count(each.kv_tokens)}` : "–"]) },
  { title: "Cached prefixes", number: true, cell: textCell((each) => count(each.kv_cached)) },
  { title: "Prefix hits", number: true, cell: textCell((each) => (each.looked_up_tokens ? percent(each.hit_tokens / each.looked_up_tokens) : "–")) },
  { title: "GPUs", cell: textCell(gpus) },
  { title: "Address", class: "long", cell: textCell((each) => (each.reason ? `${each.address} – ${each.reason}` : each.address ?? "–")) },
], "No replica is a member.");

const tenants = new KeyedTable("tenants-table", "Tenants with requests", [
  { title: "Tenant", class: "long", cell: textCell((each) => each.name || "(no name)") },
  { title: "Running", cell: meterCell((each) => [share(each.running, each.all_running), `${count(each.running)} (${percent(share(each.running, each.all_running))})`]) },
  { title: "Waiting", number: true, cell: textCell((each) => count(each.waiting)) },
  { title: "Fair share", number: true, cell: textCell((each) => percent(each.share)) },
  { title: "Weight", number: true, cell: textCell((each) => each.weight) },
], "No tenant has a request now.");

const errors = new KeyedTable("errors-table", "Last errors by route, type and tenant", [
  { title: "Ago", number: true, cell: textCell((each) => seconds(each.age || 0.5).replace("500 ms", "now")) },
  { title: "Status", number: true, cell: textCell((each) => each.status) },
  { title: "Error", class: "long", cell: textCell((each) => each.text || each.type) },
  { title: "Times", number: true, cell: textCell((each) => count(each.count)) },
  { title: "Route", cell: textCell((each) => each.route || "(unknown)") },
  { title: "Tenant", class: "long", cell: textCell((each) => each.tenant || "–") },
  { title: "Last request", class: "id", cell: textCell((each) => each.request_id ?? "–") },
], "No errors since the start.");

/** Shows the tables of a sample. A key that may not see other tenants gets none of them. */
export function showTables(sample) {
  replicas.show(sample.replicas, (each) => each.number);
  for (const id of ["tenants", "errors"]) byId(id).hidden = !sample.tenants;
  if (!sample.tenants) return;
  const all = sample.tenants.reduce((total, each) => total + each.running, 0);
  tenants.show(sample.tenants.map((each) => ({ ...each, all_running: all })), (each) => each.name);
  errors.show(sample.errors, (each) => JSON.stringify([each.route, each.status, each.type, each.tenant]));
}
