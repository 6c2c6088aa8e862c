/** Requests to the server. Every failure becomes a ServerError, whose message can be shown. */

import { askForKey, storedKey } from "./key.js";

export const UNREACHABLE = "The server cannot be reached. Check that it is running, and try again.";

export class ServerError extends Error {
  /**
   * @param {string} message a sentence for the user
   * @param {number} [status] of the HTTP response, if there was one
   */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/**
 * Send a request, with the API key if there is one. If the server refuses the key, ask the user for one and try again.
 * @param {string} path
 * @param {{ body?: object, signal?: AbortSignal, mayAsk?: boolean }} [options] mayAsk: whether to ask for a key
 * @returns {Promise<Response>} a successful one
 */
export async function request(path, { body, signal, mayAsk = true } = {}) {
  for (;;) {
    const key = storedKey();
    const response = await send(path, body, signal, key);
    if (response.ok) return response;
    const isRefusedKey = response.status === 401;
    if (!isRefusedKey || !mayAsk || !(await askForKey(key))) throw await failure(response);
  }
}

/**
 * @param {string} path
 * @param {object | undefined} body
 * @param {AbortSignal | undefined} signal
 * @param {string | null} key
 */
async function send(path, body, signal, key) {
  /** @type {Record<string, string>} */
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError(UNREACHABLE);
  }
}

/** @param {Response} response */
async function failure(response) {
  const said = sentence(await messageOf(response));
  const { status } = response;
  if (status === 401) return new ServerError("The server asks for an API key.", status);
  if (status === 413) return new ServerError(`The document or the conversation is too large. ${said}`, status);
  if (status === 429) {
    const wait = response.headers.get("Retry-After");
    const remedy = wait ? ` Try again in ${wait} s.` : " Try again in a moment.";
    return new ServerError(`The server is busy.${remedy} ${said}`, status);
  }
  if (status >= 500) return new ServerError(`The server has failed (status ${status}). ${said}`, status);
  return new ServerError(said || `The server refused the request (status ${status}).`, status);
}

/** @param {Response} response */
async function messageOf(response) {
  try {
    const { error } = await response.json();
    return typeof error?.message === "string" ? error.message : "";
  } catch {
    return ""; // not the server itself, but perhaps a proxy in front of it
  }
}

/** @param {string} text */
export function sentence(text) {
  if (!text) return "";
  const capitalized = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(capitalized) ? capitalized : `${capitalized}.`;
}
