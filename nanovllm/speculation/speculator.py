"""Chooses how many guesses a sequence gets, from how often they are right and how long steps take."""

import logging
from collections import defaultdict, deque
from collections.abc import Sequence as Seq
from statistics import median
from typing import Any, NamedTuple

from nanovllm.config import MAX_GUESSES
from nanovllm.core.sequence import Sequence
from nanovllm.core.step_plan import DraftTimes, StepPlan
from nanovllm.speculation.drafters import DRAFTED, NO_GUESSES, Drafter, Guesses

logger = logging.getLogger("nanovllm")

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0  # of a sequence that begins to guess; the weight is in guesses
PRIORS = {"quote": 0.95, "shadow": 0.95}  # of the kinds of guesses that are nearly always right
DECAY, COMMON_DECAY = 0.9, 0.98  # of the acceptance of a sequence and of all together
MIN_GAIN = 1.02  # in tokens per second; less is within the error of the times
REST_STEPS = 64  # from one trial of all resting sequences to the next
NUM_FEW = 4  # up to so many sequences, each begins with the prior acceptance; beyond, with that of all
NUM_KNOWN_PASSES = 3  # the time of a pass is known after so many passes: the first one may be slow
MAX_TRIAL_GUESSES = 4  # in each of these passes
PASS_EXPIRY_STEPS = 2048  # times measured longer ago are forgotten
NUM_TIMES = 5  # a step's time is the median of so many, so that a single slow step does not count
REMEASURE_PASSES = 256  # after so many passes with guesses, the time of a step without them is measured again


class Load(NamedTuple):
    """A class of steps that take about as long."""

    num_seqs: int
    magnitude: int  # the number of binary digits of the number of keys

    @property
    def num_keys(self) -> float:
        """About how many keys the sequences have."""
        return 0.75 * 2**self.magnitude


def load_of(num_seqs: int, num_keys: int) -> Load:
    return Load(num_seqs, num_keys.bit_length())


class StepTimes:
    """Times of decode steps, with and without guesses, by their load.

    A step's time runs from the end of the step before to its own, so it contains the time in which the GPU waits for
    guesses. It counts if both are decode steps of the same kind, or if the step has guesses: then none of it can have
    run before the other step ended. The time of a draft was measured at start-up.

    With more guesses a pass takes longer, so its time is known by the number of binary digits of the most guesses that
    a sequence has. A number with one digit more than those that are known may be tried.
    """

    def __init__(self, drafts: DraftTimes | None = None) -> None:
        """`drafts`: None if nothing is drafted."""
        self._drafts = drafts or DraftTimes()
        self._plain_s: dict[Load, deque[float]] = defaultdict(_newest_times)
        self._pass_s: dict[tuple[Load, int], deque[float]] = defaultdict(_newest_times)
        self.num_steps = 0  # that have ended
        self._last_pass: dict[tuple[Load, int], int] = {}  # number of the newest step in _pass_s
        self._num_passes = 0  # with guesses, since a step without any was measured
        self._last_had_guesses: bool | None = None  # None: the step before was not a decode step

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """See StepMeter."""
        self.num_steps += 1
        last_had_guesses = self._last_had_guesses
        self._last_had_guesses = plan.has_guesses if plan.is_decode else None
        if seconds is None or not plan.is_decode or last_had_guesses is None:
            return
        if last_had_guesses and not plan.has_guesses:
            return
        load = load_of(len(plan.sequences), sum(step.position for step in plan.sequences))
        if plan.has_guesses:
            self._num_passes += 1
            key = load, max(step.num_guesses for step in plan.sequences).bit_length()
            if self._is_expired(key):
                self._pass_s[key].clear()
            self._last_pass[key] = self.num_steps
            self._pass_s[key].append(max(0.0, seconds - len(plan.draft_rows()) * self.draft_s(load)))
        else:
            self._num_passes = 0
            self._plain_s[load].append(seconds)

    def plain_s(self, load: Load) -> float | None:
        """Return the time of a step of this load without guesses; None if there was none."""
        return median(times) if (times := self._plain_s.get(load)) else None

    def draft_s(self, load: Load) -> float:
        return self._drafts.base_s + self._drafts.key_s * load.num_keys

    def pass_s(self, load: Load, num_guesses: int) -> float | None:
        """Return the time of a step of this load with so many guesses, without its drafts. If none with as many digits
        is known, that of the nearest number with fewer, or else of the least; None if nothing is known.
        """
        return _nearest(self._pass_times(load), num_guesses)

    def _pass_times(self, load: Load) -> dict[int, float]:
        """By digits, in rising order."""
        times = {}
        for digits in range(1, MAX_GUESSES.bit_length() + 1):
            known = self._pass_s.get((load, digits), ())
            if len(known) >= NUM_KNOWN_PASSES and not self._is_expired((load, digits)):
                times[digits] = median(known)
        return times

    def _is_expired(self, key: tuple[Load, int]) -> bool:
        return self.num_steps - self._last_pass.get(key, 0) > PASS_EXPIRY_STEPS

    def is_measured(self, load: Load) -> bool:
        """Return True if the time of a step without guesses is known and recent."""
        return load in self._plain_s and self._num_passes < REMEASURE_PASSES

    def best_guesses(self, load: Load, acceptance: float, max_guesses: int, *, costs_drafts: bool) -> "Gain":
        """Find the number of guesses with the most tokens per second; 0 if guesses gain nothing.

        `costs_drafts`: each guess is drafted. While the time of a pass is unknown, it is taken to be that of a step
        without guesses, and there are only a few guesses.
        """
        plain_s = self.plain_s(load)
        assert plain_s is not None, "no guesses are made before a step without them is measured"
        known = self._pass_times(load)
        most = min(max_guesses, 2 ** (max(known) + 1) - 1 if known else MAX_TRIAL_GUESSES)
        draft_s = self.draft_s(load) if costs_drafts else 0.0
        best, num_tokens, chance = Gain(0, MIN_GAIN / max(1e-9, plain_s)), 1.0, 1.0
        for num_guesses in range(1, most + 1):
            chance *= acceptance
            num_tokens += chance
            pass_s = max(plain_s, _nearest(known, num_guesses) or 0.0)
            best = max(best, Gain(num_guesses, num_tokens / max(1e-9, pass_s + num_guesses * draft_s)), key=_rate)
        return best


class Gain(NamedTuple):
    """A number of guesses, and the tokens per second that they are expected to bring."""

    num_guesses: int
    tokens_per_s: float


def _nearest(times: dict[int, float], num_guesses: int) -> float | None:
    """See StepTimes.pass_s."""
    below = [digits for digits in times if digits <= num_guesses.bit_length()]
    return times[below[-1] if below else min(times)] if times else None


def _rate(gain: Gain) -> float:
    return gain.tokens_per_s


def _newest_times() -> deque[float]:
    return deque(maxlen=NUM_TIMES)


class Acceptance:
    """The probability that a guess is right if those before it are, estimated from earlier guesses."""

    def __init__(self, prior: float, decay: float) -> None:
        """`decay`: each pass multiplies the weight of older ones by this."""
        self._num_right, self._num_tried = prior * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._decay = decay

    @property
    def estimate(self) -> float:
        return self._num_right / self._num_tried

    def verified(self, num_guesses: int, num_accepted: int) -> None:
        self._num_right = self._num_right * self._decay + num_accepted
        self._num_tried = self._num_tried * self._decay + min(num_guesses, num_accepted + 1)


class Pace:
    """The acceptance of one sequence's guesses of one kind, and its rests.

    Sequences whose guesses gained nothing rest. All of them try again in the same steps, because a step with guesses
    takes longer for all sequences, whichever of them guesses.
    """

    def __init__(self, prior_acceptance: float) -> None:
        self.acceptance = Acceptance(prior_acceptance, DECAY)
        self._rest_end: int | None = None  # number of a step

    def rests(self, num_steps: int) -> bool:
        """Return True if the sequence must wait for the next trial, at which it starts afresh.

        `num_steps`: the number of steps that have ended.
        """
        if self._rest_end is not None and num_steps >= self._rest_end:
            self.acceptance, self._rest_end = Acceptance(PRIOR_ACCEPTANCE, DECAY), None
        return self._rest_end is not None

    def rest(self, num_steps: int) -> None:
        self._rest_end = (num_steps // REST_STEPS + 1) * REST_STEPS


class Speculator:
    """Gives the scheduler guesses. Each drafter has its own pace.

    A pass with k guesses yields `expected_tokens` on average, and takes the time of the pass and of k drafts. The k
    with the most tokens per second is chosen, or 0 if that gains nothing.
    """

    def __init__(self, drafters: Seq[Drafter], *, vocab_size: int, max_guesses: int, times: StepTimes | None) -> None:
        """`times`: None for as many guesses as allowed, always."""
        self.drafters, self.max_guesses, self.times = drafters, max_guesses, times
        self._vocab_size = vocab_size
        # By kind of guesses: the acceptance of all sequences together
        self._acceptances: dict[str, Acceptance] = defaultdict(lambda: Acceptance(PRIOR_ACCEPTANCE, COMMON_DECAY))
        self._paces: dict[int, dict[str, Pace]] = {}  # by seq_id and kind of guesses
        self._asked: dict[int, str] = {}  # by seq_id: the kind of guesses that are being verified
        self._guessed_by: dict[int, str] = {}  # by seq_id: whose they are
        self.num_passes = self.num_guesses = self.num_accepted = 0
        self._counts: dict[str, list[list[int]]] = {}  # by drafter: for each position, passes, and those that kept it
        self._refused: set[str] = set()  # drafters that have guessed tokens that do not exist

    def add(self, seq: Sequence) -> None:
        self._paces[seq.seq_id] = {}

    def forget(self, seq: Sequence) -> None:
        del self._paces[seq.seq_id]
        self._asked.pop(seq.seq_id, None)
        if seq.num_pending_guesses:  # they will not be verified
            self._guessed_by.pop(seq.seq_id, None)
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
            prior = PRIORS.get(kind, PRIOR_ACCEPTANCE)
            paces[kind] = Pace(prior if load.num_seqs <= NUM_FEW else self._acceptances[kind].estimate)
        return paces[kind]

    def guess(self, seq: Sequence, max_guesses: int, load: Load) -> Guesses:
        """Return up to `max_guesses` guesses, by the drafter whose guesses gain most. `load`: of the step."""
        most = min(max_guesses, self.max_guesses)
        active = [drafter for drafter in self.drafters if most > 0 and self._is_active(drafter, seq, load)]
        gains = [self._gain(drafter, seq, most, load) for drafter in active]
        for (num_guesses, _), drafter in sorted(
            zip(gains, active, strict=True), key=lambda pair: -pair[0].tokens_per_s
        ):
            guesses = drafter.guess(seq, num_guesses).first(num_guesses) if num_guesses else NO_GUESSES
            if _must_know_guesses(seq):
                guesses = guesses.without_drafts()
            if (guesses := self._existing(drafter, guesses)).token_ids:
                if self.times is not None:
                    self._asked[seq.seq_id] = drafter.kind(seq)
                self._guessed_by[seq.seq_id] = drafter.name
                return guesses
        return NO_GUESSES

    def _gain(self, drafter: Drafter, seq: Sequence, most: int, load: Load) -> Gain:
        if self.times is None:
            return Gain(most, 0.0)
        pace = self._pace(drafter, seq, load)
        gain = self.times.best_guesses(load, pace.acceptance.estimate, most, costs_drafts=drafter.costs_drafts)
        if not gain.num_guesses:
            pace.rest(self.times.num_steps)
        return gain

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
        if (drafter := self._guessed_by.pop(seq.seq_id, None)) is not None:
            counts = self._counts.setdefault(drafter, [[0, 0] for _ in range(self.max_guesses)])
            for position in range(num_guesses):
                counts[position][0] += 1
                counts[position][1] += position < num_accepted
        if (kind := self._asked.pop(seq.seq_id, None)) is not None:
            for acceptance in (self._paces[seq.seq_id][kind].acceptance, self._acceptances[kind]):
                acceptance.verified(num_guesses, num_accepted)

    def stats(self) -> dict[str, Any]:
        """Return the figures of LLM.stats. tokens_per_pass is over the passes that had guesses."""
        drafters = {}
        for name, counts in list(self._counts.items()):
            tried, kept = ([column for column in columns if column] for columns in zip(*counts, strict=True))
            kept += [0] * (len(tried) - len(kept))
            drafters[name] = {
                "num_guesses": sum(tried),
                "num_accepted_guesses": sum(kept),
                "accepted_by_position": [k / t for k, t in zip(kept, tried, strict=True)],
            }
        return {
            "num_guesses": self.num_guesses,
            "num_accepted_guesses": self.num_accepted,
            "guess_acceptance": self.num_accepted / self.num_guesses if self.num_guesses else None,
            "tokens_per_pass": 1 + self.num_accepted / self.num_passes if self.num_passes else None,
            "drafters": drafters,
        }


def _must_know_guesses(seq: Sequence) -> bool:
    """Return True if the edits of the logits after a guess depend on it, so that the ranks cannot draft it."""
    return seq.editor is not None and seq.editor.knows_all_but_last
