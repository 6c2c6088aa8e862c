"""How many guesses are worth their time: from how often guesses prove right, and from how long steps take.

A pass with k guesses yields so many tokens on average (core/guesses.py), and takes the time of the pass and of k
drafts. The k with the most tokens per second is chosen, or 0 if that gains nothing.
"""

from collections import defaultdict, deque
from statistics import median
from typing import NamedTuple

from nanovllm.core.guesses import expected_tokens
from nanovllm.core.step_plan import StepPlan

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0  # of a sequence that begins to guess: as if so many guesses had been tried
DECAY, COMMON_DECAY = 0.9, 0.98  # of the weight of older passes, with every pass of the sequence or of any
MIN_GAIN = 1.02  # in tokens per second; less is within the error of the times
FIRST_REST_STEPS, LONGEST_REST_STEPS = 32, 512  # from one trial of all resting sequences to the next
NUM_FEW = 4  # sequences, each of which may try guesses of its own accord
NUM_GAINFUL_PASSES = 8  # of a sequence without a rest, after which its guesses are taken to be worth their time
NUM_TRIAL_PASSES = 2  # of a sequence, while the time of a pass is not known
MAX_TRIAL_GUESSES = 4  # in each of these passes
NUM_KNOWN_PASSES = 3  # the time of a pass is known after so many passes
PASS_EXPIRY_STEPS = 2048  # a time that was measured longer ago is forgotten
NUM_TIMES = 5  # whose median is the time of a step, so that a single slow step does not count
REMEASURE_PASSES = 256  # after so many passes with guesses, the time of a step without them is measured again


class Load(NamedTuple):
    """Steps of equal load take about as long."""

    num_seqs: int
    magnitude: int  # of their keys: the number of binary digits


def load_of(num_seqs: int, num_keys: int) -> Load:
    return Load(num_seqs, num_keys.bit_length())


class StepTimes:
    """How long decode steps take, with and without guesses, by their load.

    A step's time runs from the end of the step before to its own, so it contains the time in which the GPU waits for
    guesses. It counts if both are decode steps of the same kind, or if the step has guesses, because then nothing of it
    can have run before the other step ended. The time of drafts is that of a single one, measured at start-up.
    """

    def __init__(self, draft_s: float = 0.0) -> None:
        self.draft_s = draft_s
        self._plain_s: dict[Load, deque[float]] = defaultdict(_newest_times)
        self._pass_s: dict[Load, deque[float]] = defaultdict(_newest_times)
        self.num_steps = 0  # that have ended
        self._last_pass: dict[Load, int] = {}  # number of the newest step in _pass_s
        self._num_passes = 0  # with guesses, since a step without any was measured
        self._last_had_guesses: bool | None = None  # None: the step before was no decode step

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
            if self._is_expired(load):
                self._pass_s[load].clear()
            self._last_pass[load] = self.num_steps
            self._pass_s[load].append(max(0.0, seconds - len(plan.draft_rows()) * self.draft_s))
        else:
            self._num_passes = 0
            self._plain_s[load].append(seconds)

    def plain_s(self, load: Load) -> float | None:
        """Time of a step of this load without guesses; None if there was none."""
        return median(times) if (times := self._plain_s.get(load)) else None

    def pass_s(self, load: Load) -> float | None:
        """Time of a step of this load with guesses, without its drafts; None if there was none."""
        return median(times) if (times := self._pass_s.get(load)) else None

    def _is_expired(self, load: Load) -> bool:
        return self.num_steps - self._last_pass.get(load, 0) > PASS_EXPIRY_STEPS

    def knows_pass(self, load: Load) -> bool:
        """Whether the time of a step with guesses is known well enough to decide by it."""
        return not self._is_expired(load) and len(self._pass_s.get(load, ())) >= NUM_KNOWN_PASSES

    def is_measured(self, load: Load) -> bool:
        """Whether the time of a step without guesses is known, and from not long ago."""
        return load in self._plain_s and self._num_passes < REMEASURE_PASSES

    def best_num_guesses(
        self, load: Load, acceptance: float, max_guesses: int, *, costs_drafts: bool, is_trial: bool = False
    ) -> int:
        """0 if guesses gain nothing. `costs_drafts`: whether each of them is drafted. `is_trial`: only a few, in a pass
        that is taken to cost no more than a step without guesses.
        """
        plain_s = self.plain_s(load)
        assert plain_s is not None, "no guesses are made before a step without them is measured"
        pass_s = plain_s if is_trial else max(plain_s, self.pass_s(load) or 0.0)
        draft_s = self.draft_s if costs_drafts else 0.0

        def tokens_per_s(num_guesses: int) -> float:
            return expected_tokens(acceptance, num_guesses) / max(1e-9, pass_s + num_guesses * draft_s)

        most = min(max_guesses, MAX_TRIAL_GUESSES) if is_trial else max_guesses
        best = max(range(1, most + 1), key=tokens_per_s, default=0)
        return best if best and tokens_per_s(best) >= MIN_GAIN / max(1e-9, plain_s) else 0


def _newest_times() -> deque[float]:
    return deque(maxlen=NUM_TIMES)


class Record:
    """What all sequences together have seen of one kind of guesses.

    Sequences whose guesses gained nothing rest, and try again in the same steps, since a step with guesses takes longer
    for all sequences, whichever of them guesses. Each rest is longer than the one before, until guesses gain again.
    """

    def __init__(self) -> None:
        self.num_trials = 0
        self._rest_steps = FIRST_REST_STEPS
        self._next_trial = FIRST_REST_STEPS  # number of a step
        self._num_right, self._num_tried = PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT

    @property
    def acceptance(self) -> float:
        return self._num_right / self._num_tried

    def begin_step(self, num_steps: int) -> None:
        """`num_steps`: how many steps have ended."""
        if num_steps >= self._next_trial:
            self.num_trials += 1
            self._rest_steps = min(2 * self._rest_steps, LONGEST_REST_STEPS)
            self._next_trial = num_steps + self._rest_steps

    def verified(self, num_tried: int, num_accepted: int, is_gainful: bool) -> None:
        self._num_right = self._num_right * COMMON_DECAY + num_accepted
        self._num_tried = self._num_tried * COMMON_DECAY + num_tried
        if is_gainful:
            self._rest_steps = FIRST_REST_STEPS


class Pace:
    """One sequence and one kind of guesses: how often they prove right, and whether it rests."""

    def __init__(self, record: Record, prior_acceptance: float) -> None:
        self._record = record
        self._rests_since: int | None = None  # the trial that gained nothing
        self._begin(prior_acceptance)

    def _begin(self, prior_acceptance: float) -> None:
        self._num_right, self._num_tried = prior_acceptance * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._num_passes = 0
        self._rests_since = None

    @property
    def is_new(self) -> bool:
        """Whether the sequence has just begun to guess, or again after a rest."""
        return self._num_passes < NUM_TRIAL_PASSES

    @property
    def acceptance(self) -> float:
        """The estimated probability that a guess is right if those before it are."""
        return self._num_right / self._num_tried

    def rests(self) -> bool:
        """Whether the sequence must wait for the next trial. With that it begins as if nothing were known."""
        if self._rests_since is not None and self._rests_since != self._record.num_trials:
            self._begin(PRIOR_ACCEPTANCE)
        return self._rests_since is not None

    def rest(self) -> None:
        self._rests_since = self._record.num_trials

    def verified(self, num_guesses: int, num_accepted: int) -> None:
        num_tried = min(num_guesses, num_accepted + 1)
        self._num_right = self._num_right * DECAY + num_accepted
        self._num_tried = self._num_tried * DECAY + num_tried
        self._num_passes += 1
        self._record.verified(num_tried, num_accepted, is_gainful=self._num_passes >= NUM_GAINFUL_PASSES)
