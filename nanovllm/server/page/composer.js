/** Where the user types: a text area that grows, and the keys. */

import { byId } from "./page_elements.js";

const question = byId("question");
const alertLine = byId("alert");

/**
 * @param {{ send: (text: string) => void, stop: () => void }} actions
 */
export function setUpComposer({ send, stop }) {
  byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || byId("send").hidden) return;
    setQuestion("");
    send(text);
  });
  question.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // isComposing: Enter picks a character
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  question.addEventListener("input", grow);
  byId("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("key-dialog").open) stop();
  });
}

/** @param {string} text */
export function setQuestion(text) {
  question.value = text;
  grow();
}

/** Give back a question that got no answer, unless the user has begun another one. */
export function restoreQuestion(/** @type {string} */ text) {
  if (!question.value) setQuestion(text);
}

/** @param {boolean} isAnswering */
export function showAnswering(isAnswering) {
  const hadFocus = document.activeElement === byId("send") || document.activeElement === byId("stop");
  byId("send").hidden = isAnswering;
  byId("stop").hidden = !isAnswering;
  if (hadFocus) question.focus(); // the focus must not go down with a button
}

/** @param {string} message empty: none */
export function showAlert(message) {
  alertLine.textContent = message;
  alertLine.hidden = !message;
}

/** @param {string} message what is no longer true, if it is shown */
export function clearAlert(message) {
  if (alertLine.textContent === message) showAlert("");
}

/** Tell users of a screen reader. */
export function announce(/** @type {string} */ message) {
  byId("announcement").textContent = message;
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`; // its borders
}
