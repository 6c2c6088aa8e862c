/** What the user chooses for the next answers. */

import { byId } from "./page_elements.js";

export function setUpSettings() {
  const button = byId("settings-button");
  button.addEventListener("click", () => {
    const form = byId("settings");
    form.hidden = !form.hidden;
    button.setAttribute("aria-expanded", String(!form.hidden));
    if (!form.hidden) byId("temperature").focus();
  });
  byId("settings").addEventListener("submit", (/** @type {Event} */ event) => event.preventDefault());
}

/**
 * Throws an Error whose message names the first field that is not valid.
 * @returns {{ temperature: number | null, maxTokens: number, format: "chat" | "text" }}
 */
export function readSettings() {
  const temperature = byId("temperature"), maxTokens = byId("max-tokens");
  if (!temperature.validity.valid) throw new Error("The temperature must be a number from 0 to 2.");
  if (!maxTokens.validity.valid || !maxTokens.value) {
    throw new Error("The longest answer must be a whole number of tokens, at least 1.");
  }
  return {
    temperature: temperature.value ? Number(temperature.value) : null,
    maxTokens: Number(maxTokens.value),
    format: byId("format").value,
  };
}

/** The model has no chat template. */
export function usePlainText() {
  byId("format").value = "text";
}
