"""TextReceiver: turns a request's tokens into text for whoever reads it, and ends the request at a stop string."""

import threading

from nanovllm.core.outputs import Ending, Outbox, PositionLogprobs, Receiver, TextOf, TextSource
from nanovllm.core.sequence import Sequence
from nanovllm.text.detokenizer import Detokenizer

READER_TIMEOUT_S = 1.0


class TextReceiver(Receiver, TextSource):
    """Decodes when the text is read, in the reader's thread, and at the end. So the engine's steps do not wait for the
    text, and whoever wants only the whole answer pays for decoding it once. Only a request with stop strings, which
    may end at any token, decodes each token as it arrives.
    """

    def __init__(
        self,
        outbox: Outbox,
        detokenizer: Detokenizer,
        with_tokens: bool = False,
        text_of: TextOf = lambda token_id: None,
    ) -> None:
        super().__init__(outbox, with_tokens, text_of)
        self.detokenizer = detokenizer
        self._lock = threading.Lock()  # guards what follows and the detokenizer; the reader has a thread of its own
        self._new_token_ids: list[int] = []  # not decoded yet
        self._piece = ""  # decoded, but not read yet
        self._failure: Ending | None = None
        self._is_whole = False  # nothing is held back for tokens to come
        self._is_delivered = True

    def read(self, seq: Sequence, logprobs: PositionLogprobs | None = None) -> Ending | None:
        """Take the new token. The request ends at a stop string, or if its text cannot be decoded."""
        self._is_delivered = False
        super().read(seq, logprobs)
        finished = seq.finish_reason is not None
        with self._lock:
            if seq.error is None:
                self._new_token_ids.append(seq.token_ids[-1])
            if finished or self.detokenizer.has_stop_strings:
                self._decode(finished, at_end_token=finished and seq.error is None and seq.has_end_token)
        if self._failure is not None:
            return self._failure
        return Ending("stop") if self.detokenizer.stopped else None

    def deliver(self, seq: Sequence) -> None:
        if not self._is_delivered or (seq.finish_reason is not None and not self._is_whole):
            self._is_delivered = True
            self.outbox.content.text_sources[seq.seq_id] = self
        super().deliver(seq)

    def read_text(self) -> str:
        with self._lock:
            self._decode()
            piece, self._piece = self._piece, ""
        return piece

    def whole_text(self) -> str:
        # The caller holds the engine's lock, which a reader that holds this one may wait for: a garbage collection in
        # its thread may close an abandoned stream
        if self._lock.acquire(timeout=READER_TIMEOUT_S):
            try:
                self._decode(finished=True)  # after an abort, what was held back is the end of the text
            finally:
                self._lock.release()
        return self.detokenizer.text

    def _decode(self, finished: bool = False, at_end_token: bool = False) -> None:
        """Decode the new tokens. If that fails, the request ends with an error when its next token arrives."""
        token_ids, self._new_token_ids = self._new_token_ids, []
        if (token_ids or finished) and not self._is_whole and self._failure is None:
            self._is_whole = finished
            try:
                self._piece += self.detokenizer.update(token_ids, finished, at_end_token)
            except Exception as raised:
                self._failure = _undecodable(raised)


def _undecodable(raised: Exception) -> Ending:
    return Ending("error", f"its text could not be decoded: {type(raised).__name__}: {raised}")
