"""What comes out of the engine: finished requests, and what one step brought."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypedDict

from nanovllm.engine.sequence import Sequence


class RequestOutput(TypedDict):
    """What a finished request returns. `text` is None when the model came without a tokenizer.

    It is what decoding `token_ids` gives, up to a stop string. So where max_tokens cuts a character, it ends in U+FFFD.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    ttft_s: float | None  # arrival to first token
    tpot_s: float | None  # mean time between tokens; None for a single token


@dataclass
class StepOutput:
    """What a step brought: `texts` holds the new text of each request that got a token."""

    finished: dict[int, RequestOutput] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    def merge(self, other: "StepOutput") -> None:
        """Add what a later step brought."""
        self.finished |= other.finished
        for request_id, text in other.texts.items():
            self.texts[request_id] = self.texts.get(request_id, "") + text
        self.num_prefill_tokens += other.num_prefill_tokens
        self.num_decode_tokens += other.num_decode_tokens

    def take(self, request_ids: Iterable[int] | None) -> "StepOutput":
        """Remove and return what belongs to these requests (None: to any), and the token counts."""
        ids = set(self.texts) | set(self.finished) if request_ids is None else set(request_ids)
        taken = StepOutput(
            {i: self.finished.pop(i) for i in ids & self.finished.keys()},
            {i: self.texts.pop(i) for i in ids & self.texts.keys()},
            self.num_prefill_tokens,
            self.num_decode_tokens,
        )
        self.num_prefill_tokens = self.num_decode_tokens = 0
        return taken


def request_output(seq: Sequence, text: str | None) -> RequestOutput:
    """What to return of a finished sequence. `text`: its whole answer, None without a tokenizer."""
    token_ids = seq.output_token_ids
    assert seq.finish_reason is not None and seq.first_token_s is not None and seq.last_token_s is not None
    spread_s = seq.last_token_s - seq.first_token_s
    return RequestOutput(
        text=text,
        token_ids=token_ids,
        finish_reason=seq.finish_reason,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_hit_tokens or 0,
        ttft_s=seq.first_token_s - seq.arrival_s,
        tpot_s=spread_s / (len(token_ids) - 1) if len(token_ids) > 1 else None,
    )
