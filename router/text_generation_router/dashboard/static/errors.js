// The errors that clients received, by error and route: faults of the server first, with a filter.

import { byId } from "./dom.js";
import { ago, count } from "./format.js";
import { KeyedTable, badgeCell, textCell, twoLineCell } from "./tables.js";

const NAMES = 3;
let errors = [];

function tenants({ tenants: names }) {
  const shown = names.slice(0, NAMES).map((name) => name || "(no name)").join(", ");
  return names.length > NAMES ? `${count(names.length)}: ${shown}, …` : shown;
}

const table = new KeyedTable("errors-table", "Errors by route and type", [
  { title: "Status", cell: badgeCell((each) => [String(each.status), each.fault ? "fault" : "refusal"]), sort: (each) => each.status },
  { title: "Error", class: "long", cell: twoLineCell((each) => [each.text || each.type, `${each.type} · ${each.route || "unknown route"}`]) },
  { title: "Times", number: true, cell: textCell((each) => count(each.count)), sort: (each) => each.count },
  { title: "Tenants", class: "long", cell: textCell(tenants), sort: (each) => each.tenants.length },
  { title: "Last", number: true, cell: textCell((each) => ago(each.age)), sort: (each) => -each.age },
  { title: "Last request", class: "id", cell: textCell((each) => each.request_id ?? "–") },
], "No errors.");

function show() {
  const wanted = byId("errors-find").value.trim().toLowerCase();
  const kind = byId("errors-kind").value;
  const found = errors.filter((each) => {
    if (kind && kind !== (each.fault ? "faults" : "refusals")) return false;
    return [each.status, each.type, each.route, each.text, each.request_id, ...each.tenants].join("\n").toLowerCase().includes(wanted);
  });
  table.show(found, (each) => `${each.status} ${each.type} ${each.route} ${each.route && each.text.replace(/\d+/g, "")}`);
}

byId("errors-find").addEventListener("input", show);
byId("errors-kind").addEventListener("change", show);

/** Shows the errors of a sample; a key that may not see them gets none. */
export function showErrors(sample) {
  byId("errors").hidden = !sample.errors;
  errors = sample.errors ?? [];
  show();
}
