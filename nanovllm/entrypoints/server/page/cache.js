/** The KV cache, live: a cell for each block in use, what the cells mean, and rates. The colours are in page.css. */

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

/** The states in the order in which the legend shows them, and their names in words: with a GPU, and on a CPU alone. */
const NAMES = {
  written: "being written",
  resident: "on the GPU",
  streamed: "streamed to the GPU",
  cpu_attended: "attended to by the CPU",
  waiting: "waiting in CPU memory",
  cached: "kept for later prompts",
};
const NAMES_ON_CPU = {
  ...NAMES,
  resident: "at hand",
  streamed: "copied to be at hand",
  cpu_attended: "attended to where they lie",
  waiting: "waiting",
};

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

/** Follows GET /kvcache, whose JSON object entrypoints/server/page.py makes. */
export class CacheView {
  #documents;
  #isAnswering;
  #whenBack;
  #isLost = false;
  #timer = 0;
  #legend = new Map(); // state -> the elements that show it
  #snapshot = null; // the last one
  #cells = []; // those on the canvas: {x, y, size, state, blocks, owner}
  #drawn = ""; // what is on the canvas: states and blocks of documents
  #highest = { link: 0, cpu: 0 }; // rates, to draw the meters against where start-up has measured no limit

  /**
   * isAnswering: returns true while this page waits for an answer. whenBack: called when the server answers again.
   * documents: the Documents that the cells belong to.
   */
  constructor(isAnswering, whenBack, documents) {
    this.#documents = documents;
    this.#isAnswering = isAnswering;
    this.#whenBack = whenBack;
    for (const [state, words] of Object.entries(NAMES)) {
      const row = element("li", ""), count = element("span", "count", "0"), share = element("span", "share");
      const name = element("span", "", words);
      const swatch = element("canvas", "swatch");
      swatch.setAttribute("aria-hidden", "true");
      row.dataset.state = state;
      share.style.background = colourOf(state);
      row.append(swatch, name, count);
      byId("legend").append(row);
      byId("free-share").before(share);
      this.#legend.set(state, { row, name, swatch, count, share });
    }
    this.#drawSwatches();
    new ResizeObserver(() => this.#drawGrid()).observe(byId("grid"));
    byId("grid").addEventListener("pointermove", (event) => this.#showCell(event));
    byId("grid").addEventListener("pointerleave", () => this.#showCaption());
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
    this.#documents.showSnapshot(this.#snapshot);
    byId("cache").classList.remove("lost");
    byId("cache-summary").textContent = this.#sentence(counts);
    this.#showLegend(counts);
    const shown = [states, ...this.#documents.blocks.map(({ blockIds }) => blockIds)].join(";");
    if (this.#drawn !== shown) this.#drawGrid();
    this.#drawn = shown;
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

  /** Such as "2,304 of 16,384 tokens in use, 768 on the GPU". */
  #sentence(counts) {
    const { states, block_size: size, has_gpu: hasGpu, num_slots: numSlots } = this.#snapshot;
    const used = states.length - counts.free, room = states.length * size;
    if (!used) {
      const most = this.#documents.maxRequestTokens;
      const inOneChat = most && most < room ? `, up to ${whole(most)} in one chat` : "";
      return `empty, room for ${counted(room, "token")}${inOneChat}`;
    }
    const onGpu = hasGpu && numSlots !== null ? `, ${whole(counts.resident * size)} on the GPU` : "";
    return `${whole(used * size)} of ${counted(room, "token")} in use${onGpu}`;
  }

  get #names() {
    return this.#snapshot.has_gpu ? NAMES : NAMES_ON_CPU;
  }

  /** States without a block are left out. */
  #showLegend(counts) {
    const said = [];
    for (const [state, { row, name, count, share }] of this.#legend) {
      row.hidden = counts[state] === 0;
      name.textContent = this.#names[state];
      count.textContent = whole(counts[state]);
      share.style.flexGrow = String(counts[state]);
      share.style.minWidth = counts[state] ? "2px" : "0"; // a few blocks of many can still be seen
      if (counts[state]) said.push(`${whole(counts[state])} ${this.#names[state]}`);
    }
    byId("free-share").style.flexGrow = String(counts.free);
    byId("grid").setAttribute("aria-label", `KV cache, blocks in use: ${said.join(", ") || "none"}`);
  }

  #drawSwatches() {
    const colours = stateColours(Object.keys(NAMES));
    for (const [state, { swatch }] of this.#legend) {
      drawCell(sizedContext(swatch, SWATCH, SWATCH), state, 0, 0, SWATCH, colours);
    }
  }

  /** The blocks in use: those of each document, then all others in the order in which they lie in memory. */
  #drawGrid() {
    const canvas = byId("grid"), width = canvas.clientWidth;
    if (!width || this.#snapshot === null) return;
    const { states, state_names: names } = this.#snapshot;
    const isUsed = (block) => names[states[block]] !== "free";
    const owners = new Map(this.#documents.blocks.flatMap(({ name, blockIds }) =>
      blockIds.filter(isUsed).map((block) => [block, name])));
    const used = [...owners.keys(), ...[...states.keys()].filter((block) => isUsed(block) && !owners.has(block))];
    const { size, pitch, columns, blocksPerCell } = layOut(used.length, width);
    const rows = Math.ceil(used.length / blocksPerCell / columns);
    const context = sizedContext(canvas, width, Math.max(0, rows * pitch - (pitch - size)));
    const colours = stateColours(Object.keys(NAMES));
    this.#cells = [];
    for (let start = 0; start < used.length; start += blocksPerCell) {
      const blocks = used.slice(start, start + blocksPerCell), i = this.#cells.length;
      const state = names[Math.max(...blocks.map((block) => states[block]))]; // the one where most happens
      const x = (i % columns) * pitch, y = Math.floor(i / columns) * pitch;
      drawCell(context, state, x, y, size, colours);
      this.#cells.push({ x, y, size, state, blocks, owner: owners.get(blocks[0]) });
    }
    this.#showCaption();
  }

  #showCaption() {
    if (this.#snapshot === null) return;
    const { states, block_size: blockSize, num_slots: numSlots, has_gpu: hasGpu } = this.#snapshot;
    const slots = `${counted(numSlots ?? 0, "slot")}${hasGpu ? " on the GPU" : ""}`;
    const inCpu = numSlots === null ? "" : ` in CPU memory, with ${slots}`;
    const perCell = this.#cells[0]?.blocks.length ?? 1, size = `${whole(blockSize)} tokens`;
    const cell = perCell === 1 ? `A cell is a block of ${size}` : `A cell is ${whole(perCell)} blocks of ${size} each`;
    byId("grid-caption").textContent = `${cell}. Room for ${whole(states.length * blockSize)} tokens${inCpu}.`;
  }

  /** The cell under the pointer, in place of the caption. */
  #showCell({ offsetX, offsetY }) {
    const isUnder = ({ x, y, size }) => offsetX >= x && offsetX <= x + size && offsetY >= y && offsetY <= y + size;
    const cell = this.#cells.find(isUnder);
    if (cell === undefined) return this.#showCaption();
    const [first, last] = [cell.blocks[0], cell.blocks.at(-1)];
    const which = first === last ? `Block ${whole(first)}` : `Blocks ${whole(first)} to ${whole(last)}`;
    const owner = cell.owner ? ` of ${cell.owner}` : "";
    byId("grid-caption").textContent = `${which}${owner}: ${this.#names[cell.state]}.`;
  }

  /** rate: null as long as it is not known. limit: null if it was not measured. */
  #showMeter(name, rate, limit) {
    const hasOffload = this.#snapshot.num_slots !== null;
    byId(`${name}-row`).hidden = !hasOffload;
    if (name === "link") byId("link-name").textContent = this.#snapshot.has_gpu ? "CPU–GPU link" : "Copies";
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
    byId("guesses").title = Object.entries(this.#snapshot.drafters).map(drafterText).join("\n");
    byId("decode-rate").textContent = tokenRate(rates.decode_token_per_s);
    byId("prefill-rate").textContent = tokenRate(rates.prefill_token_per_s);
    byId("guesses").hidden = acceptance === null;
    const perPass = tokens === null ? "" : `, ${tokens.toFixed(1)} a pass`;
    byId("acceptance").textContent = acceptance === null ? "–" : `${whole(acceptance * 100)}%${perPass}`;
    const waiting = num_waiting ? `, ${whole(num_waiting)} waiting` : "";
    byId("requests").textContent = `${whole(num_running)} running${waiting}`;
  }
}

/** How often a drafter's guesses were kept, at the first positions and at the last one. */
function drafterText([name, figures]) {
  const shares = figures.accepted_by_position;
  const places = [1, 4, 16, shares.length].filter((place, i, all) => place <= shares.length && all.indexOf(place) === i);
  const byPlace = places.map((place) => `${place}: ${whole(shares[place - 1] * 100)}%`).join(", ");
  return `${name}, guess kept at position ${byPlace}`;
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

const colourOf = (name) => `var(--${name.replaceAll("_", "-")})`;

/** The colours of the page's current theme, as a canvas takes them. */
function stateColours(names) {
  const { style } = byId("grid");
  return Object.fromEntries([...names, "cut"].map((name) => {
    style.color = colourOf(name);
    return [name, getComputedStyle(byId("grid")).color];
  }));
}

function drawCell(context, state, x, y, size, colours) {
  const hasShape = size >= MIN_SHAPE;
  context.beginPath();
  context.roundRect(x, y, size, size, hasShape ? size * 0.18 : 0);
  context.fillStyle = colours[state];
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
