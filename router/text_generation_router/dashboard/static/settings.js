// The settings of the router, with a search.

import { byId } from "./dom.js";
import { KeyedTable, textCell } from "./tables.js";

const table = new KeyedTable("settings-table", "Settings", [
  { title: "Setting", class: "code", cell: textCell((each) => `--${each.name.replaceAll("_", "-")}`) },
  { title: "Value", class: "code long", cell: textCell((each) => valueText(each.value)) },
  { title: "Source", cell: textCell((each) => (each.default ? "default" : "set")) },
], "No setting matches.");
let settings = [];

function valueText(value) {
  if (value === null || value === "" || (typeof value === "object" && !Object.keys(value).length)) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function show() {
  const wanted = byId("find").value.trim().toLowerCase().replaceAll("-", "_");
  const found = settings.filter((each) => each.name.includes(wanted) && !(byId("changed").checked && each.default));
  table.show(found, (each) => each.name);
}

byId("find").addEventListener("input", show);
byId("changed").addEventListener("change", show);

/** Shows the settings; a key that may not see them gets none. */
export function showSettings(given) {
  byId("settings").hidden = !given;
  settings = given ?? [];
  show();
}
