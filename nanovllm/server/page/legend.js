/** What the cells mean, with the number of blocks in each state, and the shares of the states as one bar. */

import { drawCell, sizedContext, stateColours } from "./cells.js";
import { whole } from "./numbers.js";
import { byId, element } from "./page_elements.js";

const SWATCH = 14;

/** The states in the order in which the legend shows them, and their names in words. */
const NAMES = {
  written: "being written",
  resident: "on the GPU",
  streamed: "streamed to the GPU",
  cpu_attended: "attended to by the CPU",
  waiting: "waiting in CPU memory",
  cached: "kept for later prompts",
  free: "free",
};
const ONLY_WITH_OFFLOAD = ["streamed", "cpu_attended", "waiting"];

export class Legend {
  /** @type {Map<string, { row: HTMLElement, count: HTMLElement, share: HTMLElement }>} */
  #rows = new Map();
  /** @type {[string, HTMLCanvasElement][]} */
  #swatches = [];

  constructor() {
    for (const [name, words] of Object.entries(NAMES)) {
      const row = element("li", ""), count = element("span", "count", "0"), share = element("span", "share");
      const swatch = document.createElement("canvas");
      swatch.className = "swatch";
      swatch.setAttribute("aria-hidden", "true");
      row.dataset.state = share.dataset.state = name;
      row.append(swatch, element("span", "", words), count);
      this.#swatches.push([name, swatch]);
      this.#rows.set(name, { row, count, share });
      byId("legend").append(row);
      byId("shares").append(share);
    }
    this.#drawSwatches();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#drawSwatches());
  }

  /**
   * @param {Map<string, number>} counts by state
   * @param {boolean} hasOffload
   * @returns {string} the same in words
   */
  show(counts, hasOffload) {
    for (const [name, { row, count, share }] of this.#rows) {
      const number = counts.get(name) ?? 0;
      row.hidden = !hasOffload && ONLY_WITH_OFFLOAD.includes(name);
      row.classList.toggle("none", number === 0);
      count.textContent = whole(number);
      share.style.flexGrow = String(number);
    }
    const shown = Object.entries(NAMES).filter(([name]) => counts.get(name));
    return shown.map(([name, words]) => `${whole(counts.get(name) ?? 0)} ${words}`).join(", ");
  }

  #drawSwatches() {
    const colours = stateColours(Object.keys(NAMES));
    for (const [name, canvas] of this.#swatches) {
      drawCell(sizedContext(canvas, SWATCH, SWATCH), name, 0, 0, SWATCH, colours);
    }
  }
}
