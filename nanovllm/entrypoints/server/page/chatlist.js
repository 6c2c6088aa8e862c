/** The list of kept chats: search, dates, names, deletion, and the export of a chat. */

import { allMessages, titleOf } from "./chats.js";
import { button, byId, element } from "./common.js";
import * as store from "./store.js";

const SEARCHED_FROM = 6; // chats; fewer can be seen at once
const BEFORE_MATCH = 20; // characters of a text that are shown before what was searched for
const TIME = new Intl.DateTimeFormat("en", { hour: "numeric", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat("en", { month: "short", day: "numeric" });
const MONTH = new Intl.DateTimeFormat("en", { month: "short", year: "numeric" });

export class ChatList {
  #page;
  #numDrawn = 0;

  /** page: has `shown`, a Chat, and isAnswering(id), open(id), openNewest() and closeSide(). */
  constructor(page) {
    this.#page = page;
    byId("search").addEventListener("input", () => this.draw());
    for (const [id, type, textOf] of [["as-markdown", "text/markdown", markdownOf], ["as-json", "text/json", jsonOf]]) {
      byId(id).addEventListener("click", () => save(page.shown, type, textOf(page.shown)));
    }
  }

  async draw() {
    const drawn = this.#numDrawn += 1, list = byId("chats"), kept = await store.conversations();
    if (drawn !== this.#numDrawn || list.querySelector("input")) return; // a name is being typed
    const search = byId("search"), wanted = search.value.trim().toLowerCase();
    const focused = list.contains(document.activeElement) ? document.activeElement.closest(".chat").dataset.id : null;
    const found = kept.map((each) => [each, wanted && matchIn(each, wanted)]).filter(([, match]) => match !== null);
    search.hidden = kept.length < SEARCHED_FROM && !search.value;
    byId("none-found").hidden = !wanted || found.length > 0;
    list.replaceChildren(...found.map(([each, match]) => this.#row(each, match)));
    if (focused === null) return;
    const rows = [...list.children], isFocused = ({ dataset }) => dataset.id === focused;
    (rows.find(isFocused)?.querySelector(".chat-name") ?? list.querySelector("[aria-current]"))?.focus();
  }

  /** match: what was found in a message, "" for none. */
  #row(kept, match) {
    const isOpen = kept.id === this.#page.shown.id, row = element("li", "chat"), title = titleOf(kept);
    const name = button(title, "chat-name", () => {
      if (!isOpen) this.#page.open(kept.id);
      this.#page.closeSide();
    });
    row.dataset.id = kept.id;
    name.dir = "auto";
    if (this.#page.isAnswering(kept.id)) {
      const mark = element("span", "chat-answering");
      mark.role = "img";
      mark.ariaLabel = mark.title = "Answering";
      row.append(mark);
    }
    row.append(name, element("span", "chat-date muted small", dateOf(kept.changedMs)));
    if (match) row.append(element("p", "chat-match muted small", match));
    if (isOpen) {
      const actions = element("div", "chat-actions");
      name.setAttribute("aria-current", "true");
      actions.append(
        button("Rename", "quiet", () => this.#rename(row, title)),
        button("Export", "quiet", () => byId("export").showModal()),
        button("Delete", "quiet", () => this.#delete(title)),
      );
      row.append(actions);
    }
    return row;
  }

  #rename(row, title) {
    const input = element("input", ""), renamed = this.#page.shown;
    input.value = title;
    input.dir = "auto";
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
      const given = input.value.trim();
      input.remove();
      if (given && given !== title) {
        await renamed.change((record) => Object.assign(record, { title: given, changedMs: Date.now() }));
      }
      await this.draw();
      if (wasEndedByKey) byId("chats").querySelector("[aria-current]")?.focus();
    });
  }

  async #delete(title) {
    if (!confirm(`Delete “${title}”? Its documents go too, unless another chat has them.`)) return;
    const deleted = this.#page.shown;
    deleted.end();
    await store.deleteConversation(deleted.id);
    await this.#page.openNewest();
    byId("new-chat").focus();
  }
}

/** The time of today, the day of this year, or the month. */
function dateOf(ms) {
  const date = new Date(ms), now = new Date();
  if (date.toDateString() === now.toDateString()) return TIME.format(date);
  return (date.getFullYear() === now.getFullYear() ? DAY : MONTH).format(date);
}

/** The place in a chat where `wanted` is, "" if that is its title, or null if it is nowhere. */
function matchIn(record, wanted) {
  if (titleOf(record).toLowerCase().includes(wanted)) return "";
  for (const { content } of allMessages(record)) {
    const place = content.toLowerCase().indexOf(wanted), start = Math.max(0, place - BEFORE_MATCH);
    if (place >= 0) return `${start ? "…" : ""}${content.slice(start, place + wanted.length + 60)}`;
  }
  return null;
}

// -- export

function markdownOf({ record, documents }) {
  const names = documents.map(({ name }) => `- ${name}\n`).join("");
  const heading = ({ role }) => (role === "user" ? "Question" : "Answer");
  const turns = record.messages.map((message) => `## ${heading(message)}\n\n${message.content}\n`);
  return [`# ${titleOf(record)}\n`, ...(names ? [`Documents:\n\n${names}`] : []), ...turns].join("\n");
}

const jsonOf = ({ record, documents }) => JSON.stringify({ ...record, documents }, null, 2);

function save({ record }, type, text) {
  const link = element("a", ""), name = titleOf(record).replace(/[^\p{L}\p{N}]+/gu, " ").trim() || "chat";
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${name}.${type === "text/markdown" ? "md" : "json"}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser may still read it
}
