/** The page: a chat with one question at a time, its answer streamed, the document in front of everything. */

import { CacheView } from "./cache.js";
import { ServerError, UNREACHABLE, byId, counted, element, request, sentence, short, whole } from "./common.js";

const LONG_PASTE_CHARS = 4000; // a longer text becomes the document instead of a message
const END_PX = 60; // so near to its end, the conversation is scrolled as it grows
const FINISH_NOTES = {
  length: "cut off at the longest answer",
  abort: "ended by the server",
  error: "ended by an error",
};

/** What has been said, and the document in front of it: {name, text} or null. */
class Conversation {
  messages = []; // of {role, content}

  constructor(document) {
    this.document = document;
  }

  /**
   * The part of a request's body that makes the prompt. The document comes first of all, so that every later question,
   * in this conversation or a new one, begins with tokens that the server has in its cache.
   */
  prompt(isChat) {
    const [first, ...others] = this.messages;
    if (isChat) return { messages: [{ ...first, content: this.#preamble() + first.content }, ...others] };
    const pieces = this.messages.map(({ role, content }, i) => (role === "user" && i > 0 ? "\n" : "") + content);
    return { prompt: this.#preamble() + pieces.join("") };
  }

  #preamble() {
    if (this.document === null) return "";
    return `Document "${this.document.name}":\n\n${this.document.text}\n\nEnd of the document.\n\n`;
  }
}

let conversation = new Conversation(null);
let running = null; // the AbortController of the answer that is coming
let maxRequestTokens = 0; // of prompt and answer together; 0: not known yet
const cache = new CacheView(() => running !== null, showModel);

/** Ask for the model's name and limit, at first and whenever the server is back. It may serve another model then. */
async function showModel() {
  try {
    const [model] = (await (await request("v1/models")).json()).data;
    maxRequestTokens = model.max_request_tokens;
    byId("model").textContent = model.id;
    document.title = `${model.id} · nanovllm`;
    if (byId("alert").textContent === UNREACHABLE) showAlert("");
  } catch (error) {
    showAlert(error.message);
  }
}

// -- a question and its answer

async function ask(text) {
  if (running !== null) return restoreQuestion(text);
  const asked = conversation; // a new chat may follow before the answer has ended
  const own = running = new AbortController();
  asked.messages.push({ role: "user", content: text });
  const question = showQuestion(text), answer = new AnswerView();
  showAnswering(true);
  showAlert("");
  announce("The model is answering.");
  try {
    const reason = await stream(asked, answer, own.signal);
    answer.end(FINISH_NOTES[reason] ?? "");
    announce(`The answer is complete. ${counted(answer.usage?.completion_tokens ?? 0, "token")}.`);
  } catch (error) {
    const wasStopped = own.signal.aborted;
    if (!wasStopped) showAlert(error.message);
    answer.end(wasStopped ? "stopped" : "ended by an error");
    announce(wasStopped ? "The answer was stopped." : "");
    if (!answer.content && !wasStopped) {
      answer.remove();
      question.remove();
      byId("welcome").hidden = byId("turns").children.length > 0;
      restoreQuestion(text);
    }
  } finally {
    if (answer.content) asked.messages.push({ role: "assistant", content: answer.content });
    else asked.messages.pop(); // the question, which got no answer
    if (running === own) {
      running = null;
      showAnswering(false);
    }
  }
}

/** Show the answer as it comes, and return the finish reason. */
async function stream(asked, answer, signal) {
  const { temperature, maxTokens, isChat } = readSettings();
  const body = { ...asked.prompt(isChat), max_tokens: maxTokens, stream: true };
  body.stream_options = { include_usage: true };
  if (temperature !== null) body.temperature = temperature;
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  let reason;
  try {
    for await (const data of events(await requestThatFits(path, body, signal))) {
      if (data === "[DONE]") return reason;
      const { error, choices: [choice] = [], usage } = JSON.parse(data);
      if (error) throw new ServerError(sentence(error.message ?? "the server has ended the answer"));
      answer.append(choice?.delta?.content ?? choice?.text ?? "");
      reason = choice?.finish_reason ?? reason;
      answer.usage = usage ?? answer.usage;
    }
  } catch (error) {
    if (!isChat || error.status !== 400 || !/chat template/.test(error.message)) throw error;
    byId("format").value = "text"; // the model has no chat template
    return stream(asked, answer, signal);
  }
  throw new ServerError("The connection ended before the answer did.");
}

/** The longest answer is a limit: where the context has less room, the answer gets what there is. */
async function requestThatFits(path, body, signal) {
  try {
    return await request(path, { body, signal });
  } catch (error) {
    const [, promptTokens] = /^Prompt of (\d+) tokens \+ max_tokens=/.exec(error.message) ?? [];
    const room = maxRequestTokens - Number(promptTokens);
    if (!(room > 0)) throw error;
    return request(path, { body: { ...body, max_tokens: room }, signal });
  }
}

/** The data of each server-sent event. An event ends with an empty line; lines that are not data are skipped. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const complete = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = complete.pop();
      for (const event of complete) {
        const data = event.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

// -- the conversation as it is shown: a list of turns, each a question or an answer with its figures

function showTurn(turn, ...parts) {
  turn.append(...parts);
  byId("turns").append(turn);
  byId("messages").scrollTop = byId("messages").scrollHeight;
  return turn;
}

function showQuestion(content) {
  byId("welcome").hidden = true;
  const heading = element("h3", "visually-hidden", "You");
  return showTurn(element("li", "turn question"), heading, element("p", "text", content));
}

/** An answer while it comes. */
class AnswerView {
  content = "";
  usage = undefined;
  #text = element("p", "text");
  #figures = element("p", "figures muted");
  #turn = showTurn(
    element("li", "turn answer waiting"), element("h3", "visually-hidden", "Model"), this.#text, this.#figures);
  #startMs = performance.now();
  #firstMs = 0;
  #lastMs = 0;
  #timer = setInterval(() => this.#tick(), 100);

  append(text) {
    if (!text) return;
    const scroller = byId("messages");
    const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < END_PX;
    this.#lastMs = performance.now();
    this.#firstMs ||= this.#lastMs;
    this.#turn.classList.remove("waiting");
    this.content += text;
    this.#text.append(text); // as a text node
    if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
  }

  /** note: how the answer ended, if there is something to say about it */
  end(note) {
    clearInterval(this.#timer);
    this.#turn.classList.remove("waiting");
    this.#figures.textContent = [...this.#measured(), note].filter(Boolean).join(" · ");
    if (!this.content) this.#text.append(element("em", "muted", "(no text)"));
  }

  remove() {
    this.#turn.remove();
  }

  #tick() {
    const seconds = (performance.now() - this.#startMs) / 1000;
    this.#figures.textContent = this.#firstMs ? this.#firstToken() : `reading … ${seconds.toFixed(1)} s`;
  }

  #firstToken() {
    const ms = this.#firstMs - this.#startMs;
    return `first token after ${ms < 1000 ? `${whole(ms)} ms` : `${short(ms / 1000)} s`}`;
  }

  #measured() {
    const figures = this.#firstMs ? [this.#firstToken()] : [];
    if (!this.usage) return figures;
    const { prompt_tokens: asked, completion_tokens: answered, prompt_tokens_details: details } = this.usage;
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    const rate = answered > 1 && seconds > 0 ? ` at ${short((answered - 1) / seconds)} tok/s` : "";
    const read = `${counted(asked, "prompt token")}, ${whole(details?.cached_tokens ?? 0)} of them cached`;
    return [read, ...figures, `${counted(answered, "token")}${rate}`];
  }
}

// -- where the user types

const field = byId("question");

function setQuestion(text) {
  field.value = text;
  grow();
}

/** Give back a question that got no answer, unless the user has begun another one. */
function restoreQuestion(text) {
  if (!field.value) setQuestion(text);
}

function grow() {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`; // its borders
}

function showAnswering(isAnswering) {
  const hadFocus = document.activeElement === byId("send") || document.activeElement === byId("stop");
  byId("send").hidden = isAnswering;
  byId("stop").hidden = !isAnswering;
  if (hadFocus) field.focus(); // the focus must not go down with a button
}

/** message: "" for none. */
function showAlert(message) {
  byId("alert").textContent = message;
  byId("alert").hidden = !message;
}

/** Tell users of a screen reader. */
function announce(message) {
  byId("announcement").textContent = message;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = field.value.trim();
  if (!text || byId("send").hidden) return;
  setQuestion("");
  ask(text);
  cache.refresh(); // the next snapshot would come a second later
});
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // isComposing: Enter picks a character
  event.preventDefault();
  byId("composer").requestSubmit();
});
field.addEventListener("input", grow);
byId("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) running?.abort();
});
byId("new-chat").addEventListener("click", () => {
  running?.abort();
  conversation = new Conversation(conversation.document);
  byId("turns").replaceChildren();
  byId("welcome").hidden = false;
  showAlert("");
  field.focus();
});

// -- the document: dropped, chosen or pasted. Only UTF-8 text is taken

/** document: null to take it away. */
function attach(document) {
  conversation.document = document;
  byId("document").hidden = document === null;
  byId("document-name").textContent = document?.name ?? "";
  byId("document-size").textContent = counted(document?.text.length ?? 0, "character");
  showAlert("");
  announce(document === null ? "The document was removed." : `${document.name} was added.`);
}

async function takeFile(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.trim()) attach({ name: file.name, text });
    else showAlert(`${file.name} is empty.`);
  } catch (error) {
    const isBinary = error instanceof TypeError;
    showAlert(`${file.name} ${isBinary ? "is not UTF-8 text. Save it as plain text first." : "cannot be read."}`);
  }
}

const chooser = byId("file");
byId("attach").addEventListener("click", () => chooser.click());
chooser.addEventListener("change", () => {
  if (chooser.files.length) takeFile(chooser.files[0]);
  chooser.value = ""; // so that the same file can be chosen again
});
byId("remove-document").addEventListener("click", () => {
  attach(null);
  byId("attach").focus();
});
field.addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  const text = event.clipboardData.getData("text/plain");
  if (!file && text.length <= LONG_PASTE_CHARS) return;
  event.preventDefault();
  if (file) takeFile(file);
  else attach({ name: "pasted text", text });
});

const hasFile = (event) => event.dataTransfer?.types.includes("Files") ?? false;
document.addEventListener("dragover", (event) => {
  if (!hasFile(event)) return;
  event.preventDefault(); // otherwise the browser opens the file
  byId("drop-hint").hidden = false;
});
document.addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) byId("drop-hint").hidden = true; // it has left the window
});
document.addEventListener("drop", (event) => {
  byId("drop-hint").hidden = true;
  if (!hasFile(event)) return;
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (file) takeFile(file);
});

// -- settings: what the user chooses for the next answers

byId("settings-button").addEventListener("click", () => {
  const form = byId("settings");
  form.hidden = !form.hidden;
  byId("settings-button").setAttribute("aria-expanded", String(!form.hidden));
  if (!form.hidden) byId("temperature").focus();
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());

/** Throws an Error whose message names the first field that is not valid. */
function readSettings() {
  const temperature = byId("temperature"), maxTokens = byId("max-tokens");
  if (!temperature.validity.valid) throw new Error("The temperature must be a number from 0 to 2.");
  if (!maxTokens.validity.valid || !maxTokens.value) {
    throw new Error("The longest answer must be a whole number of tokens, at least 1.");
  }
  return {
    temperature: temperature.value ? Number(temperature.value) : null,
    maxTokens: Number(maxTokens.value),
    isChat: byId("format").value === "chat",
  };
}

byId("cache").open = !matchMedia("(max-width: 56rem)").matches; // on a phone only its summary is shown at first
await showModel();
cache.refresh();
