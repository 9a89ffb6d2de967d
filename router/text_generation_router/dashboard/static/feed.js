// The stream of events of the server: connects again when it ends or is silent, and pauses while nobody looks.

import { askForKey, keyHeaders, lacksKey } from "./key.js";
import { events, serverUrl } from "./sse.js";

const HIDDEN_MS = 60_000;
const SILENT_MS = 5_000; // there is a sample every second
const LONGEST_WAIT_S = 4;

/** Follows the events. `on` has a function for each event, and `status(state, text)`. */
export function follow(on) {
  let stopped = null;
  let hiddenTimer = 0;
  let paused = false;

  async function read(signal, onEvent) {
    const silent = new AbortController();
    let timer = 0;
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
    };
    try {
      wait();
      const response = await fetch(serverUrl("dashboard/events"), { headers: keyHeaders(), signal: AbortSignal.any([signal, silent.signal]), cache: "no-store" });
      if (response.status === 401) return true;
      if (!response.ok) throw new Error(`status ${response.status}`);
      for await (const { name, data } of events(response)) {
        wait();
        if (!signal.aborted) onEvent(name, data);
      }
      return false;
    } finally {
      clearTimeout(timer);
      silent.abort();
    }
  }

  async function run(signal) {
    let wait = 1;
    while (!signal.aborted) {
      try {
        if (lacksKey()) {
          on.status("waiting", "Key needed");
          await askForKey();
        }
        const refused = await read(signal, (name, data) => {
          wait = 1;
          on.status("live", "Live");
          on[name]?.(JSON.parse(data));
        });
        if (refused) {
          on.status("waiting", "Key needed");
          await askForKey();
          continue;
        }
      } catch (error) {
        if (signal.aborted) return;
      }
      for (let left = wait; left > 0 && !signal.aborted; left -= 1) {
        on.status("lost", `Lost, again in ${left} s`);
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
      wait = Math.min(LONGEST_WAIT_S, wait * 2);
    }
  }

  const start = () => {
    if (stopped || paused) return;
    stopped = new AbortController();
    run(stopped.signal);
  };
  const stop = (text) => {
    stopped?.abort();
    stopped = null;
    on.status("paused", text);
  };
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenTimer);
    if (document.hidden) hiddenTimer = setTimeout(() => stop("Paused"), HIDDEN_MS);
    else start();
  });
  on.status("waiting", "Connecting");
  start();
  return (value) => {
    paused = value;
    if (paused) stop("Paused");
    else start();
  };
}
