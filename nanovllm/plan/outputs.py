"""Results of the engine: the outputs of ended requests (outputs.py), results of steps, and the Receivers of results."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, overload

import numpy as np

from nanovllm.outputs import Logprob, RequestOutput, TokenLogprobs
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StepPlan

_PART_POSITIONS = 100  # positions whose dicts are made at once
TextOf: TypeAlias = Callable[[int], str | None]  # the text of a token
Entry = TypeVar("Entry", bound=TokenLogprobs | None)


class PositionLogprobs(NamedTuple):
    """N positions: the token at each position, and the K most likely tokens there. Logarithms are natural."""

    token_ids: np.ndarray  # int64 [N]
    logprobs: np.ndarray  # float32 [N]
    ranks: np.ndarray  # int64 [N], 1 for the most likely token
    top_ids: np.ndarray  # int64 [N, K], the most likely first
    top_logprobs: np.ndarray  # float32 [N, K]

    def part(self, start: int, end: int, num_top: int | None = None) -> "PositionLogprobs":
        """Return positions start to end - 1, with the `num_top` most likely tokens of each, or with all K if None."""
        token_ids, logprobs, ranks, top_ids, top_logprobs = (array[start:end] for array in self)
        return PositionLogprobs(token_ids, logprobs, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top])

    def copy(self) -> "PositionLogprobs":
        return PositionLogprobs(*(array.copy() for array in self))

    def as_dicts(self, text_of: TextOf) -> list[TokenLogprobs]:
        """Return the dicts that users see. Takes 10 us per position with the 20 most likely tokens."""
        dicts = []
        for own_id, own_logprob, own_rank, top_ids, top_logprobs in zip(*(a.tolist() for a in self), strict=True):
            found = {own_id: Logprob(own_logprob, own_rank, text_of(own_id))}
            for rank, (token_id, logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
                found.setdefault(token_id, Logprob(logprob, rank, text_of(token_id)))
            dicts.append(found)
        return dicts


class LogprobList(Seq[Entry]):
    """Log-probabilities of consecutive tokens, one entry for each token.

    The list holds arrays and makes the dicts when the list is read, so that the engine's thread need not make them.
    Iteration makes a few dicts at a time and stores none. The first access by index makes and stores all dicts.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: list[Any] = list(entries)
        self._arrays: list[tuple[PositionLogprobs, TextOf]] = []  # for the tokens after self._entries

    def add(self, positions: PositionLogprobs, text_of: TextOf) -> None:
        self._arrays.append((positions, text_of))

    def extend(self, other: "LogprobList[Entry]") -> None:
        """Append all of `other`."""
        if other._entries:
            self._entries, self._arrays = [*self, *other._entries], []
        self._arrays += other._arrays

    def __len__(self) -> int:
        return len(self._entries) + sum(len(positions.token_ids) for positions, _ in self._arrays)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._entries
        for positions, text_of in self._arrays:
            for start in range(0, len(positions.token_ids), _PART_POSITIONS):
                part: Iterable[Any] = positions.part(start, start + _PART_POSITIONS).as_dicts(text_of)
                yield from part

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        self._entries, self._arrays = list(self), []
        return self._entries[index]


class StepLogprobs(NamedTuple):
    """Log-probabilities of the tokens that a step has sampled, and of the prompt tokens that it has scored."""

    sampled: PositionLogprobs | None = None
    prompt: PositionLogprobs | None = None

    def by_sequence(self, plan: StepPlan) -> dict[int, PositionLogprobs]:
        """Return the log-probabilities of sampled tokens by seq_id, in order of position.

        Only sequences that asked for log-probabilities have an entry.
        """
        if self.sampled is None:
            return {}
        found = {}
        first = 0
        for step in plan.sequences:
            if step.num_logprobs is not None:
                found[step.seq_id] = self.sampled.part(first, first + step.num_sampled, step.num_logprobs)
                first += step.num_sampled
        return found

    def of_prompts(self, plan: StepPlan) -> Iterator[tuple[int, PositionLogprobs]]:
        """Yield the seq_id and the log-probabilities of each sequence of which the step has scored prompt tokens."""
        if self.prompt is None:
            return
        first = 0
        for step in plan.sequences:
            if step.scores is not None:
                end = first + len(step.scores.target_ids)
                yield step.seq_id, self.prompt.part(first, end, step.scores.num_logprobs)
                first = end


NO_LOGPROBS = StepLogprobs()


@dataclass
class NewTokens:
    """New tokens of a request. `logprobs` has one entry per token, or is empty if the request set no logprobs."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobList[TokenLogprobs] = field(default_factory=LogprobList)


class TextSource(Protocol):
    """The text of one answer. Tokens are decoded when the text is read."""

    def read_text(self) -> str:
        """Return the text that is new since the last call. Any thread may call this method."""


@dataclass
class StepOutput:
    """Results of one or more steps, by request id, which is the `seq_id` of the request's Sequence.

    text_sources: the TextSource of each request that got a token. new_tokens: the new tokens of each request whose
    Receiver was made with `with_tokens`.
    """

    finished: dict[int, RequestOutput] = field(default_factory=dict)
    text_sources: dict[int, TextSource] = field(default_factory=dict)
    new_tokens: dict[int, NewTokens] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    @cached_property
    def texts(self) -> dict[int, str]:
        """Return the new text of each request that got a token. The first access decodes the text.

        The Detokenizer may hold text back for a while, so the text need not match the tokens in `new_tokens`.
        """
        return {request_id: source.read_text() for request_id, source in self.text_sources.items()}

    def add_tokens(self, request_id: int, token_ids: Iterable[int], logprobs: LogprobList[TokenLogprobs]) -> None:
        new = self.new_tokens.setdefault(request_id, NewTokens())
        new.token_ids.extend(token_ids)
        new.logprobs.extend(logprobs)


class Outbox:
    """Collects the outputs of one caller's requests until that caller fetches them.

    The engine's lock must be held to add to an outbox or to fetch from an outbox (Turns in engine.py).
    """

    def __init__(self) -> None:
        self.content = StepOutput()

    def __bool__(self) -> bool:
        """Return True if any request has new text or new tokens, or has ended."""
        return bool(self.content.text_sources or self.content.new_tokens or self.content.finished)

    def fetch(self) -> StepOutput:
        """Return everything that has arrived since the last call."""
        content, self.content = self.content, StepOutput()
        return content


def request_output(seq: Sequence, text: str | None) -> RequestOutput:
    """Return the output of an ended sequence. `text` is the whole answer, or None without a tokenizer."""
    assert seq.finish_reason is not None, f"sequence {seq.seq_id} has not ended"
    token_ids = seq.output_token_ids
    ttft_s = tpot_s = None
    if seq.first_token_s is not None and seq.last_token_s is not None:
        ttft_s = seq.first_token_s - seq.arrival_s
        if len(token_ids) > 1:
            tpot_s = (seq.last_token_s - seq.first_token_s) / (len(token_ids) - 1)
    output = RequestOutput(
        request_id=seq.seq_id,
        prompt=seq.prompt,
        text=text,
        token_ids=token_ids,
        prompt_token_ids=seq.prompt_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_hit_tokens or 0,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )
    if seq.error is not None:
        output["error"], output["error_cause"] = seq.error, seq.error_cause
    return output


def with_answers(outputs: list[RequestOutput]) -> RequestOutput:
    """Return the output of a prompt: the first answer's output, with all answers in `outputs` if there are several."""
    if len(outputs) == 1:
        return outputs[0]
    for index, output in enumerate(outputs):
        output["index"] = index
    return RequestOutput(outputs[0], outputs=outputs)


def with_logprob_lists(outputs: Iterable[RequestOutput]) -> None:
    """Replace the LogprobLists of outputs by lists."""
    for output in outputs:
        if "logprobs" in output:
            output["logprobs"] = list(output["logprobs"])
        if "prompt_logprobs" in output:
            output["prompt_logprobs"] = list(output["prompt_logprobs"])


class Ending(NamedTuple):
    """Why a receiver ends its request."""

    finish_reason: str
    error: str | None = None  # what happened, with finish_reason "error"


class Receiver:
    """Receives the results of one request, on behalf of the call that waits for them.

    This class passes on only the output at the end. TextReceiver (text/detokenizer.py) also turns the tokens into text.
    """

    def __init__(self, outbox: Outbox, with_tokens: bool = False, text_of: TextOf = lambda token_id: None) -> None:
        """with_tokens: deliver the ids of new tokens as they arrive, not only in the output at the end.
        text_of: returns the texts of tokens for log-probabilities.
        """
        self.outbox = outbox
        self._with_tokens = with_tokens
        self._text_of = text_of
        self._num_delivered_tokens = 0
        self._logprobs, self._new_logprobs = LogprobList[TokenLogprobs](), LogprobList[TokenLogprobs]()
        self._prompt_logprobs = LogprobList[TokenLogprobs | None]([None])

    def read_prompt(self, logprobs: PositionLogprobs) -> None:
        """Read the log-probabilities of the prompt's next tokens. Like `read`, this method must not raise."""
        self._prompt_logprobs.add(logprobs.copy(), self._text_of)

    def read(self, seq: Sequence, logprobs: PositionLogprobs | None = None) -> Ending | None:
        """Read the sequence's new token, if it got a valid token. Returns why the request must end now, or None.

        logprobs: the new token's log-probabilities, or None if the request did not ask for them. Called for each
        verified token of a step, without the lock, while the GPU runs the next step. Must not raise, because an
        exception here would fail the step and close the engine. Hot.
        """
        if logprobs is not None and seq.error is None:
            logprobs = logprobs.copy()  # a view would keep the arrays of the whole step in memory
            self._logprobs.add(logprobs, self._text_of)
            if self._with_tokens:
                self._new_logprobs.add(logprobs, self._text_of)
        return None

    def deliver(self, seq: Sequence) -> None:
        """Put the new tokens into the outbox, and the output if the sequence has ended. Called under the lock. Hot."""
        if self._with_tokens:
            self._deliver_tokens(seq)
        if seq.finish_reason is not None:
            output = self.outbox.content.finished[seq.seq_id] = request_output(seq, self.whole_text())
            if seq.params.logprobs is not None:
                output["logprobs"] = self._logprobs
            if seq.params.prompt_logprobs is not None:
                output["prompt_logprobs"] = self._prompt_logprobs

    def _deliver_tokens(self, seq: Sequence) -> None:
        """Put the tokens that arrived since the last delivery into the outbox."""
        new_token_ids = seq.token_ids[seq.num_prompt_tokens + self._num_delivered_tokens :]
        if new_token_ids:
            self.outbox.content.add_tokens(seq.seq_id, new_token_ids, self._new_logprobs)
            self._new_logprobs = LogprobList()
            self._num_delivered_tokens += len(new_token_ids)

    def whole_text(self) -> str | None:
        """Return the answer of a request that has ended, or None for a receiver that does not decode."""
        return None
