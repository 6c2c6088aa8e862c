/** One answer: the request, and its stream of server-sent events. */

import { ServerError, request, sentence } from "./api.js";

/**
 * @typedef {{ prompt_tokens: number, completion_tokens: number, prompt_tokens_details?: { cached_tokens?: number } }}
 *   Usage
 * @typedef {{ text?: string, finishReason?: string, usage?: Usage }} Piece what a chunk of the answer brings
 * @typedef {{ temperature: number | null, maxTokens: number, format: "chat" | "text" }} Settings
 * @typedef {Settings & { maxRequestTokens: number }} Options maxRequestTokens: of prompt and answer together
 */

/**
 * Ask the model to continue the conversation, and yield its answer piece by piece.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {Options} options
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Piece>}
 */
export async function* complete(conversation, options, signal) {
  const isChat = options.format === "chat";
  const prompt = isChat ? { messages: conversation.chatMessages() } : { prompt: conversation.plainText() };
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  const body = {
    ...prompt,
    max_tokens: options.maxTokens,
    ...(options.temperature === null ? {} : { temperature: options.temperature }),
    stream: true,
    stream_options: { include_usage: true },
  };
  const response = await requestThatFits(path, body, options.maxRequestTokens, signal);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    yield pieceOf(JSON.parse(data));
  }
  throw new ServerError("The connection ended before the answer did.");
}

/**
 * The longest answer is a limit: where the context has less room, the answer gets what there is.
 * @param {string} path
 * @param {{ max_tokens: number }} body
 * @param {number} maxRequestTokens
 * @param {AbortSignal} signal
 */
async function requestThatFits(path, body, maxRequestTokens, signal) {
  try {
    return await request(path, { body, signal });
  } catch (error) {
    const [, promptTokens] = /^Prompt of (\d+) tokens \+ max_tokens=/.exec(error.message) ?? [];
    const room = maxRequestTokens - Number(promptTokens);
    if (!(room > 0)) throw error;
    return request(path, { body: { ...body, max_tokens: room }, signal });
  }
}

/** @param {any} chunk of either endpoint */
function pieceOf(chunk) {
  if (chunk.error) throw new ServerError(sentence(chunk.error.message ?? "the server has ended the answer"));
  const choice = chunk.choices?.[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    finishReason: choice?.finish_reason ?? undefined,
    usage: chunk.usage ?? undefined,
  };
}

/**
 * The data of each event. An event ends with an empty line; lines that are not data, such as comments, are skipped.
 * @param {Response} response
 * @returns {AsyncGenerator<string>}
 */
async function* events(response) {
  let rest = "";
  for await (const text of texts(response)) {
    const complete = (rest + text).replaceAll("\r\n", "\n").split("\n\n");
    rest = complete.pop() ?? "";
    for (const event of complete) {
      const data = event.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

/**
 * @param {Response} response
 * @returns {AsyncGenerator<string>}
 */
async function* texts(response) {
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (/** @type {Error} */ (error).name === "AbortError") throw error;
    throw new ServerError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}
