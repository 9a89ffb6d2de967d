// The tokens of an answer: each is an option that shows its probability and its alternatives.

import { byId, make, setText } from "./dom.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1];
let answers = 0;

const shares = new Intl.NumberFormat("en", { style: "percent", maximumSignificantDigits: 3 });
const probability = (logprob) => Math.exp(logprob);

/** A token with its blanks and control characters made visible, as Unicode's pictures of them. */
const visible = (token) => token.replace(/[\x00-\x20]/g, (blank) => (blank === " " ? "␣" : String.fromCharCode(0x2400 + blank.charCodeAt(0)))) || "(empty)";

/** A text that grows by the chunks of a stream. With log-probabilities its tokens can be chosen. */
export class AnswerTokens {
  constructor() {
    answers += 1;
    this.name = `answer-${answers}`;
    this.options = [];
    this.at = -1;
    this.waiting = [];
    this.element = make("div", { class: "tokens" });
    this.element.addEventListener("click", ({ target }) => this.#choose(this.options.findIndex(({ element }) => element === target)));
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Adds a chunk: its text, and the log-probabilities of its tokens, if there are any. */
  add(text, logprobs) {
    this.waiting.push(...(logprobs ?? []));
    if (!text) return; // tokens that end within a character
    const known = this.waiting.filter(({ logprob }) => logprob != null);
    if (!known.length) {
      this.element.append(text);
      return;
    }
    if (!this.options.length) this.#becomeList();
    const least = probability(Math.min(...known.map(({ logprob }) => logprob)));
    const level = LEVELS.findIndex((bound) => least >= bound);
    const element = make("span", { role: "option", id: `${this.name}-${this.options.length}`, "aria-selected": "false", "aria-label": visible(text), class: `p${level < 0 ? LEVELS.length : level}` }, text);
    this.options.push({ element, tokens: this.waiting });
    this.element.append(element);
    this.waiting = [];
  }

  #becomeList() {
    this.element.setAttribute("role", "listbox");
    this.element.setAttribute("aria-label", "Tokens of the answer: arrow keys show their probabilities");
    this.element.setAttribute("aria-orientation", "horizontal");
    this.element.tabIndex = 0;
  }

  #onKey(event) {
    const to = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: this.options.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.#choose(Math.min(this.options.length - 1, Math.max(0, to)));
  }

  #choose(at) {
    if (at < 0) return;
    this.options[this.at]?.element.setAttribute("aria-selected", "false");
    this.at = at;
    const { element, tokens } = this.options[at];
    element.setAttribute("aria-selected", "true");
    this.element.setAttribute("aria-activedescendant", element.id);
    showTokens(tokens);
  }
}

/** Shows the probabilities of tokens, with their alternatives. */
function showTokens(tokens) {
  const tables = tokens.map(({ token, logprob, top_logprobs: tops }) => {
    const rows = [{ token, logprob }, ...(tops ?? []).filter((top) => top.token !== token)].map((each, i) =>
      make(
        "tr",
        { class: i ? false : "chosen" },
        make("th", { scope: "row", class: "code" }, visible(each.token)),
        make("td", { class: "number" }, each.logprob === null ? "–" : shares.format(probability(each.logprob))),
        make("td", { class: "number" }, each.logprob === null ? "–" : each.logprob.toFixed(3)),
      ),
    );
    const head = ["Token", "Probability", "Log"].map((title) => make("th", { scope: "col" }, title));
    return make("table", {}, make("caption", { class: "hidden" }, "The token and its alternatives"), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  });
  byId("token").replaceChildren(...tables);
  byId("token").hidden = false;
}

/** Hides the token that is shown. */
export function hideToken() {
  byId("token").hidden = true;
  setText(byId("token"), "");
}
