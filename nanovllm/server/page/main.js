/** Puts the page together: the chat, the document, and the view of the KV cache beside them. */

import { UNREACHABLE, request } from "./api.js";
import { setUpDocument } from "./attach.js";
import { CacheView } from "./cache_view.js";
import { Chat } from "./chat.js";
import { clearAlert, setUpComposer, showAlert } from "./composer.js";
import { byId } from "./page_elements.js";
import { setUpSettings } from "./settings.js";

let maxRequestTokens = 0;
const chat = new Chat(() => maxRequestTokens);
const cache = new CacheView(() => chat.isAnswering, showModel);

setUpSettings();
setUpComposer({
  send: (text) => {
    chat.send(text);
    cache.refresh(); // the next one would come a second later
  },
  stop: () => chat.stop(),
});
setUpDocument({ attach: (document) => chat.attach(document), refuse: showAlert });
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  byId("question").focus();
});

const isNarrow = matchMedia("(max-width: 56rem)");
byId("cache").open = !isNarrow.matches; // on a phone only its summary is shown at first

await showModel();
cache.start();

/** Ask for the model's name and limit, at first and whenever the server is back. It may serve another model then. */
async function showModel() {
  try {
    const { data } = await (await request("v1/models")).json();
    const [{ id, max_request_tokens }] = data;
    maxRequestTokens = max_request_tokens;
    byId("model").textContent = id;
    document.title = `${id} · nanovllm`;
    clearAlert(UNREACHABLE);
  } catch (error) {
    showAlert(/** @type {Error} */ (error).message);
  }
}
