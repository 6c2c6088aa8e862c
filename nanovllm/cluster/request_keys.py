"""RequestKey: what the choice of a replica depends on, made from the beginning of a request's prompt.

A key holds hashes of the prompt's beginnings, which are 256 bytes long, 512, 1024 and so on. Two requests about the
same document agree in all hashes up to half of the document or more. A cache salt goes into every hash, so requests
that do not share KV do not share beginnings either.
"""

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

MIN_BEGINNING_BYTES = 256  # shorter beginnings take no time worth saving


@dataclass(frozen=True)
class RequestKey:
    """beginnings: the hash of each beginning, shortest first. text_hash: of the whole prompt, or its longest beginning.

    is_sticky: the same replica answers all of these requests, however long its queue is.
    """

    beginnings: tuple[int, ...] = ()
    text_hash: int = 0
    is_sticky: bool = False


def request_key(method: str, path: str, body: bytes, key_salt: str | None) -> RequestKey:
    """The key of an HTTP request. A body that is malformed has no beginnings; the replica says what is wrong with it.

    key_salt: the cache salt of the request's API key, if there is one.
    """
    if method != "POST":
        return RequestKey(is_sticky=True)  # so that the page at / shows one replica's cache, not a mixture
    try:
        fields = json.loads(body)
        prompt = _prompt_bytes(path, fields)
    except (ValueError, RecursionError, TypeError, OverflowError, AttributeError, KeyError, IndexError):
        return RequestKey()
    salt = f"{key_salt or ''} {fields.get('cache_salt') or ''}"
    return key_of(prompt, salt.encode(errors="surrogatepass"))


def key_of(prompt: bytes, salt: bytes = b"") -> RequestKey:
    """The key of a prompt, given as the bytes of its text or of its token ids."""
    digest = xxhash.xxh3_64(salt + b"\0")
    beginnings, start, end = [], 0, MIN_BEGINNING_BYTES
    while end <= len(prompt):
        digest.update(memoryview(prompt)[start:end])
        beginnings.append(digest.intdigest())
        start, end = end, 2 * end
    if not beginnings:
        digest.update(prompt)
    return RequestKey(tuple(beginnings), digest.intdigest())


def _prompt_bytes(path: str, fields: dict[str, Any]) -> bytes:
    """The prompt as bytes; of several prompts, the first. Raises one of the errors that `request_key` catches."""
    if path == "/v1/completions":
        prompt = fields["prompt"]
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        return prompt.encode(errors="surrogatepass") if isinstance(prompt, str) else array("q", prompt).tobytes()
    if path == "/v1/chat/completions":
        text = "".join(_chat_parts(fields))
        return text.encode(errors="surrogatepass")
    raise KeyError(path)


def _chat_parts(fields: dict[str, Any]) -> Iterable[str]:
    """What the chat template makes the prompt of, in its order: tools come first."""
    if fields.get("tools"):
        yield json.dumps(fields["tools"])
    for message in fields["messages"]:
        yield f"\n{message['role']}\n"
        content = message.get("content") or ""
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content)
