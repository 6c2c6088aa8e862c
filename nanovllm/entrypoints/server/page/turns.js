/** How questions and answers are shown: text, thinking, progress, figures, and the buttons below them. */

import { button, byId, copyButton, counted, duration, element, short, whole } from "./common.js";
import { MarkdownView } from "./markdown.js";

const DRAW_MS = 80; // between two drawings of an answer that grows
const END_PX = 60; // so near to its end, the conversation is scrolled as it grows

const UNFINISHED = "interrupted"; // the note of an answer that has not ended, in case that the page is left

const THINKING_START = /^\s*<think>/;
const THINKING_END = "</think>"; // templates can begin the thinking themselves, so that the start is missing

/** [thinking, answer] of a message. Servers give the thinking apart from the answer, or within it. */
function parts({ content, reasoning = "" }) {
  const [start = ""] = THINKING_START.exec(content) ?? [], end = content.indexOf(THINKING_END);
  if (end < 0 && !start) return [reasoning, content];
  if (end < 0) return [reasoning + content.slice(start.length).trimStart(), ""];
  return [reasoning + content.slice(start.length, end).trimStart(), content.slice(end + THINKING_END.length)];
}

function newTurn(className, speaker) {
  const turn = element("li", `turn ${className}`);
  turn.append(element("h3", "visually-hidden", speaker));
  return turn;
}

export function scrollToEnd() {
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

/** Change what is shown. If the end of the conversation was in view, it still is afterwards. */
export function keepAtEnd(change) {
  const scroller = byId("messages");
  const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < END_PX;
  change();
  if (isAtEnd) scrollToEnd();
}

/** A question, whose text never changes. */
export class QuestionView {
  element = newTurn("question", "You");
  #footer = element("div", "");
  #shown = ""; // of the branches

  constructor(message) {
    const text = element("p", "text", message.content);
    text.dir = "auto";
    this.element.append(text, this.#footer);
  }

  /** actions: of {label, run}. branches: as for branchSwitch. */
  show(actions, branches) {
    const shown = JSON.stringify(branches);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.#footer.replaceWith(this.#footer = actionRow(branches, actions));
  }
}

function actionRow(branches, actions, ...others) {
  const row = element("div", "actions"), made = actions.map(({ label, run }) => button(label, "quiet", run));
  row.append(...(branches ? [branchSwitch(branches)] : []), ...others, ...made);
  return row;
}

/** Such as "‹ 2 of 3 ›". branches: {place, count, step}, or null; step(1) shows the next branch, step(-1) the last. */
function branchSwitch({ place, count, step }) {
  const box = element("span", "branches");
  const [back, on] = [["‹", -1, "Previous version"], ["›", 1, "Next version"]].map(([sign, by, label]) => {
    const made = button(sign, "quiet", () => step(by));
    made.ariaLabel = label;
    made.disabled = place + by < 0 || place + by >= count;
    return made;
  });
  box.append(back, element("span", "muted", `${place + 1} of ${count}`), on);
  return box;
}

/** In one short line how long the answer is and how it ended. All figures, which are in `text`, unfold. */
function showFigures(box, text) {
  const brief = text.split(" · ").filter((part) => !/ prompt tokens?,|^first token /.test(part)).join(" · ");
  if (!brief || brief === text) return box.replaceChildren(text);
  const folded = element("details", "");
  folded.append(element("summary", "", brief), element("p", "", text));
  return box.replaceChildren(folded);
}

/** An answer, complete or while it comes. It can grow while another chat is shown. */
export class AnswerView {
  element = newTurn("answer", "Model");
  #message; // what is shown, so that it can be kept
  #added = { content: "", reasoning: "" }; // not drawn yet
  #view = null; // which shows the end of the content, or null if that is not known
  #tail = ""; // the end of the content, if the thinking may still end, or null
  #thinking = element("details", "thinking");
  #thought = element("div", "markdown muted");
  #text = element("div", "text markdown");
  #thoughtView = new MarkdownView(this.#thought);
  #textView = new MarkdownView(this.#text);
  #nothing = element("em", "muted", "(no text)");
  #progress = null; // while the prompt is read
  #figures = element("div", "figures muted");
  #footer = element("div", "");
  #drawTimer = 0;
  #tickTimer = 0;
  #startMs = 0;
  #firstMs = 0;
  #lastMs = 0;
  #usage;
  #shown = ""; // by `show`

  constructor() {
    this.#thinking.append(element("summary", "muted", "Thinking"), this.#thought);
    this.element.append(this.#thinking, this.#text, this.#nothing, this.#figures, this.#footer);
  }

  /**
   * Show an answer that does not come to this tab now. branches: as for branchSwitch. note: what is said in place of its
   * figures, "" for none.
   */
  show(message, actions, branches, note) {
    const shown = JSON.stringify([message, actions.map(({ label }) => label), branches, note]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.#message = message;
    this.#drawAll();
    this.#nothing.hidden = Boolean(message.content || message.reasoning || note);
    showFigures(this.#figures, note || message.figures || message.note || "");
    const [, answer] = parts(message), row = actionRow(branches, actions, copyButton(() => answer.trim()));
    row.append(this.#figures);
    this.#footer.replaceWith(this.#footer = row);
  }

  /** The answer begins, or goes on. promptTokens: about how long the prompt is, 0 if that is not known. */
  start(message, promptTokens) {
    Object.assign(message, { note: UNFINISHED, figures: "" });
    this.#message = message;
    this.#nothing.hidden = true;
    this.#drawAll();
    this.#startMs = performance.now();
    this.#progress = new Progress(promptTokens);
    this.#text.after(this.#progress.box);
    this.#tickTimer = setInterval(() => this.#tick(), 100);
  }

  append(content, reasoning) {
    if (!content && !reasoning) return;
    this.#lastMs = performance.now();
    if (!this.#firstMs) {
      this.#firstMs = this.#lastMs;
      this.#progress.box.remove();
      this.element.classList.add("growing");
    }
    this.#message.content += content;
    if (reasoning) this.#message.reasoning = (this.#message.reasoning ?? "") + reasoning;
    this.#added.content += content;
    this.#added.reasoning += reasoning;
    this.#drawTimer ||= setTimeout(() => {
      this.#drawTimer = 0;
      if (this.element.isConnected) keepAtEnd(() => this.draw());
    }, DRAW_MS);
  }

  /** progress: what the server says about the prompt, {total, cache, processed, time_ms}. */
  showProgress(progress) {
    this.#progress.show(progress);
  }

  setUsage(usage) {
    this.#usage = usage;
  }

  /** The answer has ended; `show` follows. note: how, if there is something to say about it. */
  end(note) {
    clearInterval(this.#tickTimer);
    clearTimeout(this.#drawTimer);
    this.#progress.box.remove();
    this.element.classList.remove("growing");
    const message = this.#message, cached = this.#usage?.prompt_tokens_details?.cached_tokens ?? 0;
    message.note = note;
    message.figures = [...this.#measured(), note].filter(Boolean).join(" · ");
    if (this.#firstMs) message.firstMs = this.#firstMs - this.#startMs;
    message.wasCached = this.#usage ? cached > this.#usage.prompt_tokens / 2 : undefined;
  }

  /** Draw what has come since the last time, and read nothing else. While another chat is shown, it is not drawn. */
  draw() {
    const { content, reasoning } = this.#added, tail = this.#tail === null ? null : this.#tail + content;
    if (!content && !reasoning) return;
    const isChanged = tail?.includes(THINKING_END) || (content && reasoning);
    const view = isChanged ? null : content ? this.#view : this.#message.content ? null : this.#thoughtView;
    if (view === null || (view === this.#thoughtView && this.#thinking.hidden)) return this.#drawAll();
    view.append(content || reasoning);
    this.#tail = tail?.slice(1 - THINKING_END.length) ?? null;
    this.#added = { content: "", reasoning: "" };
  }

  #drawAll() {
    const { content } = this.#message, [thinking, answer] = parts(this.#message);
    const isEnded = content.includes(THINKING_END), isThinking = !isEnded && THINKING_START.test(content);
    const isKnown = isThinking ? content.replace(THINKING_START, "").trim()
      : isEnded ? answer : !"<think>".startsWith(content.trimStart());
    this.#view = !isKnown ? null : isThinking ? this.#thoughtView : this.#textView;
    this.#tail = isEnded ? null : content.slice(1 - THINKING_END.length);
    this.#added = { content: "", reasoning: "" };
    this.#thinking.hidden = !thinking.trim();
    this.#thinking.firstElementChild.textContent = answer || !this.element.classList.contains("growing")
      ? `Thinking: ${counted(thinking.trim().split(/\s+/).length, "word")}` : "Thinking…";
    this.#thoughtView.show(thinking);
    this.#textView.show(answer);
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
    this.#words.textContent = `${what}… ${duration(elapsedMs)}`;
  }
}
