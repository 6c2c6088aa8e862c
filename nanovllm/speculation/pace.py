"""Choice of the number of guesses: from how often guesses prove right, and from how long steps take.

A pass with k guesses yields so many tokens on average (core/guesses.py), and takes the time of the pass and of k
drafts. The k with the most tokens per second is chosen, or 0 if that gains nothing.
"""

from collections import defaultdict, deque
from statistics import median
from typing import NamedTuple

from nanovllm.core.step_limits import expected_tokens
from nanovllm.core.step_plan import StepPlan

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0  # for a sequence that begins to guess: as if so many guesses had been tried
DECAY, COMMON_DECAY = 0.9, 0.98  # per pass, for the acceptance of a sequence and that of all together
MIN_GAIN = 1.02  # in tokens per second; less is within the error of the times
REST_STEPS = 64  # from one trial of all resting sequences to the next
NUM_FEW = 4  # sequences, each of which may try guesses of its own accord
NUM_KNOWN_PASSES = 3  # the time of a pass is known after so many passes: the first one may be slow
MAX_TRIAL_GUESSES = 4  # in each of these passes
PASS_EXPIRY_STEPS = 2048  # a time that was measured longer ago is forgotten
NUM_TIMES = 5  # whose median is the time of a step, so that a single slow step does not count
REMEASURE_PASSES = 256  # after so many passes with guesses, the time of a step without them is measured again


class Load(NamedTuple):
    """Steps of equal load take about as long."""

    num_seqs: int
    magnitude: int  # number of binary digits of the number of their keys


def load_of(num_seqs: int, num_keys: int) -> Load:
    return Load(num_seqs, num_keys.bit_length())


class StepTimes:
    """Times of decode steps, with and without guesses, by their load.

    A step's time runs from the end of the step before to its own, so it contains the time in which the GPU waits for
    guesses. It counts if both are decode steps of the same kind, or if the step has guesses, because then nothing of it
    can have run before the other step ended. The time of drafts is that of a single one, measured at start-up.
    """

    def __init__(self, draft_s: float = 0.0) -> None:
        self.draft_s = draft_s
        self._plain_s: dict[Load, deque[float]] = defaultdict(_newest_times)
        self._pass_s: dict[Load, deque[float]] = defaultdict(_newest_times)
        self.num_steps = 0  # ended so far
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
        """Time of a step of this load with guesses, without its drafts; None while too few are known to decide by."""
        times = self._pass_s.get(load, ())
        return median(times) if len(times) >= NUM_KNOWN_PASSES and not self._is_expired(load) else None

    def _is_expired(self, load: Load) -> bool:
        return self.num_steps - self._last_pass.get(load, 0) > PASS_EXPIRY_STEPS

    def is_measured(self, load: Load) -> bool:
        """Return True if the time of a step without guesses has been measured recently."""
        return load in self._plain_s and self._num_passes < REMEASURE_PASSES

    def best_num_guesses(self, load: Load, acceptance: float, max_guesses: int, *, costs_drafts: bool) -> int:
        """0 if guesses gain nothing. `costs_drafts`: whether each of them is drafted. While the time of a pass is not
        known, it is taken to cost no more than a step without guesses, and there are only a few guesses.
        """
        plain_s, pass_s = self.plain_s(load), self.pass_s(load)
        assert plain_s is not None, "no guesses are made before a step without them is measured"
        most = max_guesses if pass_s is not None else min(max_guesses, MAX_TRIAL_GUESSES)
        pass_s = max(plain_s, pass_s or 0.0)
        draft_s = self.draft_s if costs_drafts else 0.0

        def tokens_per_s(num_guesses: int) -> float:
            return expected_tokens(acceptance, num_guesses) / max(1e-9, pass_s + num_guesses * draft_s)

        best = max(range(1, most + 1), key=tokens_per_s, default=0)
        return best if best and tokens_per_s(best) >= MIN_GAIN / max(1e-9, plain_s) else 0


def _newest_times() -> deque[float]:
    return deque(maxlen=NUM_TIMES)


class Acceptance:
    """Estimate of how likely a guess is right if those before it are, from the results of earlier ones."""

    def __init__(self, prior: float, decay: float) -> None:
        """`decay`: factor of the weight of older passes, with every pass."""
        self._num_right, self._num_tried = prior * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._decay = decay

    @property
    def estimate(self) -> float:
        return self._num_right / self._num_tried

    def verified(self, num_guesses: int, num_accepted: int) -> None:
        self._num_right = self._num_right * self._decay + num_accepted
        self._num_tried = self._num_tried * self._decay + min(num_guesses, num_accepted + 1)


class Pace:
    """One sequence and one kind of guesses: how often they prove right, and whether it rests.

    Sequences whose guesses gained nothing rest, and try again in the same steps, since a step with guesses takes longer
    for all sequences, whichever of them guesses.
    """

    def __init__(self, prior_acceptance: float) -> None:
        self.acceptance = Acceptance(prior_acceptance, DECAY)
        self._rest_end: int | None = None  # number of a step

    def rests(self, num_steps: int) -> bool:
        """Return True if the sequence must wait for the next trial. A trial begins as if nothing were known.

        `num_steps`: how many steps have ended.
        """
        if self._rest_end is not None and num_steps >= self._rest_end:
            self.acceptance, self._rest_end = Acceptance(PRIOR_ACCEPTANCE, DECAY), None
        return self._rest_end is not None

    def rest(self, num_steps: int) -> None:
        self._rest_end = (num_steps // REST_STEPS + 1) * REST_STEPS
