/** How questions and answers are shown: text, thinking, progress, figures, and the buttons below them. */

import { button, byId, copyButton, counted, duration, element, short, whole } from "./common.js";
import { markdown } from "./markdown.js";

const DRAW_MS = 80; // between two drawings of an answer that grows
const END_PX = 60; // so near to its end, the conversation is scrolled as it grows

export const UNFINISHED = "interrupted"; // the note of an answer that has not ended, in case that the page is left

const THINKING = /^\s*<think>([^]*?)(?:<\/think>|$)/;
const THINKING_END = /^([^]*?)<\/think>/; // templates can begin the thinking themselves

/** [thinking, answer] of a message. Servers give the thinking apart from the answer, or within it. */
function parts({ content, reasoning }) {
  const found = THINKING.exec(content) ?? THINKING_END.exec(content);
  if (found === null) return [reasoning ?? "", content];
  return [(reasoning ?? "") + found[1].trim(), content.slice(found[0].length)];
}

function showTurn(className, speaker) {
  const turn = element("li", `turn ${className}`);
  turn.append(element("h3", "visually-hidden", speaker));
  byId("turns").append(turn);
  return turn;
}

export function scrollToEnd() {
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

/** actions: of {label, run}. */
export function showQuestion(message, actions) {
  const turn = showTurn("question", "You");
  turn.append(element("p", "text", message.content), actionRow(actions));
}

function actionRow(actions, ...others) {
  const row = element("div", "actions");
  row.append(...others, ...actions.map(({ label, run }) => button(label, "quiet", run)));
  return row;
}

/** An answer, complete or while it comes. What it shows is in `message`, so that it can be kept. */
export class AnswerView {
  message;
  #actionsOf;
  #turn = showTurn("answer", "Model");
  #thinking = element("details", "thinking");
  #thought = element("div", "markdown muted");
  #text = element("div", "text markdown");
  #progress = null; // while the prompt is read
  #figures = element("p", "figures muted");
  #footer = null;
  #drawTimer = 0;
  #tickTimer = 0;
  #startMs = 0;
  #firstMs = 0;
  #lastMs = 0;
  #usage;

  /** actionsOf: returns what can be done with the answer when it is complete, as in `showQuestion`. */
  constructor(message, actionsOf) {
    this.message = message;
    this.#actionsOf = actionsOf;
    this.#thinking.append(element("summary", "muted", "Thinking"), this.#thought);
    this.#turn.append(this.#thinking, this.#text, this.#figures);
    this.#draw();
    this.#showFooter(); // which goes when it starts
  }

  /** The answer begins. promptTokens: about how long the prompt is, 0 if that is not known. */
  start(promptTokens) {
    this.#footer.remove();
    this.#draw();
    this.message.note = UNFINISHED;
    this.#startMs = performance.now();
    this.#progress = new Progress(promptTokens);
    this.#text.after(this.#progress.box);
    this.#figures.textContent = "";
    this.#tickTimer = setInterval(() => this.#tick(), 100);
    scrollToEnd();
  }

  append(content, reasoning) {
    if (!content && !reasoning) return;
    this.#lastMs = performance.now();
    if (!this.#firstMs) {
      this.#firstMs = this.#lastMs;
      this.#progress.box.remove();
      this.#turn.classList.add("growing");
    }
    this.message.content += content;
    if (reasoning) this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
    this.#drawTimer ||= setTimeout(() => this.#draw(), DRAW_MS);
  }

  /** progress: what the server says about the prompt, {total, cache, processed, time_ms}. */
  showProgress(progress) {
    this.#progress.show(progress);
  }

  setUsage(usage) {
    this.#usage = usage;
  }

  /** note: how the answer ended, if there is something to say about it. */
  end(note) {
    clearInterval(this.#tickTimer);
    this.#progress.box.remove();
    this.#turn.classList.remove("growing");
    const { message } = this, cached = this.#usage?.prompt_tokens_details?.cached_tokens ?? 0;
    message.note = note;
    message.figures = [...this.#measured(), note].filter(Boolean).join(" · ");
    if (this.#firstMs) message.firstMs = this.#firstMs - this.#startMs;
    message.wasCached = this.#usage ? cached > this.#usage.prompt_tokens / 2 : undefined;
    this.#draw();
    this.#showFooter();
  }

  #draw() {
    clearTimeout(this.#drawTimer);
    this.#drawTimer = 0;
    const scroller = byId("messages");
    const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < END_PX;
    const [thinking, answer] = parts(this.message);
    this.#thinking.hidden = !thinking.trim();
    this.#thinking.firstElementChild.textContent = answer || !this.#turn.classList.contains("growing")
      ? `Thought for ${counted(thinking.split(/\s+/).length, "word")}` : "Thinking …";
    this.#thought.replaceChildren(markdown(thinking));
    this.#text.replaceChildren(markdown(answer));
    if (isAtEnd) scrollToEnd();
  }

  #showFooter() {
    const [, answer] = parts(this.message);
    if (!this.message.content && !this.message.reasoning) {
      this.#text.append(element("em", "muted", "(no text)"));
    }
    this.#figures.textContent = this.message.figures ?? "";
    this.#footer = actionRow(this.#actionsOf(), copyButton(() => answer.trim()));
    this.#turn.append(this.#footer);
    scrollToEndIfLast(this.#turn);
  }

  #tick() {
    if (!this.#firstMs) this.#progress.tick(performance.now() - this.#startMs);
    else this.#figures.textContent = this.#firstToken();
  }

  #firstToken() {
    return `first token after ${duration(this.#firstMs - this.#startMs)}`;
  }

  #measured() {
    const figures = this.#firstMs ? [this.#firstToken()] : [];
    if (!this.#usage) return figures;
    const { prompt_tokens: asked, completion_tokens: answered, prompt_tokens_details: details } = this.#usage;
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    const rate = answered > 1 && seconds > 0 ? ` at ${short((answered - 1) / seconds)} tok/s` : "";
    const read = `${counted(asked, "prompt token")}, ${whole(details?.cached_tokens ?? 0)} of them cached`;
    return [read, ...figures, `${counted(answered, "token")}${rate}`];
  }
}

function scrollToEndIfLast(turn) {
  if (turn === byId("turns").lastElementChild) scrollToEnd();
}

/** How far the prompt has been read: a bar and words. Without figures of the server the bar only moves. */
class Progress {
  box = element("div", "reading");
  #bar = element("div", "meter");
  #words = element("p", "muted small");
  #promptTokens;
  #isMeasured = false;

  constructor(promptTokens) {
    this.#promptTokens = promptTokens;
    this.#bar.setAttribute("role", "progressbar");
    this.#bar.setAttribute("aria-label", "Reading the prompt");
    this.#bar.classList.add("unknown");
    this.#bar.append(element("span", ""));
    this.box.append(this.#bar, this.#words);
  }

  /** `processed` includes `cache`, the tokens that were found in the cache. */
  show({ total, cache, processed, time_ms: ms }) {
    const share = total ? processed / total : 0, done = processed - cache;
    this.#isMeasured = true;
    this.#bar.classList.remove("unknown");
    this.#bar.firstElementChild.style.width = `${share * 100}%`;
    this.#bar.setAttribute("aria-valuenow", String(Math.round(share * 100)));
    const left = done > 0 && processed < total ? `, ${duration(ms * (total - processed) / done)} left` : "";
    this.#words.textContent = `Reading: ${whole(processed)} of ${counted(total, "token")}${left}`;
    this.#bar.setAttribute("aria-valuetext", this.#words.textContent);
  }

  tick(elapsedMs) {
    if (this.#isMeasured) return;
    const what = this.#promptTokens ? `Reading about ${counted(this.#promptTokens, "token")}` : "Reading";
    this.#words.textContent = `${what} … ${duration(elapsedMs)}`;
  }
}
