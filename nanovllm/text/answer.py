"""TextReceiver: turns a request's tokens into text, piece by piece, and ends the request at a stop string."""

from nanovllm.core.outputs import Ending, Outbox, Receiver
from nanovllm.core.sequence import Sequence
from nanovllm.text.detokenizer import Detokenizer


class TextReceiver(Receiver):
    def __init__(self, outbox: Outbox, detokenizer: Detokenizer, with_tokens: bool = False) -> None:
        super().__init__(outbox, with_tokens)
        self.detokenizer = detokenizer
        self._piece: str | None = None  # decoded but not delivered yet

    def read(self, seq: Sequence) -> Ending | None:
        """Decode the new token. The request ends at a stop string, or if its text cannot be decoded."""
        new_token_ids = seq.token_ids[-1:] if seq.error is None else ()
        finished, at_end_token = seq.finish_reason is not None, seq.finish_reason == "stop"
        before = self._piece = self._piece or ""
        try:
            self._piece = before + self.detokenizer.update(new_token_ids, finished, at_end_token)
        except Exception as raised:
            return Ending("error", f"its text could not be decoded: {type(raised).__name__}: {raised}")
        return Ending("stop") if self.detokenizer.stopped else None

    def deliver(self, seq: Sequence) -> None:
        if self._piece is not None:
            self.outbox.content.add_text(seq.seq_id, self._piece)
            self._piece = None
        super().deliver(seq)

    def whole_text(self) -> str:
        return self.detokenizer.text
