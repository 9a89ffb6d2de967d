// The playground: a chat with the served model, streamed, with log-probabilities and usage.

import { byId, make, setText } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { askForKey, keyHeaders } from "./key.js";
import { events, serverUrl } from "./sse.js";
import { AnswerTokens, hideToken } from "./tokens.js";

const PATH = "v1/chat/completions";
const messages = [];
let about = { model: "tgi", top_logprobs: 5 };
let running = null;

/** Takes the limits of the server. */
export function showLimits(given) {
  about = given;
  byId("max-tokens").max = given.max_total_tokens;
  byId("images-field").hidden = !given.max_images;
  byId("logprobs").disabled = !given.top_logprobs;
  if (!given.top_logprobs) byId("logprobs").checked = false;
}

function bodyOf() {
  const system = byId("system").value.trim();
  const body = {
    model: about.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: Math.min(5, about.top_logprobs) });
  return JSON.stringify(body);
}

function addTurn(role, ...content) {
  byId("chat-empty").hidden = true;
  const turn = make("li", { class: role }, make("span", { class: "role" }, role === "user" ? "You" : "Model"), ...content);
  byId("chat").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return turn;
}

/** Returns a file as a `data:` URI. */
function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** Adds the question of the form to the chat. */
async function addQuestion(question, signal) {
  const files = [...byId("images").files];
  const urls = await Promise.all(files.map(dataUri));
  signal.throwIfAborted();
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  messages.push({ role: "user", content: images.length ? [...images, { type: "text", text: question }] : question });
  const shown = urls.map((src, i) => make("img", { src, alt: files[i].name }));
  addTurn("user", ...shown, make("div", { class: "text", tabindex: "0" }, question));
}

/** Returns the text of an error response. */
async function errorText(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.message ?? String(error);
  } catch {
    return text || `status ${response.status}`;
  }
}

async function post(signal) {
  for (;;) {
    const headers = { "content-type": "application/json", ...keyHeaders() };
    const response = await fetch(serverUrl(PATH), { method: "POST", headers, body: bodyOf(), signal });
    if (response.status !== 401) return response;
    await askForKey();
  }
}

/** Streams one answer into a turn of the chat; returns its text. */
async function answer(signal, times) {
  const tokens = new AnswerTokens();
  const reasoning = make("div", { class: "reasoning" });
  const turn = addTurn("assistant", tokens.element);
  const response = await post(signal);
  if (!response.ok) {
    turn.remove();
    throw new Error(await errorText(response));
  }
  let text = "";
  for await (const { data } of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
    if (chunk.usage) times.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (thought) {
      if (!reasoning.isConnected) turn.insertBefore(make("details", {}, make("summary", {}, "Reasoning"), reasoning), tokens.element);
      reasoning.append(thought);
    }
    if (content || thought) times.first ??= performance.now();
    if (choice.finish_reason) times.reason = choice.finish_reason;
    tokens.add(content ?? "", thought ? null : choice.logprobs?.content);
    text += content ?? "";
    times.chunks += content || thought ? 1 : 0;
  }
  return text;
}

function usageText(times, stopped) {
  const end = performance.now();
  const { usage } = times;
  const parts = [];
  if (stopped) parts.push(`Stopped after ${count(times.chunks)} tokens`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${count(usage.prompt_tokens)} prompt tokens${cached ? `, ${count(cached)} of them cached` : ""}`);
    parts.push(`${count(usage.completion_tokens)} new tokens`);
  }
  if (times.first) {
    parts.push(`first after ${seconds((times.first - times.start) / 1000)}`);
    const took = (end - times.first) / 1000;
    const tokens = usage?.completion_tokens ?? times.chunks;
    if (took > 0 && tokens > 1) parts.push(`${rate((tokens - 1) / took)} tokens a second`);
  }
  if (times.reason) parts.push(`ended: ${times.reason}`);
  return parts.join(" · ");
}

async function send(event) {
  event.preventDefault();
  const question = byId("message").value.trim();
  if (running || !question) return;
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  hideToken();
  setText(byId("usage"), "The model answers…");
  const times = { start: performance.now(), first: null, usage: null, reason: "", chunks: 0 };
  let stopped = false;
  const before = messages.length;
  try {
    await addQuestion(question, running.signal);
    const text = await answer(running.signal, times);
    messages.push({ role: "assistant", content: text });
    byId("message").value = byId("images").value = "";
  } catch (error) {
    stopped = running.signal.aborted;
    messages.length = Math.min(before, messages.length);
    if (!stopped) addTurn("failed", make("div", { class: "text" }, error.message));
  }
  setText(byId("usage"), usageText(times, stopped) || "No answer");
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

function clear() {
  running?.abort();
  messages.length = 0;
  byId("images").value = "";
  byId("chat").replaceChildren();
  byId("chat-empty").hidden = false;
  setText(byId("usage"), "");
  hideToken();
}

byId("ask").addEventListener("submit", send);
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
