/** What has been said, and the document in front of it. Makes the bodies of requests. Knows nothing of the page. */

/**
 * @typedef {{ name: string, text: string }} TextDocument
 * @typedef {{ role: "user" | "assistant", content: string }} Message
 */

export class Conversation {
  constructor() {
    /** @type {Message[]} */
    this.messages = [];
    /** @type {TextDocument | null} */
    this.document = null;
  }

  /** Forget what was said, but keep the document. */
  clear() {
    this.messages = [];
  }

  /** @param {string} content */
  ask(content) {
    this.messages.push({ role: "user", content });
  }

  /** @param {string} content */
  answer(content) {
    this.messages.push({ role: "assistant", content });
  }

  /** Take back the last question, because it got no answer. */
  unask() {
    this.messages.pop();
  }

  /**
   * The messages for a chat template. The document comes first of all, so that every later question, in this
   * conversation or a new one, begins with tokens that the server has in its cache.
   * @returns {Message[]}
   */
  chatMessages() {
    const [first, ...others] = this.messages;
    return [{ ...first, content: this.#preamble() + first.content }, ...others];
  }

  /** The whole conversation as plain text for a model to continue. Each question begins a new line. */
  plainText() {
    const pieces = this.messages.map(({ role, content }, i) => (role === "user" && i > 0 ? "\n" : "") + content);
    return this.#preamble() + pieces.join("");
  }

  #preamble() {
    if (this.document === null) return "";
    return `Document "${this.document.name}":\n\n${this.document.text}\n\nEnd of the document.\n\n`;
  }
}
