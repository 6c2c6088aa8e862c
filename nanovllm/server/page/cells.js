/** How a block is drawn: each state has a colour and, where there is room for it, a shape. */

/** Size in CSS pixels from which a cell has room for a shape. */
const MIN_SHAPE_PX = 7;

/** @typedef {(context: CanvasRenderingContext2D, x: number, y: number, size: number) => void} Shape cut out of a cell */

/** @type {Record<string, Shape>} */
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

/**
 * The colours of the page's current theme, which page.css defines.
 * @param {string[]} names of the states
 * @returns {Record<string, string>}
 */
export function stateColours(names) {
  const style = getComputedStyle(document.documentElement);
  const colour = (/** @type {string} */ name) => style.getPropertyValue(`--${name.replaceAll("_", "-")}`).trim();
  return Object.fromEntries([...names, "cut", "outline"].map((name) => [name, colour(name)]));
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} name of the state
 * @param {number} x
 * @param {number} y
 * @param {number} size
 * @param {Record<string, string>} colours
 */
export function drawCell(context, name, x, y, size, colours) {
  const radius = size >= MIN_SHAPE_PX ? size * 0.18 : 0;
  context.beginPath();
  if (name === "free" && size >= MIN_SHAPE_PX) {
    context.roundRect(x + 0.5, y + 0.5, size - 1, size - 1, radius);
    context.strokeStyle = colours.outline;
    context.stroke();
    return;
  }
  context.roundRect(x, y, size, size, radius);
  context.fillStyle = name === "free" ? colours.outline : colours[name];
  context.fill();
  if (size >= MIN_SHAPE_PX && SHAPES[name]) {
    context.beginPath();
    SHAPES[name](context, x, y, size);
    context.fillStyle = colours.cut;
    context.fill();
  }
}

/**
 * Make the canvas sharp on screens with any number of pixels per CSS pixel.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width in CSS pixels
 * @param {number} height
 */
export function sizedContext(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}
