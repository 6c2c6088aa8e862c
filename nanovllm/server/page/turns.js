/** The conversation as it is shown: a list of turns, each a question or an answer with its figures. */

import { counted, duration, short, whole } from "./numbers.js";
import { byId, element } from "./page_elements.js";

const FINISH_REASONS = {
  length: "cut off at the longest answer",
  abort: "ended by the server",
  error: "ended by an error",
};

const list = byId("turns");
const scroller = byId("messages");

/** @param {string} content */
export function showQuestion(content) {
  byId("welcome").hidden = true;
  const turn = element("li", "turn question");
  turn.append(element("h3", "visually-hidden", "You"), element("p", "text", content));
  list.append(turn);
  scroller.scrollTop = scroller.scrollHeight;
  return turn;
}

export function clearTurns() {
  list.replaceChildren();
  byId("welcome").hidden = false;
}

/** An answer while it comes. */
export class AnswerView {
  #text = element("p", "text");
  #figures = element("p", "figures muted");
  #turn = element("li", "turn answer waiting");
  #startMs = performance.now();
  #firstMs = 0;
  #lastMs = 0;
  #timer = setInterval(() => this.#tick(), 100);

  constructor() {
    this.content = "";
    /** @type {import("./completion.js").Usage | undefined} */
    this.usage = undefined;
    this.#turn.append(element("h3", "visually-hidden", "Model"), this.#text, this.#figures);
    list.append(this.#turn);
    scroller.scrollTop = scroller.scrollHeight;
  }

  /** @param {string} text */
  append(text) {
    if (!text) return;
    const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    this.#lastMs = performance.now();
    if (!this.#firstMs) {
      this.#firstMs = this.#lastMs;
      this.#turn.classList.remove("waiting");
    }
    this.content += text;
    this.#text.append(text); // as a text node
    if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
  }

  /** @param {string} note how the answer ended, if there is something to say about it */
  end(note) {
    clearInterval(this.#timer);
    this.#turn.classList.remove("waiting");
    const figures = [...this.#measured(), note].filter(Boolean);
    this.#figures.textContent = figures.join(" · ");
    if (!this.content) this.#text.append(element("em", "muted", "(no text)"));
  }

  /** Take it away, together with the question that it was to answer. */
  removeWith(/** @type {HTMLElement} */ question) {
    clearInterval(this.#timer);
    this.#turn.remove();
    question.remove();
    byId("welcome").hidden = list.children.length > 0;
  }

  #tick() {
    if (this.#firstMs) this.#figures.textContent = this.#firstToken();
    else this.#figures.textContent = `reading … ${((performance.now() - this.#startMs) / 1000).toFixed(1)} s`;
  }

  #firstToken() {
    return `first token after ${duration(this.#firstMs - this.#startMs)}`;
  }

  #measured() {
    const figures = this.#firstMs ? [this.#firstToken()] : [];
    if (!this.usage) return figures;
    const { prompt_tokens: asked, completion_tokens: answered, prompt_tokens_details: details } = this.usage;
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    const rate = answered > 1 && seconds > 0 ? ` at ${short((answered - 1) / seconds)} tok/s` : "";
    const cached = details?.cached_tokens ?? 0;
    return [`${counted(asked, "prompt token")}, ${whole(cached)} of them cached`, ...figures,
      `${counted(answered, "token")}${rate}`];
  }
}

/** @param {string | undefined} reason as the API gives it */
export function finishNote(reason) {
  return FINISH_REASONS[/** @type {keyof typeof FINISH_REASONS} */ (reason)] ?? "";
}
