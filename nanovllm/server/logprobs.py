"""Log-probabilities in OpenAI's two forms, one for completions and one for chat, and in vLLM's for prompts."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nanovllm.core.logprobs import Logprob, TokenLogprobs


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None], num_top: int, *, first_text: str = "", offset: int = 0
) -> dict[str, Any]:
    """One entry per token. The entry of a prompt's first token is None, and its text is `first_text`.

    offset: where the first token begins in the text.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    for entry in entries:
        text, logprob, top = first_text, None, None
        if entry is not None:
            token_id, own = next(iter(entry.items()))
            text, logprob, top = token_text(token_id, own), own.logprob, _top_by_text(entry, num_top)
        tokens.append(text)
        token_logprobs.append(logprob)
        top_logprobs.append(top)
        text_offset.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def chat_logprobs(entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    content = []
    for entry in entries:
        token_id, own = next(iter(entry.items()))
        top = sorted((each for each in entry.items() if each[1].rank <= num_top), key=lambda each: each[1].rank)
        content.append(_chat_token(token_id, own) | {"top_logprobs": [_chat_token(*each) for each in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Iterable[TokenLogprobs | None], num_top: int) -> Iterator[dict[str, Any] | None]:
    """vLLM's form: token id -> logprob, rank and text. An iterator, because those of a book would take gigabytes."""
    return (None if entry is None else _prompt_position(entry, num_top) for entry in entries)


def token_text(token_id: int, logprob: Logprob) -> str:
    """The token's text, or its id in vLLM's form without a tokenizer."""
    return f"token_id:{token_id}" if logprob.text is None else logprob.text


def _top_by_text(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Text -> log-probability of the token itself and of the most likely ones.

    Several tokens can have the same text, such as parts of a character. The most likely of them counts.
    """
    top: dict[str, float] = {}
    for i, (token_id, each) in enumerate(entry.items()):
        if i == 0 or each.rank <= num_top:
            text = token_text(token_id, each)
            top[text] = max(each.logprob, top.get(text, each.logprob))
    return top


def _chat_token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = token_text(token_id, logprob)
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}


def _prompt_position(entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.text}
        for i, (token_id, each) in enumerate(entry.items())
        if i == 0 or each.rank <= num_top
    }
