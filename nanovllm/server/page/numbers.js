/** How numbers are written. English, as the page is. */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number} value */
export function whole(value) {
  return WHOLE.format(value);
}

/**
 * Three significant digits, such as 0.312, 4.71 or 1,230.
 * @param {number} value
 */
export function short(value) {
  if (value === 0) return "0";
  if (value >= 100) return WHOLE.format(value);
  return value < 0.001 ? "<0.001" : value.toPrecision(3);
}

/** @param {number} milliseconds */
export function duration(milliseconds) {
  return milliseconds < 1000 ? `${whole(milliseconds)} ms` : `${short(milliseconds / 1000)} s`;
}

/**
 * @param {number} count
 * @param {string} noun in the singular
 */
export function counted(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** @param {number} bytesPerSecond */
export function byteRate(bytesPerSecond) {
  if (bytesPerSecond >= 1e9) return `${short(bytesPerSecond / 1e9)} GB/s`;
  return `${short(bytesPerSecond / 1e6)} MB/s`;
}

/** @param {number | null} tokensPerSecond null: not known yet */
export function tokenRate(tokensPerSecond) {
  return tokensPerSecond === null ? "–" : `${short(tokensPerSecond)} tok/s`;
}
