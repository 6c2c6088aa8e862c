/** The KV cache, live. Asks the server for a snapshot a few times a second, and only while the page can be seen. */

import { ServerError, request } from "./api.js";
import { BlockGrid } from "./block_grid.js";
import { Legend } from "./legend.js";
import { showFigures, showMeters } from "./meters.js";
import { counted, whole } from "./numbers.js";
import { byId } from "./page_elements.js";

const BUSY_MS = 250;
const IDLE_MS = 1000;
const LOST_MS = 3000; // after a snapshot that did not come

/**
 * The JSON object that GET /kvcache returns (nanovllm/server/kv_view.py).
 * @typedef {{ num_blocks: number, block_size: number, num_slots: number | null, state_names: string[], states: string,
 *   num_running: number, num_waiting: number, rates: Record<string, number | null>,
 *   limits: Record<string, number | null>, guess_acceptance: number | null, tokens_per_pass: number | null }} Snapshot
 */

export class CacheView {
  #grid = new BlockGrid(byId("grid"));
  #legend = new Legend();
  #isAnswering;
  #whenBack;
  #isLost = false;
  #timer = 0;

  /**
   * @param {() => boolean} isAnswering whether this page waits for an answer
   * @param {() => void} whenBack called when a snapshot has come after one that did not
   */
  constructor(isAnswering, whenBack) {
    this.#isAnswering = isAnswering;
    this.#whenBack = whenBack;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.refresh());
    this.refresh();
  }

  /** Ask now, and from then on again and again. */
  async refresh() {
    clearTimeout(this.#timer);
    if (document.hidden) return; // `visibilitychange` goes on
    let pauseMs = LOST_MS;
    try {
      const snapshot = await (await request("kvcache", { mayAsk: false })).json();
      this.#show(snapshot);
      if (this.#isLost) this.#whenBack();
      this.#isLost = false;
      pauseMs = this.#isAnswering() || snapshot.num_running ? BUSY_MS : IDLE_MS;
    } catch (error) {
      this.#showLost(error);
    }
    clearTimeout(this.#timer); // `refresh` may have been called again meanwhile
    this.#timer = setTimeout(() => this.refresh(), pauseMs);
  }

  /** @param {Snapshot} snapshot */
  #show(snapshot) {
    const states = Uint8Array.from(atob(snapshot.states), (byte) => byte.charCodeAt(0));
    const counts = countStates(states, snapshot.state_names);
    const used = states.length - (counts.get("free") ?? 0);
    byId("cache").classList.remove("lost");
    byId("cache-summary").textContent = `${whole(used)} of ${counted(states.length, "block")} in use`;
    const legend = this.#legend.show(counts, snapshot.num_slots !== null);
    this.#grid.show(states, snapshot.state_names, `KV cache of ${counted(states.length, "block")}: ${legend}`);
    byId("grid-caption").textContent = caption(snapshot, this.#grid.blocksPerCell);
    showMeters(snapshot);
    showFigures(snapshot);
  }

  /** @param {unknown} error */
  #showLost(error) {
    const status = error instanceof ServerError ? error.status : undefined;
    const why = status === 401 ? "needs an API key" : status === 503 ? "the engine has failed" : "no connection";
    this.#isLost = true;
    byId("cache").classList.add("lost");
    byId("cache-summary").textContent = why;
  }
}

/**
 * @param {Uint8Array} states
 * @param {string[]} names
 * @returns {Map<string, number>} by name, in the order of the names
 */
function countStates(states, names) {
  const counts = new Array(names.length).fill(0);
  for (const state of states) counts[state] += 1;
  return new Map(names.map((name, state) => [name, counts[state]]));
}

/**
 * @param {Snapshot} snapshot
 * @param {number} blocksPerCell
 */
function caption({ num_blocks: numBlocks, block_size: blockSize, num_slots: numSlots }, blocksPerCell) {
  const place = numSlots === null ? "on the GPU" : `in CPU memory, with ${counted(numSlots, "slot")} on the GPU`;
  const cell = blocksPerCell === 1 ? "One cell is one block" : `One cell is ${whole(blocksPerCell)} blocks`;
  return `${cell} of ${whole(blockSize)} tokens. Room for ${whole(numBlocks * blockSize)} tokens ${place}.`;
}
