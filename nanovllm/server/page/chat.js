/** The chat: one question at a time, its answer streamed, and the document in front of everything. */

import { ServerError } from "./api.js";
import { showDocument } from "./attach.js";
import { complete } from "./completion.js";
import { announce, restoreQuestion, showAlert, showAnswering } from "./composer.js";
import { Conversation } from "./conversation.js";
import { counted } from "./numbers.js";
import { readSettings, usePlainText } from "./settings.js";
import { AnswerView, clearTurns, finishNote, showQuestion } from "./turns.js";

export class Chat {
  #conversation = new Conversation();
  /** @type {AbortController | null} of the answer that is coming */
  #running = null;

  /** @param {() => number} maxRequestTokens as of now */
  constructor(maxRequestTokens) {
    this.maxRequestTokens = maxRequestTokens;
  }

  get isAnswering() {
    return this.#running !== null;
  }

  /** @param {import("./conversation.js").TextDocument | null} document */
  attach(document) {
    this.#conversation.document = document;
    showDocument(document);
    showAlert("");
    announce(document === null ? "The document was removed." : `${document.name} was added.`);
  }

  /** Begin a new conversation about the same document. */
  clear() {
    this.stop();
    this.#conversation = Object.assign(new Conversation(), { document: this.#conversation.document });
    clearTurns();
    showAlert("");
  }

  stop() {
    this.#running?.abort();
  }

  /** @param {string} text */
  async send(text) {
    if (this.isAnswering) return restoreQuestion(text);
    const conversation = this.#conversation; // `clear` may put another in its place before the answer has ended
    const running = new AbortController();
    this.#running = running;
    conversation.ask(text);
    const question = showQuestion(text), answer = new AnswerView();
    showAnswering(true);
    showAlert("");
    announce("The model is answering.");
    try {
      const reason = await this.#stream(conversation, answer, running.signal);
      answer.end(finishNote(reason));
      announce(`The answer is complete. ${counted(answer.usage?.completion_tokens ?? 0, "token")}.`);
    } catch (error) {
      const wasStopped = running.signal.aborted;
      if (!wasStopped) showAlert(error instanceof Error ? error.message : String(error));
      answer.end(wasStopped ? "stopped" : "ended by an error");
      announce(wasStopped ? "The answer was stopped." : "");
      if (!answer.content && !wasStopped) {
        answer.removeWith(question);
        restoreQuestion(text);
      }
    } finally {
      if (answer.content) conversation.answer(answer.content);
      else conversation.unask();
      if (this.#running === running) {
        this.#running = null;
        showAnswering(false);
      }
    }
  }

  /**
   * @param {Conversation} conversation
   * @param {AnswerView} answer
   * @param {AbortSignal} signal
   * @returns {Promise<string | undefined>} the finish reason
   */
  async #stream(conversation, answer, signal) {
    const options = { ...readSettings(), maxRequestTokens: this.maxRequestTokens() };
    let reason;
    try {
      for await (const piece of complete(conversation, options, signal)) {
        answer.append(piece.text ?? "");
        reason = piece.finishReason ?? reason;
        answer.usage = piece.usage ?? answer.usage;
      }
    } catch (error) {
      const cannotChat = error instanceof ServerError && error.status === 400 && /chat template/.test(error.message);
      if (!cannotChat || options.format === "text") throw error;
      usePlainText();
      return this.#stream(conversation, answer, signal);
    }
    return reason;
  }
}
