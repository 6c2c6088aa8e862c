/** The KV cache, live: a cell for each block, what the cells mean, and rates. The colours are in page.css. */

import { ServerError, byId, counted, element, request, short, whole } from "./common.js";

// How often a snapshot is asked for, and only while the page can be seen
const BUSY_MS = 250;
const IDLE_MS = 1000;
const LOST_MS = 3000; // after a snapshot that did not come

const LARGEST_CELL = 20; // sizes in CSS pixels
const SMALLEST_CELL = 2;
const MIN_SHAPE = 7; // from which on a cell has room for a shape
const MAX_HEIGHT = 300;
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

/** What is cut out of a cell of this state. */
const SHAPES = {
  waiting: (context, x, y, size) => context.rect(x + size * 0.2, y + size * 0.42, size * 0.6, size * 0.16),
  cpu_attended: (context, x, y, size) => context.arc(x + size / 2, y + size / 2, size * 0.22, 0, 2 * Math.PI),
  streamed: (context, x, y, size) => {
    context.moveTo(x + size * 0.3, y + size * 0.2);
    context.lineTo(x + size * 0.75, y + size * 0.5);
    context.lineTo(x + size * 0.3, y + size * 0.8);
  },
  written: (context, x, y, size) => {
    context.rect(x + size * 0.42, y + size * 0.2, size * 0.16, size * 0.6);
    context.rect(x + size * 0.2, y + size * 0.42, size * 0.6, size * 0.16);
  },
};

/** Follows GET /kvcache, whose JSON object server/page.py makes. */
export class CacheView {
  #isAnswering;
  #whenBack;
  #isLost = false;
  #timer = 0;
  #legend = new Map(); // state -> the elements that show it
  #snapshot = null; // the last one
  #drawn = ""; // the states on the canvas
  #highest = { link: 0, cpu: 0 }; // rates, to draw the meters against where start-up has measured no limit

  /** isAnswering: returns true while this page waits for an answer. whenBack: called when the server answers again. */
  constructor(isAnswering, whenBack) {
    this.#isAnswering = isAnswering;
    this.#whenBack = whenBack;
    for (const [state, words] of Object.entries(NAMES)) {
      const row = element("li", ""), count = element("span", "count", "0"), share = element("span", "share");
      const swatch = element("canvas", "swatch");
      swatch.setAttribute("aria-hidden", "true");
      row.dataset.state = state;
      share.style.background = colourOf(state);
      row.append(swatch, element("span", "", words), count);
      byId("legend").append(row);
      byId("shares").append(share);
      this.#legend.set(state, { row, swatch, count, share });
    }
    this.#drawSwatches();
    new ResizeObserver(() => this.#drawGrid()).observe(byId("grid"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#drawSwatches();
      this.#drawGrid();
    });
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Ask now, and from then on again and again. */
  async refresh() {
    clearTimeout(this.#timer);
    if (document.hidden) return; // `visibilitychange` goes on
    let pauseMs = LOST_MS;
    try {
      this.#show(await (await request("kvcache", { mayAsk: false })).json());
      if (this.#isLost) this.#whenBack();
      this.#isLost = false;
      pauseMs = this.#isAnswering() || this.#snapshot.num_running ? BUSY_MS : IDLE_MS;
    } catch (error) {
      this.#showLost(error);
    }
    clearTimeout(this.#timer); // `refresh` may have been called again meanwhile
    this.#timer = setTimeout(() => this.refresh(), pauseMs);
  }

  #show(snapshot) {
    const states = Uint8Array.from(atob(snapshot.states), (byte) => byte.charCodeAt(0));
    const counts = Object.fromEntries(snapshot.state_names.map((name) => [name, 0]));
    for (const state of states) counts[snapshot.state_names[state]] += 1;
    this.#snapshot = { ...snapshot, states };
    byId("cache").classList.remove("lost");
    const used = whole(states.length - counts.free);
    byId("cache-summary").textContent = `${used} of ${counted(states.length, "block")} in use`;
    this.#showLegend(counts);
    if (this.#drawn !== states.join()) this.#drawGrid();
    this.#showMeter("link", snapshot.rates.link_byte_per_s, snapshot.limits.link_byte_per_s);
    this.#showMeter("cpu", snapshot.rates.cpu_byte_per_s, snapshot.limits.cpu_byte_per_s);
    this.#showFigures();
  }

  #showLost(error) {
    const status = error instanceof ServerError ? error.status : undefined;
    const why = status === 401 ? "needs an API key" : status === 503 ? "the engine has failed" : "no connection";
    this.#isLost = true;
    byId("cache").classList.add("lost");
    byId("cache-summary").textContent = why;
  }

  #showLegend(counts) {
    const said = [];
    for (const [state, { row, count, share }] of this.#legend) {
      row.hidden = this.#snapshot.num_slots === null && ONLY_WITH_OFFLOAD.includes(state);
      row.classList.toggle("none", counts[state] === 0);
      count.textContent = whole(counts[state]);
      share.style.flexGrow = String(counts[state]);
      if (counts[state]) said.push(`${whole(counts[state])} ${NAMES[state]}`);
    }
    byId("grid").setAttribute(
      "aria-label", `KV cache of ${counted(this.#snapshot.num_blocks, "block")}: ${said.join(", ")}`);
  }

  #drawSwatches() {
    const colours = stateColours(Object.keys(NAMES));
    for (const [state, { swatch }] of this.#legend) {
      drawCell(sizedContext(swatch, SWATCH, SWATCH), state, 0, 0, SWATCH, colours);
    }
  }

  /** The blocks in the order in which they lie in memory. */
  #drawGrid() {
    const canvas = byId("grid"), width = canvas.clientWidth;
    if (!width || this.#snapshot === null) return;
    const { states, state_names: names, block_size: blockSize, num_slots: numSlots } = this.#snapshot;
    const { size, pitch, columns, blocksPerCell } = layOut(states.length, width);
    const cells = summarize(states, blocksPerCell);
    const rows = Math.ceil(cells.length / columns);
    const context = sizedContext(canvas, width, rows * pitch - (pitch - size));
    const colours = stateColours(names);
    const step = rows > 1 ? (width - size) / (columns - 1) : pitch; // full rows reach from edge to edge
    cells.forEach((state, i) => {
      const x = Math.round((i % columns) * step), y = Math.floor(i / columns) * pitch;
      drawCell(context, names[state], x, y, size, colours);
    });
    this.#drawn = states.join();
    const place = numSlots === null ? "on the GPU" : `in CPU memory, with ${counted(numSlots, "slot")} on the GPU`;
    const cell = blocksPerCell === 1 ? "One cell is one block" : `One cell is ${whole(blocksPerCell)} blocks`;
    byId("grid-caption").textContent =
      `${cell} of ${whole(blockSize)} tokens. Room for ${whole(states.length * blockSize)} tokens ${place}.`;
  }

  /** rate: null as long as it is not known. limit: null if it was not measured. */
  #showMeter(name, rate, limit) {
    const hasOffload = this.#snapshot.num_slots !== null;
    byId(`${name}-row`).hidden = !hasOffload;
    if (!hasOffload) return;
    this.#highest[name] = Math.max(this.#highest[name], rate ?? 0);
    const full = limit ?? this.#highest[name];
    const share = full > 0 ? Math.min(1, (rate ?? 0) / full) : 0;
    const words = rate === null ? "–" : byteRate(rate) + (limit === null ? "" : ` of ${byteRate(limit)}`);
    byId(`${name}-value`).textContent = words;
    const meter = byId(`${name}-meter`);
    meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
    meter.setAttribute("aria-valuetext", words);
    meter.firstElementChild.style.width = `${share * 100}%`;
  }

  #showFigures() {
    const { rates, guess_acceptance: acceptance, tokens_per_pass: tokens, num_running, num_waiting } = this.#snapshot;
    byId("decode-rate").textContent = tokenRate(rates.decode_token_per_s);
    byId("prefill-rate").textContent = tokenRate(rates.prefill_token_per_s);
    byId("guesses").hidden = acceptance === null;
    const perPass = tokens === null ? "" : `, ${tokens.toFixed(1)} a pass`;
    byId("acceptance").textContent = acceptance === null ? "–" : `${whole(acceptance * 100)}%${perPass}`;
    const waiting = num_waiting ? `, ${whole(num_waiting)} waiting` : "";
    byId("requests").textContent = `${whole(num_running)} running${waiting}`;
  }
}

const byteRate = (rate) => (rate >= 1e9 ? `${short(rate / 1e9)} GB/s` : `${short(rate / 1e6)} MB/s`);
const tokenRate = (rate) => (rate === null ? "–" : `${short(rate)} tok/s`);

/** The largest cells that fit. If even the smallest do not, a cell stands for several blocks. */
function layOut(numBlocks, width) {
  for (let size = LARGEST_CELL; ; size -= 1) {
    const gap = size >= 12 ? 3 : size >= 6 ? 2 : 1;
    const pitch = size + gap;
    const columns = Math.max(1, Math.floor((width + gap) / pitch));
    const room = columns * Math.floor((MAX_HEIGHT + gap) / pitch);
    if (numBlocks <= room) return { size, pitch, columns, blocksPerCell: 1 };
    if (size === SMALLEST_CELL) return { size, pitch, columns, blocksPerCell: Math.ceil(numBlocks / room) };
  }
}

/** One state for every `blocksPerCell` blocks: the highest, which is the one where most happens. */
function summarize(states, blocksPerCell) {
  const cells = new Uint8Array(Math.ceil(states.length / blocksPerCell));
  states.forEach((state, i) => {
    const cell = Math.floor(i / blocksPerCell);
    cells[cell] = Math.max(cells[cell], state);
  });
  return cells;
}

const colourOf = (name) => `var(--${name.replaceAll("_", "-")})`;

/** The colours of the page's current theme, as a canvas takes them. */
function stateColours(names) {
  const { style } = byId("grid");
  return Object.fromEntries([...names, "cut", "outline"].map((name) => {
    style.color = colourOf(name);
    return [name, getComputedStyle(byId("grid")).color];
  }));
}

function drawCell(context, state, x, y, size, colours) {
  const hasShape = size >= MIN_SHAPE;
  const radius = hasShape ? size * 0.18 : 0;
  context.beginPath();
  if (state === "free" && hasShape) {
    context.roundRect(x + 0.5, y + 0.5, size - 1, size - 1, radius);
    context.strokeStyle = colours.outline;
    context.stroke();
    return;
  }
  context.roundRect(x, y, size, size, radius);
  context.fillStyle = state === "free" ? colours.outline : colours[state];
  context.fill();
  if (hasShape && SHAPES[state]) {
    context.beginPath();
    SHAPES[state](context, x, y, size);
    context.fillStyle = colours.cut;
    context.fill();
  }
}

/** A context that is sharp on screens with any number of pixels per CSS pixel. */
function sizedContext(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}
