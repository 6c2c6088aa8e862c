"""PrefixRouting: which replica answers a request. It remembers which replicas have read the beginnings of prompts.

A request goes to a replica that has read the beginning of its prompt, because the KV of the beginning is in the prefix
cache there. It goes elsewhere if that replica's queue is too long; from then on, several replicas hold the beginning.

A RequestKey holds hashes of the prompt's beginnings, which are 256 bytes long, 512, 1024 and so on. Two requests about
the same document agree in all hashes up to half of the document or more. A cache salt goes into every hash, so requests
that do not share KV do not share beginnings either. Only a request's two longest beginnings are looked up. They cover
at least a quarter of the prompt, so a system prompt that all requests share does not draw them all to one replica,
unless it is most of what they send.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

MIN_BEGINNING_BYTES = 256  # shorter beginnings take no time worth saving
NUM_LOOKED_UP = 2
BILLING_HEADER = re.compile(r'x-anthropic-billing-header:[^"]*')  # not in the prompt; it differs in each request
MAX_QUEUE_GAP = 16  # requests that a replica's queue may be longer than the shortest one, for the sake of its cache
MAX_BEGINNINGS = 1 << 16  # remembered at most: about 15 MB, and 5,000 prompts of 4 MB


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
    if path in ("/v1/responses", "/v1/messages"):
        parts = [fields.get(name) for name in ("tools", "instructions", "system", "messages", "input")]
        return BILLING_HEADER.sub("", json.dumps(parts), count=1).encode()
    raise KeyError(path)


def _chat_parts(fields: dict[str, Any]) -> Iterable[str]:
    """Yield what the chat template makes the prompt of, in its order: tools come first."""
    if fields.get("tools"):
        yield json.dumps(fields["tools"])
    for message in fields["messages"]:
        yield f"\n{message['role']}\n"
        content = message.get("content") or ""
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content)


class PrefixRouting:
    """Used in one thread. Replicas are named by strings; `queues` has the number of open requests of each."""

    def __init__(self, max_queue_gap: int = MAX_QUEUE_GAP, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._max_queue_gap, self._max_beginnings = max_queue_gap, max_beginnings
        self._holders: OrderedDict[int, set[str]] = OrderedDict()  # by beginning, the least recently used first

    def choose(self, key: RequestKey, queues: Mapping[str, int]) -> str:
        """The replica for a request, which is assumed to read the prompt. `queues` must not be empty."""
        replica = self._choose(key, queues)
        self._remember(key.beginnings, replica)
        return replica

    def forget_all_but(self, replicas: Collection[str]) -> None:
        """The caches of all other replicas are gone."""
        for beginning, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[beginning]

    def _choose(self, key: RequestKey, queues: Mapping[str, int]) -> str:
        if key.is_sticky:
            return _preferred(queues, key.text_hash)
        longest_allowed = min(queues.values()) + self._max_queue_gap
        for beginning in key.beginnings[: -NUM_LOOKED_UP - 1 : -1]:
            holders = self._holders.get(beginning, set()) & queues.keys()
            if holders:
                replica = _shortest_queue({holder: queues[holder] for holder in holders}, key.text_hash)
                if queues[replica] <= longest_allowed:
                    return replica
        return _shortest_queue(queues, key.text_hash)

    def _remember(self, beginnings: tuple[int, ...], replica: str) -> None:
        for beginning in beginnings:
            self._holders.setdefault(beginning, set()).add(replica)
            self._holders.move_to_end(beginning)
        while len(self._holders) > self._max_beginnings:
            self._holders.popitem(last=False)


def _shortest_queue(queues: Mapping[str, int], text_hash: int) -> str:
    shortest = min(queues.values())
    return _preferred([replica for replica, queue in queues.items() if queue == shortest], text_hash)


def _preferred(replicas: Collection[str], text_hash: int) -> str:
    """Choose by rendezvous hashing: a text keeps its replica as long as that exists, whichever others come and go."""
    return max(replicas, key=lambda replica: (xxhash.xxh3_64_intdigest(f"{text_hash} {replica}".encode()), replica))
