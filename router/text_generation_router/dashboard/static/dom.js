// Elements made of text only: nothing that a model, a tenant or an error says becomes markup.

/** Returns the element with this id. */
export const byId = (id) => document.getElementById(id);

/** Returns a new element. Children are elements or texts. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Sets the text of an element, if it changes: a selection in it stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Returns the value of a CSS variable. */
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A horizontal bar beside a text. */
export function meter(kind = "") {
  const fill = make("span", { class: `fill ${kind}` });
  const text = make("span", { class: "amount" });
  const element = make("span", { class: "meter" }, make("span", { class: "track", "aria-hidden": "true" }, fill), text);
  const show = (share, words) => {
    fill.style.width = `${Math.round(1000 * Math.min(1, Math.max(0, share))) / 10}%`;
    setText(text, words);
  };
  return { element, show };
}
