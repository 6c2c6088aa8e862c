/** Puts the page together: the chat, the document, and the view of the KV cache beside them. */

import { request } from "./api.js";
import { setUpDocument } from "./attach.js";
import { CacheView } from "./cache_view.js";
import { Chat } from "./chat.js";
import { restoreQuestion, setUpComposer, showAlert } from "./composer.js";
import { byId } from "./page_elements.js";
import { setUpSettings } from "./settings.js";

let model = "";
const chat = new Chat(() => model);
const cache = new CacheView(() => chat.isAnswering);

setUpSettings();
setUpComposer({
  send: async (text) => {
    if (!model && !(await findModel())) return restoreQuestion(text);
    const answered = chat.send(text);
    cache.refresh(); // the next one would come a second later
    await answered;
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

await findModel();
cache.start();

/** Ask for the model's name, which every request must give. Returns whether it is known now. */
async function findModel() {
  try {
    const { data } = await (await request("v1/models")).json();
    model = data[0].id;
    byId("model").textContent = model;
    document.title = `${model} · nanovllm`;
    return true;
  } catch (error) {
    showAlert(/** @type {Error} */ (error).message);
    return false;
  }
}
