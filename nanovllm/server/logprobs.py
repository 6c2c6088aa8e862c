"""Log-probabilities in the forms of other APIs: OpenAI's for completions and for chats, and vLLM's for prompts."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from nanovllm.core.outputs import Logprob, TokenLogprobs

PromptEntries: TypeAlias = Sequence[TokenLogprobs | None]


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None], num_top: int, *, first_text: str = "", offset: int = 0
) -> dict[str, Any]:
    """One entry per token. The entry of a prompt's first token is None, and its text is `first_text`.

    offset: where the first token begins in the text.
    """
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        text, logprob, top = first_text, None, None
        if entry is not None:
            token_id, own = next(iter(entry.items()))
            text, logprob, top = _token_text(token_id, own), own.logprob, _top_by_text(entry, num_top)
        columns["tokens"].append(text)
        columns["token_logprobs"].append(logprob)
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(offset)
        offset += len(text)
    return columns


def chat_logprobs(entries: Iterable[TokenLogprobs], num_top: int) -> dict[str, Any]:
    content = []
    for entry in entries:
        top = sorted((each for each in entry.items() if each[1].rank <= num_top), key=lambda each: each[1].rank)
        own = _chat_token(*next(iter(entry.items())))
        content.append(own | {"top_logprobs": [_chat_token(*each) for each in top]})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: PromptEntries, num_top: int) -> Iterator[dict[str, Any] | None]:
    """vLLM's form: token id -> logprob, rank and text. An iterator, because those of a book would take gigabytes."""
    for entry in entries:
        yield (
            None
            if entry is None
            else {
                str(token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.text}
                for token_id, each in _own_and_top(entry, num_top)
            }
        )


def _own_and_top(entry: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The token itself, which comes first, and the most likely ones."""
    return [(token_id, each) for i, (token_id, each) in enumerate(entry.items()) if i == 0 or each.rank <= num_top]


def _top_by_text(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Text -> log-probability of the token itself and of the most likely ones.

    Several tokens can have the same text, such as parts of a character. The most likely of them counts.
    """
    top: dict[str, float] = {}
    for token_id, each in _own_and_top(entry, num_top):
        text = _token_text(token_id, each)
        top[text] = max(each.logprob, top.get(text, each.logprob))
    return top


def _token_text(token_id: int, logprob: Logprob) -> str:
    """The token's text, or its id in vLLM's form without a tokenizer."""
    return f"token_id:{token_id}" if logprob.text is None else logprob.text


def _chat_token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = _token_text(token_id, logprob)
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}
