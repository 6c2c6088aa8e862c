/** The cells of the cache on a canvas, in the order in which the blocks lie in memory. Fits any number of blocks. */

import { drawCell, sizedContext, stateColours } from "./cells.js";

const LARGEST_CELL = 20;
const SMALLEST_CELL = 2;
const HEIGHT = 300; // at most, in CSS pixels

/** @typedef {{ size: number, pitch: number, columns: number, blocksPerCell: number }} Layout */

export class BlockGrid {
  #canvas;
  /** @type {Uint8Array} */
  #states = new Uint8Array();
  /** @type {string[]} */
  #names = [];
  #shown = ""; // what is on the canvas
  blocksPerCell = 1;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    const redraw = () => this.#draw(true);
    new ResizeObserver(redraw).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  /**
   * @param {Uint8Array} states of the blocks, as indices of `names`
   * @param {string[]} names
   * @param {string} description for those who do not see the canvas
   */
  show(states, names, description) {
    this.#states = states;
    this.#names = names;
    this.#canvas.setAttribute("aria-label", description);
    this.#draw(false);
  }

  /** @param {boolean} anew even if no block has changed */
  #draw(anew) {
    const width = this.#canvas.clientWidth;
    const states = this.#states.join();
    if (!width || !states || (!anew && states === this.#shown)) return;
    this.#shown = states;
    const { size, pitch, columns, blocksPerCell } = layOut(this.#states.length, width);
    this.blocksPerCell = blocksPerCell;
    const cells = summarize(this.#states, blocksPerCell);
    const rows = Math.ceil(cells.length / columns);
    const context = sizedContext(this.#canvas, width, rows * pitch - (pitch - size));
    const colours = stateColours(this.#names);
    const step = rows > 1 ? (width - size) / (columns - 1) : pitch; // full rows reach from edge to edge
    cells.forEach((state, i) => {
      const x = Math.round((i % columns) * step), y = Math.floor(i / columns) * pitch;
      drawCell(context, this.#names[state], x, y, size, colours);
    });
  }
}

/**
 * The largest cells that fit. If even the smallest do not, a cell stands for several blocks.
 * @param {number} numBlocks
 * @param {number} width
 * @returns {Layout}
 */
function layOut(numBlocks, width) {
  for (let size = LARGEST_CELL; size >= SMALLEST_CELL; size -= 1) {
    const gap = size >= 12 ? 3 : size >= 6 ? 2 : 1;
    const pitch = size + gap;
    const columns = Math.max(1, Math.floor((width + gap) / pitch));
    const rows = Math.floor((HEIGHT + gap) / pitch);
    if (numBlocks <= columns * rows) return { size, pitch, columns, blocksPerCell: 1 };
    if (size === SMALLEST_CELL) return { size, pitch, columns, blocksPerCell: Math.ceil(numBlocks / (columns * rows)) };
  }
  throw new Error("unreachable");
}

/**
 * One state for every `blocksPerCell` blocks: the highest, which is the one where most happens.
 * @param {Uint8Array} states
 * @param {number} blocksPerCell
 */
function summarize(states, blocksPerCell) {
  if (blocksPerCell === 1) return states;
  const cells = new Uint8Array(Math.ceil(states.length / blocksPerCell));
  states.forEach((state, i) => {
    const cell = Math.floor(i / blocksPerCell);
    cells[cell] = Math.max(cells[cell], state);
  });
  return cells;
}
