"""Seams: the interfaces through which the scheduler and the step loop call capabilities.

Proposer proposes draft tokens, and PromptStore stores the K and V of prompts outside of memory. Each base class does
nothing, and takes the place of a capability that is absent.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nanovllm.plan.sequence import Sequence
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


class PromptStore:
    """Stores prompts' K and V outside of memory. The base class stores nothing.

    Each rank has the other half of a store (RankStore in runner/seams.py), which executes the moves that
    `next_moves` returns.
    """

    num_waiting = 0  # sequences that wait for a load, or that `take_ready` has not returned yet
    num_pending = 0  # pieces that the slowest rank still has to write

    def wait_for_load(self, seq: Sequence) -> bool:
        """Begin to wait for a load if the store has more of a prompt than memory. Otherwise return False."""
        return False

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose loads have ended, and that have not been returned before."""
        return []

    def forget(self, seq: Sequence) -> bool:
        """Drop a sequence that was aborted. Returns True if the sequence was waiting for a load."""
        return False

    def may_overtake(self, seq: Sequence) -> bool:
        """Return False if an older sequence waits for blocks to load into: no other sequence may take them first."""
        return True

    def store(self, seq: Sequence) -> None:
        """Store the computed K and V of a running sequence. Called when the first token of the answer has arrived, and
        when the sequence ends.
        """

    @property
    def holders(self) -> list[Sequence]:
        """Return the owners of blocks that are being loaded."""
        return []

    def next_moves(self) -> Any | None:
        """Process the loads that the ranks have ended, and return the next moves of the ranks, or None without moves.

        Called when all planned steps have been launched.
        """
        return None

    def stats(self) -> dict[str, float | None]:
        """Return counters for LLM.stats()."""
        return {}

    def close(self) -> None:
        """Release the store. Called after the ranks have ended."""
