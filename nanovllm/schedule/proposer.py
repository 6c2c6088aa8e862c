"""Proposer: proposes draft tokens to the scheduler. The base class proposes none."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_limits import MAX_VERIFYING_ROWS
from nanovllm.plan.step_plan import StepPlan

DRAFTED = -1  # id of a draft token that the ranks have yet to draft


class Guesses(NamedTuple):
    """Draft tokens of a sequence, in order of position."""

    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0  # tokens that the ranks draft; each replaces a DRAFTED id, or is discarded

    def first(self, num_guesses: int) -> "Guesses":
        if not self.token_ids:
            return self
        return Guesses(self.token_ids[:num_guesses], min(self.num_drafts, num_guesses))

    def without_drafts(self) -> "Guesses":
        """Return the draft tokens before the first token that the ranks would have to draft."""
        known = self.token_ids
        return Guesses(known[: known.index(DRAFTED)] if DRAFTED in known else known)


NO_GUESSES = Guesses()


@dataclass(frozen=True)
class Load:
    """The amount of work in a step. Loads of steps with about the same duration compare equal."""

    num_seqs: int
    magnitude: int  # bit length of num_keys
    num_keys: int = field(compare=False)


def load_of(num_seqs: int, num_keys: int) -> Load:
    return Load(num_seqs, num_keys.bit_length(), num_keys)


class StepMeter(Protocol):
    """Learns from the durations of steps."""

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """Record a step. Called for every step, in order. Hot.

        seconds: the duration (see LaunchedStep), or None after a pause, in which the GPU was idle because there were no
        requests or because the caller was late to ask for the next step.
        """


class Proposer:
    can_propose = False  # if False, the scheduler need not call the other methods

    def add(self, seq: Sequence) -> None:
        """Note that a request was added."""

    def forget(self, seq: Sequence) -> None:
        """Note that the request has ended."""

    def wants_to_guess(self, seq: Sequence, load: Load) -> bool:
        """Return True if the sequence would get draft tokens once its newest token is known. load: the next step's."""
        return False

    def guess(self, seq: Sequence, max_guesses: int, load: Load) -> Guesses:
        """Return up to `max_guesses` draft tokens. load: the step's. All tokens of the sequence must be known."""
        return NO_GUESSES

    def verified(self, seq: Sequence, num_guesses: int, token_ids: Seq[int]) -> None:
        """Note that a step has verified `num_guesses` draft tokens. token_ids: the tokens that the sequence got."""

    def meters(self) -> Seq[StepMeter]:
        """Return the proposer's meters of the durations of steps."""
        return ()

    def stats(self) -> dict[str, Any]:
        """Return counters for LLM.stats()."""
        return {}


class StepDrafts:
    """Decides which sequences of a step get draft tokens, and for how many there is room.

    A sequence gets draft tokens only if its newest token has arrived.
    """

    def __init__(self, proposer: Proposer, max_tokens: int, max_rows: int) -> None:
        """`max_tokens`: most new tokens of a step. `max_rows`: most tokens that a step samples."""
        self._proposer, self._max_tokens, self._max_rows = proposer, max_tokens, max_rows
        self._load = load_of(0, 0)  # the step's load if all running sequences decode in it
        self._num_admissible = 0

    def begin_step(self, running: Seq[Sequence], num_admissible: int) -> None:
        """`num_admissible`: waiting sequences that the step could admit. Draft tokens leave rows for them."""
        self._load, self._num_admissible = _load_of_all(running), num_admissible

    def guess(self, seq: Sequence, num_tokens: int, num_rows: int, num_others: int) -> Guesses:
        """Return as many draft tokens as are useful, if any. `num_tokens`, `num_rows`: what the step has left, of which
        `num_others` other running sequences get their share.
        """
        if not self._proposer.can_propose or not _can_guess(seq) or seq.num_pending_tokens:
            return NO_GUESSES
        num_left = seq.max_tokens - seq.num_output_tokens - 1  # after the token that this step samples anyway
        num_rows -= max(0, self._max_rows - MAX_VERIFYING_ROWS)
        room = min(num_tokens, num_rows) - 1 - num_others - self._num_admissible
        return self._proposer.guess(seq, min(num_left, room), self._load)

    def need_tokens(self, running: Seq[Sequence], num_waiting: int) -> bool:
        """Return True if the step in flight must be committed before the next step is planned: a running sequence
        verifies draft tokens in it, or would get some in the next step.
        """
        if not self._proposer.can_propose:
            return False
        if any(seq.num_pending_guesses for seq in running):
            return True
        num_rows = min(self._max_tokens, self._max_rows, MAX_VERIFYING_ROWS)
        num_admissible = min(self._num_admissible, num_waiting)  # the step before may have admitted some
        if num_rows <= len(running) + num_admissible:
            return False  # there is no room for draft tokens
        load = _load_of_all(running)
        return any(_can_guess(seq) and self._proposer.wants_to_guess(seq, load) for seq in running)


def _load_of_all(running: Seq[Sequence]) -> Load:
    """Return the load of a step in which all running sequences decode."""
    return load_of(len(running), sum(seq.num_computed_tokens for seq in running))


def _can_guess(seq: Sequence) -> bool:
    """Return True if the sequence decodes, will get more than one token, and has no grammar with slow masks. Its newest
    token may be pending.
    """
    is_slow = seq.constraint is not None and seq.constraint.is_slow
    return seq.num_uncomputed_tokens == 1 and seq.max_tokens - seq.num_output_tokens > 1 and not is_slow
