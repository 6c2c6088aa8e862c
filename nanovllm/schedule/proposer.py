"""Proposer: where the scheduler gets draft tokens from. The base class proposes none."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StepPlan

DRAFTED = -1  # in place of a guess: the ranks draft it


class Guesses(NamedTuple):
    """Tokens that a sequence may continue with."""

    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0  # tokens that the ranks draft; those in the places of DRAFTED become guesses

    def first(self, num_guesses: int) -> "Guesses":
        if not self.token_ids:
            return self
        return Guesses(self.token_ids[:num_guesses], min(self.num_drafts, num_guesses))

    def without_drafts(self) -> "Guesses":
        """Return the guesses before the first one that would have to be drafted."""
        known = self.token_ids
        return Guesses(known[: known.index(DRAFTED)] if DRAFTED in known else known)


NO_GUESSES = Guesses()


@dataclass(frozen=True)
class Load:
    """Steps that take about as long are equal."""

    num_seqs: int
    magnitude: int  # the number of binary digits of the number of keys
    num_keys: int = field(compare=False)


def load_of(num_seqs: int, num_keys: int) -> Load:
    return Load(num_seqs, num_keys.bit_length(), num_keys)


class StepMeter(Protocol):
    """Learns from how long steps take."""

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """Take in a step. Called for every step, in order. Hot.

        `seconds`: see LaunchedStep. None after a pause, when the GPU was idle because there were no requests, or
        because nobody called for the next step.
        """


class Proposer:
    can_propose = False  # False: the other methods need not be asked

    def add(self, seq: Sequence) -> None:
        """A request was added."""

    def forget(self, seq: Sequence) -> None:
        """The request has ended."""

    def wants_to_guess(self, seq: Sequence, load: Load) -> bool:
        """Return True if the sequence would guess if its newest token were known. `load`: of the next step."""
        return False

    def guess(self, seq: Sequence, max_guesses: int, load: Load) -> Guesses:
        """Return up to `max_guesses` guesses. `load`: of the step. All tokens of the sequence are known."""
        return NO_GUESSES

    def verified(self, seq: Sequence, num_guesses: int, token_ids: Seq[int]) -> None:
        """The step has verified guesses. `token_ids`: the tokens that the sequence got."""

    def meters(self) -> Seq[StepMeter]:
        """What learns from the times of steps."""
        return ()

    def stats(self) -> dict[str, Any]:
        """Counters for LLM.stats()."""
        return {}
