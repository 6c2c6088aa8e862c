/** The link and the CPU as meters, and the figures below them. */

import { byteRate, tokenRate, whole } from "./numbers.js";
import { byId } from "./page_elements.js";

/** The highest rates seen, which the meters are drawn against where start-up has measured no limit. */
const highest = { link: 0, cpu: 0 };

/** @param {import("./cache_view.js").Snapshot} snapshot */
export function showMeters({ rates, limits, num_slots: numSlots }) {
  const hasOffload = numSlots !== null;
  showMeter("link", hasOffload, rates.link_byte_per_s, limits.link_byte_per_s);
  showMeter("cpu", hasOffload, rates.cpu_byte_per_s, limits.cpu_byte_per_s);
}

/**
 * @param {"link" | "cpu"} name
 * @param {boolean} isShown
 * @param {number | null} rate null: not known yet
 * @param {number | null} limit null: not measured
 */
function showMeter(name, isShown, rate, limit) {
  byId(`${name}-row`).hidden = !isShown;
  if (!isShown) return;
  highest[name] = Math.max(highest[name], rate ?? 0);
  const full = limit ?? highest[name];
  const share = full > 0 ? Math.min(1, (rate ?? 0) / full) : 0;
  const words = rate === null ? "–" : byteRate(rate) + (limit === null ? "" : ` of ${byteRate(limit)}`);
  byId(`${name}-value`).textContent = words;
  const meter = byId(`${name}-meter`);
  meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  meter.setAttribute("aria-valuetext", words);
  meter.firstElementChild.style.width = `${share * 100}%`;
}

/** @param {import("./cache_view.js").Snapshot} snapshot */
export function showFigures(snapshot) {
  byId("decode-rate").textContent = tokenRate(snapshot.rates.decode_token_per_s);
  byId("prefill-rate").textContent = tokenRate(snapshot.rates.prefill_token_per_s);
  const { guess_acceptance: acceptance, tokens_per_pass: tokens } = snapshot;
  byId("guesses").hidden = acceptance === null;
  if (acceptance !== null) {
    const perPass = tokens === null ? "" : `, ${tokens.toFixed(1)} a pass`;
    byId("acceptance").textContent = `${whole(acceptance * 100)}%${perPass}`;
  }
  const waiting = snapshot.num_waiting ? `, ${whole(snapshot.num_waiting)} waiting` : "";
  byId("requests").textContent = `${whole(snapshot.num_running)} running${waiting}`;
}
