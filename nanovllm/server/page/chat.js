/** The page: conversations about documents, one question at a time, the answers streamed. */

import { CacheView } from "./cache.js";
import {
  ServerError, UNREACHABLE, announce, button, byId, counted, element, events, newId, request, sentence, short,
  showAlert, whole,
} from "./common.js";
import { Documents } from "./documents.js";
import * as store from "./store.js";
import { AnswerView, UNFINISHED, scrollToEnd, showQuestion } from "./turns.js";

const PLAIN_ANSWER_TOKENS = 1024; // limit of an answer where the server's own is made for short completions
const SAVE_MS = 2000; // between two times that an answer is kept while it grows
const TITLE_CHARS = 60;
const FINISH_NOTES = {
  length: "cut off at the longest answer",
  abort: "ended by the server",
  error: "ended by an error",
};

const server = { maxRequestTokens: 0, hasProgress: false, example: null }; // 0: not known yet
let settings = await store.settings().catch((error) => {
  showAlert("This browser does not let the page keep chats (IndexedDB), which it needs. Try another window.");
  throw error;
});
let conversation = null;
let running = null; // the AbortController of the answer that is coming
const field = byId("question");
let editedIdx = null; // the message that the next question replaces, with all that follows
const documents = new Documents(openingMessages, async () => {
  conversation.documentIds = documents.ids;
  await keep();
});
const cache = new CacheView(() => running !== null, showServer, documents);

/** Ask what the server is, at first and whenever it is back. It may be another one then. */
async function showServer() {
  try {
    const [models, example, openApi] = await Promise.all(["v1/models", "example", "openapi.json"].map(async (path) =>
      (await request(path)).json()));
    const [model] = models.data;
    server.maxRequestTokens = model.max_request_tokens;
    server.example = example;
    server.hasProgress = "return_progress" in (openApi.components?.schemas?.ChatRequest?.properties ?? {});
    byId("model").textContent = byId("model").title = model.id;
    document.title = `${model.id} · nanovllm`;
    byId("try-example").hidden = byId("built-in-note").hidden = example === null;
    byId("choose").classList.toggle("primary", example === null);
    documents.setLimit(server.maxRequestTokens);
    if (byId("alert").textContent === UNREACHABLE) showAlert("");
  } catch (error) {
    showAlert(error.message);
  }
}

// -- conversations

function newConversation(documentIds = []) {
  return { id: newId(), title: "", changedMs: Date.now(), documentIds, messages: [] };
}

/** Keep the conversation in this browser, unless there is nothing in it. */
async function keep(kept = conversation) {
  if (kept.isDeleted || (!kept.messages.length && !kept.documentIds.length)) return;
  kept.changedMs = Date.now();
  await store.saveConversation(kept);
  await showChats();
}

async function openConversation(opened) {
  running?.abort();
  const left = conversation;
  conversation = opened;
  cancelEdit();
  if (left && left.id !== opened.id && !left.messages.length) await store.deleteConversation(left.id);
  documents.show(await store.documents(opened.documentIds));
  showAlert("");
  showConversation();
  await showChats();
}

/** All turns anew. */
function showConversation() {
  const { messages } = conversation;
  byId("turns").replaceChildren();
  byId("welcome").hidden = messages.length > 0;
  messages.forEach((message, i) => {
    if (message.role === "user") showQuestion(message, [{ label: "Edit", run: () => edit(i) }]);
    else new AnswerView(message, () => answerActions(message, i));
  });
  documents.draw();
  showRest();
  scrollToEnd();
}

/** What follows the turns: how much faster it has become, and the proposed questions. */
function showRest() {
  const timed = conversation.messages.filter(({ firstMs }) => firstMs);
  const first = timed.find(({ wasCached }) => wasCached === false), last = timed.at(-1);
  const isFaster = first && last.wasCached && last.firstMs < first.firstMs;
  byId("speed").hidden = !isFaster;
  const [then, now] = [first?.firstMs, last?.firstMs].map((ms) => `${short(ms / 1000)} s`);
  if (isFaster) byId("speed").textContent = `First answer: ${then}. Now: ${now}.`;
  const asked = conversation.messages.map(({ content }) => content);
  const proposed = (conversation.questions ?? []).filter((question) => !asked.includes(question));
  byId("suggestions").hidden = !proposed.length;
  const buttons = proposed.map((question) => button(question, "suggestion", () => ask(question)));
  byId("suggestions").replaceChildren(...buttons);
}

async function showChats() {
  const kept = await store.conversations(), hadFocus = byId("chats").contains(document.activeElement);
  byId("chats").replaceChildren(...kept.map(chatRow));
  if (hadFocus) byId("chats").querySelector("[aria-current]")?.focus();
}

function chatRow(kept) {
  const isOpen = kept.id === conversation.id, row = element("li", "chat"), title = kept.title || "New chat";
  const name = button(title, "chat-name", () => {
    if (!isOpen) openConversation(kept);
    closeSide();
  });
  row.append(name);
  if (!isOpen) return row;
  name.setAttribute("aria-current", "true");
  row.append(button("Rename", "quiet", () => rename(row, title)), button("Delete", "quiet", () => deleteChat(title)));
  return row;
}

function rename(row, title) {
  const input = element("input", "");
  input.value = title;
  input.setAttribute("aria-label", "Name of the chat");
  row.replaceChildren(input);
  input.select();
  let wasEndedByKey = false;
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") input.value = title;
    wasEndedByKey = event.key === "Enter" || event.key === "Escape";
    if (wasEndedByKey) input.blur();
    event.stopPropagation();
  });
  input.addEventListener("blur", async () => {
    conversation.title = input.value.trim() || title;
    await keep();
    if (wasEndedByKey) byId("chats").querySelector("[aria-current]")?.focus();
  });
}

async function deleteChat(title) {
  if (!confirm(`Delete “${title}”? Its documents go too, unless another chat has them.`)) return;
  running?.abort();
  const { id } = conversation;
  conversation.isDeleted = true; // an answer that ends now does not bring it back
  conversation = newConversation();
  await store.deleteConversation(id);
  await openConversation((await store.conversations())[0] ?? conversation);
  byId("new-chat").focus();
}

// -- a question and its answer

async function ask(text) {
  if (running !== null) return restoreQuestion(text);
  if (editedIdx !== null) conversation.messages.splice(editedIdx);
  cancelEdit();
  conversation.title ||= text.slice(0, TITLE_CHARS);
  conversation.messages.push({ role: "user", content: text });
  const answered = answer();
  await keep();
  await answered;
}

/** Answer the last question, or continue the last answer. */
async function answer() {
  const asked = conversation; // another one may be opened before the answer has ended
  const { messages } = asked, isContinued = messages.at(-1).role === "assistant";
  const own = running = new AbortController();
  if (!isContinued) messages.push({ role: "assistant", content: "", note: UNFINISHED });
  const message = messages.at(-1), readIds = documents.ids;
  showConversation();
  byId("turns").lastElementChild.remove(); // in its place, the view that grows
  const view = new AnswerView(message, () => answerActions(message, messages.length - 1));
  const saveTimer = setInterval(() => asked.isDeleted || store.saveConversation(asked), SAVE_MS);
  showAnswering(true);
  showAlert("");
  announce("The model is answering.");
  view.start(documents.tokens);
  let error = null;
  try {
    const [reason, usage] = await stream(asked, view, own.signal, isContinued);
    if (asked === conversation) documents.setRead(readIds);
    view.end(FINISH_NOTES[reason] ?? "");
    announce(`The answer is complete. ${counted(usage?.completion_tokens ?? 0, "token")}.`);
  } catch (caught) {
    error = caught;
    view.end(own.signal.aborted ? "stopped" : "ended by an error");
    announce(own.signal.aborted ? "The answer was stopped." : "");
  }
  clearInterval(saveTimer);
  const hasNothing = !message.content && !message.reasoning;
  if (hasNothing) {
    const [question] = messages.splice(-2); // it got no answer, and goes back to where it was typed
    if (asked === conversation) {
      showConversation();
      restoreQuestion(question.content);
    }
  }
  if (asked === conversation) {
    if (error && !own.signal.aborted) showAlert(error.message);
    showRest();
  }
  if (running === own) {
    running = null;
    showAnswering(false);
  }
  await keep(asked);
}

/** Show the answer as it comes, and return [finish reason, usage]. */
async function stream(asked, view, signal, isContinued) {
  const isChat = settings.format !== "text";
  const path = isChat && !isContinued ? "v1/chat/completions" : "v1/completions";
  let reason, usage;
  try {
    const bodyOf = isContinued ? continuation : isChat ? chatBody : plainBody;
    const prompt = await bodyOf(asked, isChat, signal);
    const body = { ...prompt, ...sampling(), stream: true, stream_options: { include_usage: true } };
    for await (const data of events(await requestThatFits(path, body, signal))) {
      if (data === "[DONE]") return [reason, usage];
      const { error, choices: [choice] = [], prompt_progress: progress, usage: counts } = JSON.parse(data);
      if (error) throw new ServerError(sentence(error.message ?? "the server has ended the answer"));
      if (progress) view.showProgress(progress);
      const { delta } = choice ?? {};
      view.append(delta?.content ?? choice?.text ?? "", delta?.reasoning_content ?? "");
      reason = choice?.finish_reason ?? reason;
      usage = counts ?? usage;
      if (counts) view.setUsage(counts);
    }
  } catch (error) {
    if (!isChat || error.status !== 400 || !/chat template/.test(error.message)) throw error;
    settings = { ...settings, format: "text" }; // the model has no chat template
    return stream(asked, view, signal, isContinued);
  }
  throw new ServerError("The connection ended before the answer did.");
}

// -- bodies of requests. Fields that the user has not set are not sent: the server knows the model's own defaults

function sampling() {
  const { temperature, topP: top_p, seed } = settings;
  return { temperature, top_p, seed }; // JSON leaves out what is undefined
}

function templateOptions() {
  return settings.thinking ? { chat_template_kwargs: { enable_thinking: settings.thinking === "on" } } : {};
}

function chatBody(asked) {
  const progress = server.hasProgress ? { return_progress: true } : {};
  return { messages: chatMessages(asked), ...templateOptions(), ...progress, max_tokens: settings.maxTokens };
}

function openingMessages(question) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return [...system, { role: "user", content: question }];
}

/** All messages but the answer that comes, the documents in front of the first question. */
function chatMessages({ messages }) {
  const [first, ...others] = messages.slice(0, -1).map(({ role, content }) => ({ role, content }));
  return [...openingMessages(documents.preamble + first.content), ...others];
}

/** The text so far, to be continued. */
function plainBody({ messages }) {
  const pieces = messages.map(({ role, content }, i) => (role === "user" && i > 0 ? "\n" : "") + content);
  return { prompt: documents.preamble + pieces.join(""), max_tokens: settings.maxTokens ?? PLAIN_ANSWER_TOKENS };
}

/** A body that continues the last answer from its last token on, which a chat cannot. */
async function continuation(asked, isChat, signal) {
  if (!isChat) return plainBody(asked);
  const [before, said] = await Promise.all([
    { messages: chatMessages(asked), ...templateOptions() },
    { prompt: asked.messages.at(-1).content, add_special_tokens: false },
  ].map(async (body) => (await (await request("tokenize", { body, signal })).json()).tokens));
  return { prompt: [...before, ...said], max_tokens: settings.maxTokens ?? PLAIN_ANSWER_TOKENS };
}

/** The longest answer is a limit: where the context has less room, the answer gets what there is. */
async function requestThatFits(path, body, signal) {
  try {
    return await request(path, { body, signal });
  } catch (error) {
    const [, promptTokens] = /^Prompt of (\d+) tokens \+ max_tokens=/.exec(error.message) ?? [];
    if (promptTokens === undefined || !server.maxRequestTokens) throw error;
    const room = server.maxRequestTokens - Number(promptTokens);
    if (room <= 0) {
      const has = `Documents and conversation have ${counted(Number(promptTokens), "token")}`;
      const takes = `this server takes ${whole(server.maxRequestTokens)}, with the answer`;
      throw new ServerError(`${has}; ${takes}. Shorten a document or begin a new chat.`, error.status);
    }
    return request(path, { body: { ...body, max_tokens: room }, signal });
  }
}

// -- what can be done with a question or an answer

/** Only the last answer is asked for again, because what follows would be lost. Edit, which says so, does it for others. */
function answerActions(message, idx) {
  if (idx !== conversation.messages.length - 1) return [];
  const retry = { label: "Retry", run: () => redo(() => conversation.messages.splice(idx)) };
  return message.note && message.content ? [{ label: "Continue", run: () => redo(() => {}) }, retry] : [retry];
}

function redo(prepare) {
  if (running !== null) return;
  prepare();
  field.focus(); // the button goes away
  answer();
}

function edit(idx) {
  if (running !== null) return;
  editedIdx = idx;
  byId("editing").hidden = false;
  setQuestion(conversation.messages[idx].content);
  field.focus();
}

function cancelEdit() {
  if (editedIdx !== null) setQuestion("");
  editedIdx = null;
  byId("editing").hidden = true;
}
byId("cancel-edit").addEventListener("click", () => {
  cancelEdit();
  field.focus();
});

// -- where the user types

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
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  document.body.classList.toggle("answering", isAnswering); // hides what must wait
  byId("send").hidden = isAnswering;
  byId("stop").hidden = !isAnswering;
  if (hadFocus || document.activeElement === document.body) field.focus(); // the focus must not go down with a button
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = field.value.trim();
  if (!text || running !== null) return;
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
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return; // which closes itself
  if (byId("side").classList.contains("open")) closeSide();
  else if (running !== null) running.abort();
  else if (editedIdx !== null) cancelEdit();
});

byId("new-chat").addEventListener("click", async () => {
  if (conversation.messages.length) {
    const { documentIds, questions } = conversation;
    await openConversation({ ...newConversation([...documentIds]), questions });
    await keep();
  }
  closeSide();
  field.focus();
});

byId("try-example").addEventListener("click", async () => {
  const { name, text, questions } = server.example;
  conversation.questions = questions;
  byId("try-example").hidden = true;
  showRest();
  byId("suggestions").firstElementChild.focus();
  scrollToEnd(); // all of them are in view, on a small screen too
  await documents.add(name, text);
});

// -- the side column, which on a narrow screen is a drawer

function openSide(isOpen) {
  byId("side").classList.toggle("open", isOpen);
  byId("scrim").hidden = !isOpen;
  byId("side-button").setAttribute("aria-expanded", String(isOpen));
  for (const covered of document.querySelectorAll("header, main, #composer")) covered.inert = isOpen;
}

function closeSide() {
  const hadFocus = byId("side").classList.contains("open") && byId("side").contains(document.activeElement);
  openSide(false);
  if (hadFocus) byId("side-button").focus();
}

byId("side-button").addEventListener("click", () => {
  const isOpen = !byId("side").classList.contains("open");
  openSide(isOpen);
  if (isOpen) byId("attach").focus();
});
byId("scrim").addEventListener("click", closeSide);
byId("close-side").addEventListener("click", closeSide);
matchMedia("(max-width: 56rem)").addEventListener("change", closeSide); // as in page.css

// -- settings: what the user chooses for the next answers. What is left empty is not sent

const dialog = byId("settings");
const CONTROLS = { // name in `settings` -> id, and the value as it is sent
  system: ["system", String], temperature: ["temperature", Number], topP: ["top-p", Number],
  maxTokens: ["max-tokens", Number], seed: ["seed", Number], thinking: ["thinking", String], format: ["format", String],
};

byId("settings-button").addEventListener("click", () => {
  for (const [name, [id]] of Object.entries(CONTROLS)) byId(id).value = settings[name] ?? "";
  byId("format").value = settings.format ?? "chat";
  dialog.showModal();
});
byId("settings-cancel").addEventListener("click", () => dialog.close());
dialog.querySelector("form").addEventListener("submit", async () => { // the event close would come later
  settings = {};
  for (const [name, [id, valueOf]] of Object.entries(CONTROLS)) {
    if (byId(id).value.trim()) settings[name] = valueOf(byId(id).value);
  }
  await store.saveSettings(settings);
});

await openConversation((await store.conversations())[0] ?? newConversation());
await showServer();
cache.refresh();
