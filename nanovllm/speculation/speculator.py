"""Speculator: gives the scheduler guesses. It asks the drafters in order, each at its own pace."""

import logging
from collections import defaultdict
from collections.abc import Sequence as Seq

from nanovllm.core.sequence import Sequence
from nanovllm.speculation.drafters import DRAFTED, NO_GUESSES, Drafter, Guesses
from nanovllm.speculation.pace import COMMON_DECAY, NUM_FEW, PRIOR_ACCEPTANCE, Acceptance, Load, Pace, StepTimes

logger = logging.getLogger("nanovllm")


class Speculator:
    def __init__(self, drafters: Seq[Drafter], *, vocab_size: int, max_guesses: int, times: StepTimes | None) -> None:
        """`times`: None for as many guesses as allowed, always."""
        self.drafters, self.max_guesses, self.times = drafters, max_guesses, times
        self._vocab_size = vocab_size
        # By kind of guesses: the acceptance of all sequences together
        self._acceptances: dict[str, Acceptance] = defaultdict(lambda: Acceptance(PRIOR_ACCEPTANCE, COMMON_DECAY))
        self._paces: dict[int, dict[str, Pace]] = {}  # by seq_id and kind of guesses
        self._asked: dict[int, str] = {}  # by seq_id: the kind of guesses that are being verified
        self.num_passes = self.num_guesses = self.num_accepted = 0
        self._refused: set[str] = set()  # drafters that have guessed tokens that do not exist

    def add(self, seq: Sequence) -> None:
        self._paces[seq.seq_id] = {}

    def forget(self, seq: Sequence) -> None:
        del self._paces[seq.seq_id]
        self._asked.pop(seq.seq_id, None)
        for drafter in self.drafters:
            drafter.forget(seq)

    def wants_to_guess(self, seq: Sequence, load: Load) -> bool:
        """Return True if the sequence would guess if its newest token were known. `load`: of the next step."""
        return any(self._is_active(drafter, seq, load) and drafter.can_guess(seq) for drafter in self.drafters)

    def _is_active(self, drafter: Drafter, seq: Sequence, load: Load) -> bool:
        if drafter.costs_drafts and _must_know_guesses(seq):
            return False
        if self.times is None:
            return True
        return self.times.is_measured(load) and not self._pace(drafter, seq, load).rests(self.times.num_steps)

    def _pace(self, drafter: Drafter, seq: Sequence, load: Load) -> Pace:
        kind, paces = drafter.kind(seq), self._paces[seq.seq_id]
        if kind not in paces:
            paces[kind] = Pace(PRIOR_ACCEPTANCE if load.num_seqs <= NUM_FEW else self._acceptances[kind].estimate)
        return paces[kind]

    def guess(self, seq: Sequence, max_guesses: int, load: Load) -> Guesses:
        """Return up to `max_guesses` guesses by the first drafter whose guesses gain time. `load`: of the step."""
        most = min(max_guesses, self.max_guesses)
        for drafter in self.drafters if most > 0 else ():
            if not self._is_active(drafter, seq, load):
                continue
            num_guesses = self._num_worthwhile(drafter, seq, most, load)
            guesses = drafter.guess(seq, num_guesses).first(num_guesses) if num_guesses else NO_GUESSES
            if _must_know_guesses(seq):
                guesses = guesses.without_drafts()
            if (guesses := self._existing(drafter, guesses)).token_ids:
                if self.times is not None:
                    self._asked[seq.seq_id] = drafter.kind(seq)
                return guesses
        return NO_GUESSES

    def _num_worthwhile(self, drafter: Drafter, seq: Sequence, most: int, load: Load) -> int:
        if self.times is None:
            return most
        pace = self._pace(drafter, seq, load)
        num_guesses = self.times.best_num_guesses(
            load, pace.acceptance.estimate, most, costs_drafts=drafter.costs_drafts
        )
        if not num_guesses:
            pace.rest(self.times.num_steps)
        return num_guesses

    def _existing(self, drafter: Drafter, guesses: Guesses) -> Guesses:
        """Return the guesses before the first one that is not in the vocabulary."""
        for i, token_id in enumerate(guesses.token_ids):
            is_drafted = token_id == DRAFTED and i < guesses.num_drafts
            if not 0 <= token_id < self._vocab_size and not is_drafted:
                if drafter.name not in self._refused:
                    self._refused.add(drafter.name)
                    last = self._vocab_size - 1
                    logger.warning("the drafter %s guesses token %d, outside 0..%d", drafter.name, token_id, last)
                return guesses.first(i)
        return guesses

    def verified(self, seq: Sequence, num_guesses: int, num_accepted: int) -> None:
        """Count what a step has verified. The sequence may have ended at one of the guesses."""
        self.num_passes += 1
        self.num_guesses += num_guesses
        self.num_accepted += num_accepted
        if (kind := self._asked.pop(seq.seq_id, None)) is not None:
            for acceptance in (self._paces[seq.seq_id][kind].acceptance, self._acceptances[kind]):
                acceptance.verified(num_guesses, num_accepted)

    def stats(self) -> dict[str, float | None]:
        """Return the figures of LLM.stats. tokens_per_pass is over the passes that had guesses."""
        return {
            "num_guesses": self.num_guesses,
            "num_accepted_guesses": self.num_accepted,
            "guess_acceptance": self.num_accepted / self.num_guesses if self.num_guesses else None,
            "tokens_per_pass": 1 + self.num_accepted / self.num_passes if self.num_passes else None,
        }


def _must_know_guesses(seq: Sequence) -> bool:
    """Return True if the edits of the logits after a guess depend on it, so that the ranks cannot draft it."""
    return seq.editor is not None and seq.editor.knows_all_but_last
