"""TextReceiver: turns a request's tokens into text, piece by piece, and ends the request at a stop string."""

from collections.abc import Callable

from nanovllm.core.logprobs import PositionLogprobs
from nanovllm.core.outputs import Ending, Outbox, Receiver
from nanovllm.core.sequence import Sequence
from nanovllm.text.detokenizer import Detokenizer


class TextReceiver(Receiver):
    def __init__(
        self,
        outbox: Outbox,
        detokenizer: Detokenizer,
        with_tokens: bool = False,
        text_of: Callable[[int], str | None] = lambda token_id: None,
    ) -> None:
        super().__init__(outbox, with_tokens, text_of)
        self.detokenizer = detokenizer
        self._piece: str | None = None  # decoded but not delivered yet
        self._failure: Ending | None = None  # of a token of the prompt

    def read_prompt(self, logprobs: PositionLogprobs) -> None:
        try:
            super().read_prompt(logprobs)
        except Exception as raised:
            self._failure = _undecodable(raised)

    def read(self, seq: Sequence, logprobs: PositionLogprobs | None = None) -> Ending | None:
        """Decode the new token. The request ends at a stop string, or if its text cannot be decoded."""
        new_token_ids = seq.token_ids[-1:] if seq.error is None else ()
        finished = seq.finish_reason is not None
        at_end_token = finished and seq.error is None and seq.has_end_token
        before = self._piece = self._piece or ""
        if self._failure is not None:
            return self._failure
        try:
            super().read(seq, logprobs)
            self._piece = before + self.detokenizer.update(new_token_ids, finished, at_end_token)
        except Exception as raised:
            return _undecodable(raised)
        return Ending("stop") if self.detokenizer.stopped else None

    def deliver(self, seq: Sequence) -> None:
        if self._piece is not None:
            self.outbox.content.add_text(seq.seq_id, self._piece)
            self._piece = None
        super().deliver(seq)

    def whole_text(self) -> str:
        return self.detokenizer.text


def _undecodable(raised: Exception) -> Ending:
    return Ending("error", f"its text could not be decoded: {type(raised).__name__}: {raised}")
