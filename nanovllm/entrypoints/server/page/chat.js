/** The page: chats about documents, which can be answered at the same time, the answers streamed. */

import { CacheView } from "./cache.js";
import {
  Chat, appendMessages, branchMessages, branchOf, removeMessages, reveal, showBranch, updateMessage,
} from "./chats.js";
import { ChatList } from "./chatlist.js";
import {
  ServerError, TOO_LONG, UNREACHABLE, announce, button, byId, counted, element, events, newId, request, sentence, short,
  showAlert, whole,
} from "./common.js";
import { Documents, preambleOf, tokensOf } from "./documents.js";
import * as store from "./store.js";
import { AnswerView, QuestionView, keepAtEnd, scrollToEnd } from "./turns.js";

const PLAIN_ANSWER_TOKENS = 1024; // limit of an answer where the server's own is made for short completions
const SAVE_MS = 2000; // between two times that an answer is kept while it grows
const FINISH_NOTES = {
  length: "ended at the limit of an answer",
  abort: "ended by the server",
  error: "ended by an error",
};

const server = { maxRequestTokens: 0, hasProgress: false, example: null }; // 0: not known yet
let settings = await store.settings().catch((error) => {
  showAlert("This browser does not let the page keep chats (IndexedDB), which it needs. Try another window.");
  throw error;
});
let shown = await newestChat(); // the Chat on the page. Nothing above this line listens to the user
let views = new Map(); // a message's id -> its view, for the chat on the page
const running = new Map(); // chats with an answer that is coming to this tab, by id
const elsewhere = new Map(); // answers that are coming to other tabs: a message's id -> its chat's id
const field = byId("question");
let editedId = null; // of the message beside which the next question begins a branch
let draft = ""; // what was in the field before the edit
const chatList = new ChatList({
  get shown() { return shown; },
  isAnswering: (id) => running.has(id) || [...elsewhere.values()].includes(id),
  open: openChat,
  openNewest,
  closeSide,
});
const documents = new Documents(openingMessages, () => {
  showRest();
  return chatList.draw();
});
const cache = new CacheView(() => running.size > 0, showServer, documents);

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
    documents.canExtract = "/v1/documents/text" in (openApi.paths ?? {});
    showRest();
    documents.setLimit(server.maxRequestTokens);
    if (byId("alert").textContent === UNREACHABLE) showAlert("");
  } catch (error) {
    showAlert(error.message);
  }
}

// -- chats

/** Show a chat. Answers that are coming to others go on. */
async function show(chat) {
  numOpened += 1; // what is being read now comes too late
  shown = chat;
  views = new Map();
  cancelEdit();
  showAlert("");
  documents.show(chat);
  byId("turns").replaceChildren();
  showChat();
  scrollToEnd();
  await chatList.draw();
}

let numOpened = 0; // so that the chat that was chosen last is shown, whichever is read first

async function openChat(id) {
  const opened = numOpened += 1;
  const chat = running.get(id) ?? await Chat.load(id, chatChanged);
  if (opened === numOpened && chat) await show(chat);
}

/** Return the chat that was changed last, or a new one if no chat is kept. */
async function newestChat() {
  const [newest] = await store.conversations();
  return (newest && await Chat.load(newest.id, chatChanged)) ?? Chat.begin([], undefined, chatChanged);
}

async function openNewest() {
  const opened = numOpened += 1;
  const chat = await newestChat();
  if (opened === numOpened) await show(running.get(chat.id) ?? chat);
}

/** The record of a chat is another one than before, maybe because of another tab. */
async function chatChanged(chat, hasOtherDocuments) {
  if (chat !== shown) return;
  if (chat.isGone) {
    await openNewest();
    showAlert("This chat was deleted in another tab.");
  } else {
    if (hasOtherDocuments) documents.show(chat);
    showChat();
  }
}

const tellOf = (type) => ({ id, run }) => store.tell({ type, id, messageId: run.message.id });
const tellAnswering = tellOf("answering"), tellAnswered = tellOf("answered");

store.onNews(async ({ type, id, messageId }) => {
  if (type === "settings") settings = await store.settings();
  if (type === "opened") running.forEach(tellAnswering);
  if (id === undefined) return;
  if (type === "answering") elsewhere.set(messageId, id);
  else if (type === "answered") elsewhere.delete(messageId);
  else await (shown.id === id ? shown : running.get(id))?.refresh();
  if (shown.id === id) showChat();
  await chatList.draw();
});
addEventListener("pagehide", () => running.forEach(tellAnswered));

/** Bring the turns and what follows them up to date. What has not changed is not touched. */
function showChat() {
  keepAtEnd(() => {
    const { messages } = shown.record, list = byId("turns"), last = messages.at(-1);
    byId("welcome").hidden = messages.length > 0;
    messages.forEach((message, i) => {
      const { element: turn } = viewOf(message, message === last);
      if (list.children[i] !== turn) list.insertBefore(turn, list.children[i] ?? null);
    });
    while (list.children.length > messages.length) list.lastElementChild.remove();
    showRest();
    showState();
  });
}

function viewOf(message, isLast) {
  const { run } = shown, { id, role } = message, branches = branchesOf(message);
  if (message === run?.message) {
    run.view.draw(); // what has come while another chat was shown
    return run.view;
  }
  if (role === "user") {
    if (!views.has(id)) views.set(id, new QuestionView(message));
    views.get(id).show([{ label: "Edit", run: () => edit(message, message.content) }], branches);
  } else {
    if (!views.has(id)) views.set(id, new AnswerView());
    const isElsewhere = elsewhere.has(id);
    const actions = isElsewhere ? [] : answerActions(message, isLast);
    views.get(id).show(message, actions, branches, isElsewhere ? "being answered in another tab" : "");
  }
  return views.get(id);
}

const placeOf = (message) => shown.record.messages.findIndex(({ id }) => id === message.id);
const idBefore = (message) => shown.record.messages[placeOf(message) - 1]?.id ?? "";

/** The other versions of this message and of what follows: see branchSwitch. */
function branchesOf(message) {
  const [place, count] = branchOf(shown.record, message) ?? [];
  if (count === undefined) return null;
  return { place, count, step: (by) => {
    if (shown.run !== null) return;
    const turnOf = () => byId("turns").children[i], i = placeOf(message), { top } = turnOf().getBoundingClientRect();
    cancelEdit();
    shown.change(showBranch(idBefore(message), place + by));
    showChat();
    byId("messages").scrollTop += turnOf().getBoundingClientRect().top - top; // it is where the one before was
    const [back, on] = turnOf().querySelectorAll(".branches button");
    (on.disabled || (by < 0 && !back.disabled) ? back : on).focus();
  } };
}

/** What follows the turns: how much faster it has become, and the proposed questions. */
function showRest() {
  const timed = shown.record.messages.filter(({ firstMs }) => firstMs);
  const first = timed.find(({ wasCached }) => wasCached === false), last = timed.at(-1);
  const isFaster = first && last.wasCached && last.firstMs < first.firstMs;
  byId("speed").hidden = !isFaster;
  const [then, now] = [first?.firstMs, last?.firstMs].map((ms) => `${short(ms / 1000)} s`);
  if (isFaster) byId("speed").textContent = `First answer: ${then}. Now: ${now}.`;
  const asked = shown.record.messages.map(({ content }) => content);
  const proposed = (shown.record.questions ?? questionsFor(shown)).filter((question) => !asked.includes(question));
  const box = byId("suggestions"), areShown = [...box.children].map(({ textContent }) => textContent);
  box.hidden = !proposed.length;
  if (areShown.join("\n") === proposed.join("\n")) return; // one may have the focus
  box.replaceChildren(...proposed.map((question) => button(question, "suggestion", () => ask(question))));
}

/** Questions to begin with about the user's documents. The built-in model could not answer them. */
function questionsFor({ documents: { length }, record: { messages } }) {
  if (!length || messages.length || server.example !== null || !server.maxRequestTokens) return [];
  return length === 1
    ? ["Summarize the document.", "List its main points, each with a quotation.", "Which questions does it leave open?"]
    : ["Summarize each document.", "Where do the documents agree, and where not?",
      "List the main points, each with a quotation and its document."];
}

// -- a question and its answer

const mayAsk = () => shown.run === null && !documents.isExcess;

async function ask(text) {
  if (!mayAsk()) return restoreQuestion(text);
  const { messages } = shown.record, edited = messages.find(({ id }) => id === editedId);
  const question = { id: newId(), role: "user", content: text }, message = newAnswer();
  const change = edited
    ? branchMessages(idBefore(edited), question, message) : appendMessages(messages.at(-1)?.id, question, message);
  cancelEdit();
  await answer(message, change);
}

const newAnswer = () => ({ id: newId(), role: "assistant", content: "" });

/** Let an answer come, or go on. prepare: the change of the record that puts it there. */
async function answer(message, prepare) {
  const chat = shown, readIds = chat.documentIds, isContinued = message.content !== "";
  const view = new AnswerView(), controller = new AbortController(), { signal } = controller;
  chat.run = { message, view, controller, before: [] };
  running.set(chat.id, chat);
  tellAnswering(chat);
  view.start(message, tokensOf(chat.documents));
  const isStored = chat.change(prepare);
  showChat();
  scrollToEnd();
  showAlert("");
  announce("The model is answering.");
  const save = () => chat.change(updateMessage(message));
  const saveTimer = setInterval(save, SAVE_MS);
  let error = null, end;
  try {
    if (await isStored) chatList.draw();
    else restoreQuestion(messagesBefore(chat).at(-1).content); // the chat was deleted a moment ago
    chat.run.before = messagesBefore(chat);
    const [reason, usage] = await stream(chat, isContinued);
    end = FINISH_NOTES[reason] ?? "";
    if (chat === shown) documents.setRead(readIds);
    announce(`The answer is complete. ${counted(usage?.completion_tokens ?? 0, "token")}.`);
  } catch (caught) {
    if (!signal.aborted) error = caught;
    end = error ? "ended by an error" : "stopped";
    if (error && chat !== shown) end = `${end}: ${error.message}`;
    announce(error ? "" : "The answer was stopped.");
  }
  clearInterval(saveTimer);
  view.end(end);
  tellAnswered(chat);
  chat.run = null;
  running.delete(chat.id);
  if (!chat.isGone) await keepAnswer(chat, message, view);
  const isSaid = documents.isExcess && error?.message.startsWith(TOO_LONG);
  if (error && chat === shown && !isSaid) showAlert(error.message);
  await chatList.draw();
}

/** A question that got no answer goes back to where it was typed, unless the user has begun another one. */
async function keepAnswer(chat, message, view) {
  const { messages, forks = {} } = chat.record, place = messages.indexOf(message), question = messages[place - 1];
  const hasNothing = !message.content && !message.reasoning && question && chat === shown;
  const hasOther = Boolean(question && forks[question.id]), isGivenBack = hasNothing && !hasOther && !field.value;
  const wasEdited = isGivenBack && (messages[place - 2]?.id ?? "") in forks;
  const change = isGivenBack ? removeMessages(question.id, message.id)
    : hasNothing && hasOther ? removeMessages(message.id) : updateMessage(message);
  if (chat === shown) views.set(message.id, view);
  const isStored = chat.change((record) => {
    change(record);
    record.changedMs = Date.now();
  });
  if (wasEdited) edit(chat.record.messages[place - 1], question.content);
  else if (isGivenBack) restoreQuestion(question.content);
  if (chat === shown) showChat();
  await isStored;
}

/** Show the answer as it comes, and return [finish reason, usage]. */
async function stream(chat, isContinued) {
  const { view, controller: { signal } } = chat.run;
  const isChat = settings.format !== "text";
  const path = isChat && !isContinued ? "v1/chat/completions" : "v1/completions";
  let reason, usage;
  try {
    const bodyOf = isContinued ? continuation : isChat ? chatBody : plainBody;
    const prompt = await bodyOf(chat, isChat);
    const body = { ...prompt, ...sampling(), stream: true, stream_options: { include_usage: true } };
    for await (const data of events(await requestThatFits(path, body, chat))) {
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
    return stream(chat, isContinued);
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

function chatBody(chat) {
  const progress = server.hasProgress ? { return_progress: true } : {};
  return { messages: chatMessages(chat), ...templateOptions(), ...progress, max_tokens: settings.maxTokens };
}

function openingMessages(question) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return [...system, { role: "user", content: question }];
}

/** Return the messages before the answer that is coming. Earlier questions without an answer are left out. */
function messagesBefore({ record: { messages }, run }) {
  const before = messages.slice(0, messages.indexOf(run.message));
  const wasAnswered = (i) => i === before.length - 1 || before[i + 1].content !== "";
  return before.filter(({ role, content }, i) => (role === "user" ? wasAnswered(i) : content !== ""));
}

/** Return these messages with the documents before the first question. */
function chatMessages(chat) {
  const [first, ...others] = chat.run.before.map(({ role, content }) => ({ role, content }));
  return [...openingMessages(preambleOf(chat.documents) + first.content), ...others];
}

/** The text so far, to be continued. */
function plainBody(chat) {
  const messages = [...chat.run.before, chat.run.message];
  const pieces = messages.map(({ role, content }, i) => (role === "user" && i > 0 ? "\n" : "") + content);
  const prompt = preambleOf(chat.documents) + pieces.join("");
  return { prompt, max_tokens: settings.maxTokens ?? PLAIN_ANSWER_TOKENS };
}

/** A body that continues the last answer from its last token on, which a chat cannot. */
async function continuation(chat, isChat) {
  if (!isChat) return plainBody(chat);
  const { message, controller: { signal } } = chat.run;
  const [before, said] = await Promise.all([
    { messages: chatMessages(chat), ...templateOptions() },
    { prompt: message.content, add_special_tokens: false },
  ].map(async (body) => (await (await request("tokenize", { body, signal })).json()).tokens));
  return { prompt: [...before, ...said], max_tokens: settings.maxTokens ?? PLAIN_ANSWER_TOKENS };
}

/** The longest answer is a limit: where the context has less room, the answer gets what there is. */
async function requestThatFits(path, body, chat) {
  const { signal } = chat.run.controller;
  try {
    return await request(path, { body, signal });
  } catch (error) {
    const [, promptTokens] = /^Prompt of (\d+) tokens \+ max_tokens=/.exec(error.message) ?? [];
    const room = server.maxRequestTokens - Number(promptTokens); // NaN if the message does not say it
    if (room > 0) return request(path, { body: { ...body, max_tokens: room }, signal });
    if (!(room <= 0) && error.code !== "context_length_exceeded") throw error;
    const [what, has, is, remedy] = chat.documents.length
      ? [TOO_LONG, "have", "are", "Shorten a document or begin a new chat."]
      : ["The conversation", "has", "is", "Begin a new chat."];
    const size = room <= 0 ? `${has} ${counted(Number(promptTokens), "token")}` : `${is} too long`;
    const takes = `this server takes ${counted(server.maxRequestTokens, "token")}, with the answer`;
    throw new ServerError(`${what} ${size}; ${takes}. ${remedy}`, error.status);
  }
}

// -- what can be done with a question or an answer

function answerActions(message, isLast) {
  const retry = { label: "Retry", run: () => redo(() => {
    const answered = newAnswer();
    answer(answered, branchMessages(idBefore(message), answered));
  }) };
  const goOn = { label: "Continue", run: () => redo(() => answer(message, (record) => {
    reveal(record, message.id);
    updateMessage(message)(record);
  })) };
  return isLast && message.note && message.content ? [goOn, retry] : [retry];
}

function redo(begin) {
  if (!mayAsk()) return;
  field.focus(); // the button goes away
  begin();
}

function edit({ id }, content) {
  if (shown.run !== null) return;
  cancelEdit();
  draft = field.value;
  editedId = id;
  views.get(id)?.element.classList.add("edited");
  byId("editing").hidden = false;
  setQuestion(content);
  field.focus();
}

function cancelEdit() {
  if (editedId !== null) setQuestion(draft);
  views.get(editedId)?.element.classList.remove("edited");
  editedId = null;
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

/** Stop is in place of Send while the answer of this chat is coming. */
function showState() {
  const isAnswering = shown.run !== null, { classList } = document.body;
  if (classList.contains("answering") === isAnswering) return;
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  classList.toggle("answering", isAnswering); // hides what must wait
  byId("send").hidden = isAnswering;
  byId("stop").hidden = !isAnswering;
  if (hadFocus || document.activeElement === document.body) field.focus(); // the focus must not go down with a button
}

function stop() {
  shown.run?.controller.abort();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = field.value.trim();
  if (!text || !mayAsk()) return;
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
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return; // which closes itself
  if (byId("side").classList.contains("open")) closeSide();
  else if (shown.run !== null) stop();
  else if (editedId !== null) cancelEdit();
});

byId("new-chat").addEventListener("click", async () => {
  const { messages, questions } = shown.record;
  if (messages.length) await show(Chat.begin(shown.documents, questions, chatChanged));
  closeSide();
  field.focus();
});

byId("try-example").addEventListener("click", async () => {
  const { name, text, questions } = server.example;
  shown.record.questions = questions;
  byId("try-example").hidden = true;
  showRest();
  byId("suggestions").firstElementChild.focus();
  await documents.add(name, text);
  scrollToEnd(); // all of them are in view, on a small screen too
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

for (const id of ["side-button", "attached"]) {
  byId(id).addEventListener("click", () => {
    openSide(true);
    byId("attach").focus();
  });
}
byId("scrim").addEventListener("click", closeSide);
byId("close-side").addEventListener("click", closeSide);
matchMedia("(max-width: 56rem)").addEventListener("change", closeSide); // as in page.css

// -- settings: what the user chooses for the next answers. What is left empty is not sent

const dialog = byId("settings");
const CONTROLS = { // name in `settings` -> id, and the value as it is sent
  system: ["system", String], temperature: ["temperature", Number], topP: ["top-p", Number],
  maxTokens: ["max-tokens", Number], seed: ["seed", Number], thinking: ["thinking", String], format: ["format", String],
};

let settingsAtFirst = {}; // when the dialog was opened

byId("settings-button").addEventListener("click", () => {
  settingsAtFirst = { format: "chat", ...settings };
  for (const [name, [id]] of Object.entries(CONTROLS)) byId(id).value = settingsAtFirst[name] ?? "";
  dialog.showModal();
});
byId("settings-cancel").addEventListener("click", () => dialog.close());
dialog.querySelector("form").addEventListener("submit", async () => { // the event close would come later
  const changes = {}; // another tab may have changed other settings
  for (const [name, [id, valueOf]] of Object.entries(CONTROLS)) {
    const value = byId(id).value.trim() ? valueOf(byId(id).value) : undefined;
    if (value !== settingsAtFirst[name]) changes[name] = value;
  }
  settings = { ...settings, ...changes };
  await store.saveSettings(changes);
});

await show(shown);
byId("send").disabled = false;
store.tell({ type: "opened" });
await showServer();
cache.refresh();
