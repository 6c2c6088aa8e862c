"""Prompts of an exact number of tokens for a server's own tokenizer, and the requests that are made of them."""

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

from benchmarks.serve_client import CHAT, COMPLETIONS, Request
from benchmarks.serve_http import HttpClient

Json = dict[str, Any]

# Short common words, so that nearly all of them are one token of a large vocabulary
WORDS = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an had they you were
their one all we can her has there been if more when will would who so no out up into do any your what them time could
than other then its people only two first over new some like may well after made even most work way also many must
before back through years where much still should long see little world house water place right find still light paper
""".split()
TYPICAL_CHARACTERS_PER_TOKEN = 5
MAX_CHARACTERS_PER_TOKEN = 12  # of such text, for any tokenizer
NUM_PROPORTIONAL_TRIES = 6
NUM_TOKENIZING = 4  # requests at a time


class PromptError(Exception):
    """Prompts of the right length cannot be made."""


def random_text(rng: random.Random, num_characters: int) -> str:
    """Words in random order. No two texts have a beginning in common that a prefix cache could use."""
    words: list[str] = []
    missing = num_characters
    while missing > 0:
        words.append(rng.choice(WORDS))
        missing -= len(words[-1]) + 1
    return " ".join(words)


class Tokenizer:
    """The server's tokenizer, asked with /tokenize as in vLLM."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client, self._model = client, model
        self._limit = asyncio.Semaphore(NUM_TOKENIZING)

    async def encode(self, text: str) -> list[int]:
        pieces: list[bytes] = []
        body = json.dumps({"model": self._model, "prompt": text}).encode()
        async with self._limit:
            response = await self._client.send("POST", "/tokenize", body, lambda data, _: pieces.append(data))
        answer = b"".join(pieces)
        if response.status != 200:
            raise PromptError(
                f"/tokenize answered {response.status} ({answer[:200].decode(errors='replace')}); "
                "use --token-ids VOCAB_SIZE for prompts of token ids, if the server takes them"
            )
        return list(json.loads(answer)["tokens"])

    async def text_of(self, rng: random.Random, num_tokens: int) -> tuple[str, list[int]]:
        """A random text of exactly this many tokens, and the tokens.

        Looks for the right length of a longer text. One character more is at most one token more, so between a length
        with too few tokens and one with too many there is one that fits, and halving finds it. Mostly a length in
        proportion to the last count fits after a few tries.
        """
        text = random_text(rng, num_tokens * MAX_CHARACTERS_PER_TOKEN)
        too_short, too_long = 0, len(text) + 1
        guess = num_tokens * TYPICAL_CHARACTERS_PER_TOKEN  # no earlier count, so that the text depends on `rng` alone
        for num_tries in range(100):
            length = min(max(guess, too_short + 1), too_long - 1)
            token_ids = await self.encode(text[:length])
            if len(token_ids) == num_tokens:
                return text[:length], token_ids
            if len(token_ids) < num_tokens:
                too_short = length
            else:
                too_long = length
            if too_long - too_short <= 1:
                break
            guess = length + round((num_tokens - len(token_ids)) * length / max(len(token_ids), 1))
            if num_tries >= NUM_PROPORTIONAL_TRIES:
                guess = (too_short + too_long) // 2
        raise PromptError(f"no text has {num_tokens} tokens for this server; use --token-ids VOCAB_SIZE")


@dataclass(frozen=True)
class Prompt:
    """A prompt as it is sent, and its token ids, if they are known."""

    content: str | list[int]
    num_tokens: int
    token_ids: tuple[int, ...] | None


class RequestMaker:
    """Makes requests with prompts and answers of given lengths."""

    def __init__(
        self,
        client: HttpClient,
        model: str,
        path: str = COMPLETIONS,
        vocab_size: int | None = None,
        body: Json | None = None,
    ) -> None:
        """vocab_size: prompts are random token ids below it, not text. body: fields of every request's body."""
        if vocab_size is not None and path == CHAT:
            raise PromptError("--token-ids needs --endpoint completions: a chat message is text")
        self._tokenizer = Tokenizer(client, model)
        self._path, self._vocab_size = path, vocab_size
        self._body: Json = {"model": model, "temperature": 0.6, "ignore_eos": True, "stream": True}
        self._body["stream_options"] = {"include_usage": True}
        self._extra = body or {}

    async def prompt(self, rng: random.Random, num_tokens: int) -> Prompt:
        if self._vocab_size is not None:
            token_ids = [rng.randrange(self._vocab_size) for _ in range(num_tokens)]
            return Prompt(token_ids, num_tokens, tuple(token_ids))
        text, token_ids = await self._tokenizer.text_of(rng, num_tokens)
        return Prompt(text, num_tokens, tuple(token_ids))

    def question(self, rng: random.Random, document: Prompt, num_tokens: int) -> Prompt:
        """The document with a question after it, of about this many tokens."""
        if isinstance(document.content, list):
            assert self._vocab_size is not None, "the document was made of token ids"
            question = [rng.randrange(self._vocab_size) for _ in range(num_tokens)]
            token_ids = document.content + question
            return Prompt(token_ids, len(token_ids), tuple(token_ids))
        text = f"{document.content}\n\nQuestion: {' '.join(rng.choice(WORDS) for _ in range(num_tokens))}?"
        return Prompt(text, document.num_tokens + num_tokens, None)

    def request(self, prompt: Prompt, max_tokens: int) -> Request:
        body = self._body | {"max_tokens": max_tokens}
        if self._path == CHAT:
            body["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            body["prompt"] = prompt.content
        return Request(self._path, body, prompt.num_tokens, prompt.token_ids).with_body(self._extra)

    async def chats(self, num_requests: int, least: int, most: int, seed: int) -> tuple[Request, ...]:
        """Requests with `least` to `most` tokens in and as many out, evenly distributed."""
        rng = random.Random(seed)
        sizes = [(rng.randint(least, most), rng.randint(least, most), rng.random()) for _ in range(num_requests)]
        prompts = (self.prompt(random.Random(own_seed), num_tokens) for num_tokens, _, own_seed in sizes)
        made = await asyncio.gather(*prompts)
        return tuple(self.request(prompt, num_out) for prompt, (_, num_out, _) in zip(made, sizes, strict=True))
