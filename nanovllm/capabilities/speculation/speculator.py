"""Choose the number of draft tokens of a sequence, from their acceptance and the time of steps."""

import logging
from collections import defaultdict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from nanovllm.capabilities.speculation.drafters import Drafter
from nanovllm.config import MAX_GUESSES
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import DraftTimes, StepPlan
from nanovllm.schedule.seams import DRAFTED, NO_GUESSES, Guesses, Load, Proposer, StepMeter, load_of

logger = logging.getLogger("nanovllm")

PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 2.0  # for a sequence without draft tokens so far; the weight is in draft tokens
PRIORS = {"quote": 0.95, "shadow": 0.95}  # for kinds of draft tokens that are nearly always accepted
DECAY, COMMON_DECAY = 0.9, 0.98  # per verification step, for a sequence's acceptance and the common acceptance
MIN_GAIN = 1.02  # in tokens per second; a smaller gain is within the error of the times
REST_STEPS = 128  # between trials of all resting sequences
# Up to this many sequences begin halfway between prior and common acceptance, more begin with the common one
NUM_FEW = 4
RECENT_DECAY = 0.8  # each verification step multiplies the weight of the sequence's older steps by this
NUM_KNOWN_PASSES = 3  # measured verification steps after which their time is known: the first may be slow
MAX_TRIAL_GUESSES = 4  # in each of these steps
PASS_EXPIRY_STEPS = 2048  # times measured longer ago are forgotten
NUM_TIMES = 5  # number of times whose median counts, so that a single slow step does not matter
REMEASURE_PASSES = 256  # verification steps after which the time of a plain step is measured again


class StepTimes:
    """Times of decode steps, with and without draft tokens, by their load.

    A step's time runs from the end of the previous step to the step's end, so it includes the time in which the GPU
    waits for draft tokens. The time counts if both steps are decode steps of the same kind, or if the step is a
    verification step: then none of it can have run before the previous step ended. The time of a draft was measured at
    start-up.

    A verification step takes longer with more draft tokens, so its time is recorded by the number of binary digits of
    the most draft tokens that a sequence has. A number with one digit more than the known numbers may be tried. Smaller
    numbers count as MAX_TRIAL_GUESSES, so that rejected draft tokens need not be tried with each of these numbers.
    Between a plain step and the verification steps with the fewest digits, time is assumed to grow linearly.
    """

    def __init__(self, drafts: DraftTimes | None = None) -> None:
        """`drafts`: times of drafts, or None if nothing is drafted."""
        self._drafts = drafts or DraftTimes()
        self._plain_s: dict[Load, deque[float]] = defaultdict(_newest_times)
        # Each time with its number of draft tokens
        self._passes: dict[tuple[Load, int], deque[tuple[float, int]]] = defaultdict(_newest_times)
        self.num_steps = 0  # steps that have ended
        self._last_pass: dict[tuple[Load, int], int] = {}  # number of the newest step in _passes
        self._num_passes = 0  # verification steps since a plain step was measured
        self._last_had_guesses: bool | None = None  # None if the previous step was not a decode step

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
            num_guesses = max(step.num_guesses for step in plan.sequences)
            key = load, _num_digits(num_guesses)
            if self._is_expired(key):
                self._passes[key].clear()
            self._last_pass[key] = self.num_steps
            own_s = max(0.0, seconds - len(plan.draft_rows()) * self.draft_s(load))
            self._passes[key].append((own_s, num_guesses))
        else:
            self._num_passes = 0
            self._plain_s[load].append(seconds)

    def plain_s(self, load: Load) -> float | None:
        """Return the time of a step of this load without draft tokens, or None if unknown."""
        return median(times) if (times := self._plain_s.get(load)) else None

    def draft_s(self, load: Load) -> float:
        return self._drafts.base_s + self._drafts.key_s * load.num_keys

    def pass_s(self, load: Load, num_guesses: int) -> float | None:
        """Return the time of a verification step of this load with `num_guesses` draft tokens, without drafting. If no
        step with the same number of digits is known, return the time of the nearest number with fewer digits, or else
        of the smallest known number. In the group with the fewest digits the time grows linearly from the time of a
        plain step. Returns None if nothing is known.
        """
        return _expected_s(self._known_passes(load), self.plain_s(load), num_guesses)

    def _known_passes(self, load: Load) -> dict[int, tuple[float, float]]:
        """By digits, ascending: the median time of verification steps, and the median of their numbers
        of draft tokens.
        """
        known = {}
        for digits in range(_num_digits(1), _num_digits(MAX_GUESSES) + 1):
            passes = self._passes.get((load, digits), ())
            if len(passes) >= NUM_KNOWN_PASSES and not self._is_expired((load, digits)):
                known[digits] = median(seconds for seconds, _ in passes), median(number for _, number in passes)
        return known

    def _is_expired(self, key: tuple[Load, int]) -> bool:
        return self.num_steps - self._last_pass.get(key, 0) > PASS_EXPIRY_STEPS

    def is_measured(self, load: Load) -> bool:
        """Return True if the time of a step without draft tokens is known and recent."""
        return load in self._plain_s and self._num_passes < REMEASURE_PASSES

    def choices(self, load: Load, acceptance: float, max_guesses: int, *, costs_drafts: bool) -> "list[Choice]":
        """Return the numbers of draft tokens that bring more tokens per second than none, with their expected results.

        `costs_drafts`: each draft token is drafted on the GPU. While the time of a verification step is unknown, the
        time of a plain step is assumed, and there are only a few draft tokens.
        """
        plain_s = self.plain_s(load)
        assert plain_s is not None, "a step without draft tokens is measured first"
        known = self._known_passes(load)
        most = min(max_guesses, 2 ** (max(known) + 1) - 1 if known else MAX_TRIAL_GUESSES)
        draft_s = self.draft_s(load) if costs_drafts else 0.0
        choices, num_tokens, chance = [], 1.0, 1.0
        for num_guesses in range(1, most + 1):
            chance *= acceptance
            num_tokens += chance
            seconds = max(plain_s, _expected_s(known, plain_s, num_guesses) or 0.0) + num_guesses * draft_s
            if num_tokens * plain_s > MIN_GAIN * seconds:
                choices.append(Choice(num_guesses, num_tokens, seconds))
        return choices


class Choice(NamedTuple):
    """A number of draft tokens, and their expected result."""

    num_guesses: int
    num_tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(1e-9, self.seconds)


def _num_digits(num_guesses: int) -> int:
    return max(num_guesses, MAX_TRIAL_GUESSES).bit_length()


def _expected_s(known: dict[int, tuple[float, float]], plain_s: float | None, num_guesses: int) -> float | None:
    """See StepTimes.pass_s."""
    if not known:
        return None
    least, own_digits = min(known), _num_digits(num_guesses)
    digits = max((each for each in known if each <= own_digits), default=least)
    seconds, usual_number = known[digits]
    if digits > least or plain_s is None:
        return seconds
    return plain_s + (seconds - plain_s) * min(1.0, num_guesses / usual_number)


def _newest_times() -> deque[Any]:
    return deque(maxlen=NUM_TIMES)


class Acceptance:
    """The probability that a draft token is accepted if all before it are, estimated from earlier draft tokens."""

    def __init__(self, prior: float, decay: float) -> None:
        """`decay`: each verification step multiplies the weight of older steps by this."""
        self._num_right, self._num_tried = prior * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._decay = decay

    @property
    def estimate(self) -> float:
        return self._num_right / self._num_tried

    def verified(self, num_guesses: int, num_accepted: int) -> None:
        self._num_right = self._num_right * self._decay + num_accepted
        self._num_tried = self._num_tried * self._decay + min(num_guesses, num_accepted + 1)


class DraftPace:
    """The acceptance of one sequence's draft tokens of one kind, and its rests.

    Sequences whose draft tokens gained nothing rest. All resting sequences try again in the same steps, because a
    verification step takes longer for all sequences of the step.
    """

    def __init__(self, prior: float, first: float) -> None:
        """`prior`: the acceptance after a rest. `first`: the acceptance at the beginning."""
        self._prior = prior
        self.acceptance = Acceptance(first, DECAY)
        self._rest_end: int | None = None  # step at which the rest ends

    def rests(self, num_steps: int) -> bool:
        """Return True if the sequence must wait for the next trial, at which its acceptance is reset.

        `num_steps`: the number of steps that have ended.
        """
        if self._rest_end is not None and num_steps >= self._rest_end:
            self.acceptance, self._rest_end = Acceptance(self._prior, DECAY), None
        return self._rest_end is not None

    def rest(self, num_steps: int) -> None:
        self._rest_end = (num_steps // REST_STEPS + 1) * REST_STEPS


@dataclass(slots=True)
class _Answer:
    """A sequence's paces by kind of draft tokens, and the recent results of its verification steps."""

    paces: dict[str, DraftPace] = field(default_factory=dict)
    num_tokens: float = 0.0
    seconds: float = 0.0

    def passed(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens = self.num_tokens * RECENT_DECAY + num_tokens
        self.seconds = self.seconds * RECENT_DECAY + seconds


class _Pass(NamedTuple):
    """Draft tokens that are being verified."""

    drafter: str  # name of the drafter
    seconds: float  # expected duration of the verification step
    kind: str
    proposed: dict[str, tuple[int, ...]]  # by kind: draft tokens that could have been proposed without drafting


class Speculator(Proposer):
    """Gives the scheduler draft tokens. Each drafter has its own pace.

    Among the numbers of draft tokens of all drafters, choose the number with the most expected tokens beyond the tokens
    that its time is worth: the recent rate of the sequence's verification steps, or the rate of the fastest choice if
    that is higher. The fastest choice alone would be too patient: before a quote that a lookup continues at no cost, a
    long chain of drafts is faster than a plain step, but slower than a short chain followed by the quote.

    Draft tokens that cost no drafting are also compared with the answer where other draft tokens were verified instead.
    So a drafter that erred once is asked again as soon as it would have been right.
    """

    can_propose = True

    def __init__(self, drafters: Seq[Drafter], *, vocab_size: int, max_guesses: int, times: StepTimes | None) -> None:
        """`times`: times of steps, or None to always propose the allowed number of draft tokens."""
        self.drafters, self.max_guesses, self.times = drafters, max_guesses, times
        self._vocab_size = vocab_size
        self._acceptances: dict[str, Acceptance] = {}  # by kind of draft tokens: common acceptance of all sequences
        self._answers: dict[int, _Answer] = {}  # by seq_id
        self._passes: dict[int, _Pass] = {}  # by seq_id
        self.num_passes = self.num_guesses = self.num_accepted = 0
        # By drafter: for each position, draft tokens verified and accepted
        self._counts: dict[str, list[list[int]]] = {}
        self._refused: set[str] = set()  # drafters that have proposed tokens outside the vocabulary

    def add(self, seq: Sequence) -> None:
        self._answers[seq.seq_id] = _Answer()

    def forget(self, seq: Sequence) -> None:
        del self._answers[seq.seq_id]
        self._passes.pop(seq.seq_id, None)
        for drafter in self.drafters:
            drafter.forget(seq)

    def wants_to_guess(self, seq: Sequence, load: Load) -> bool:
        """Return True if the sequence would get draft tokens if its newest token were known. `load`: of
        the next step.
        """
        return any(self._is_active(drafter, seq, load) and drafter.can_guess(seq) for drafter in self.drafters)

    def _is_active(self, drafter: Drafter, seq: Sequence, load: Load) -> bool:
        if drafter.costs_drafts and _must_know_guesses(seq):
            return False
        if self.times is None:
            return True
        return self.times.is_measured(load) and not self._pace(drafter, seq, load).rests(self.times.num_steps)

    def _pace(self, drafter: Drafter, seq: Sequence, load: Load) -> DraftPace:
        kind, paces = drafter.kind(seq), self._answers[seq.seq_id].paces
        if kind not in paces:
            prior, common = PRIORS.get(kind, PRIOR_ACCEPTANCE), self._common_acceptance(kind).estimate
            if load.num_seqs <= NUM_FEW:
                paces[kind] = DraftPace(prior, (prior + common) / 2)
            else:
                paces[kind] = DraftPace(common, common)
        return paces[kind]

    def _common_acceptance(self, kind: str) -> Acceptance:
        if kind not in self._acceptances:
            self._acceptances[kind] = Acceptance(PRIORS.get(kind, PRIOR_ACCEPTANCE), COMMON_DECAY)
        return self._acceptances[kind]

    def guess(self, seq: Sequence, max_guesses: int, load: Load) -> Guesses:
        """Return up to `max_guesses` draft tokens, by the drafter that gains most. `load`: of the step."""
        self._passes.pop(seq.seq_id, None)  # draft tokens for which there was no room
        most = min(max_guesses, self.max_guesses)
        proposals = {}
        for drafter in self.drafters:
            if most > 0 and self._is_active(drafter, seq, load):
                guesses = drafter.guess(seq, most).first(most)
                if _must_know_guesses(seq):
                    guesses = guesses.without_drafts()
                if (guesses := self._existing(drafter, guesses)).token_ids:
                    proposals[drafter] = guesses
        best = self._best(proposals, seq, load)
        if best is None:
            return NO_GUESSES
        drafter, choice = best
        proposed = {by.kind(seq): its.token_ids for by, its in proposals.items() if not its.num_drafts}
        self._passes[seq.seq_id] = _Pass(drafter.name, choice.seconds, drafter.kind(seq), proposed)
        return proposals[drafter].first(choice.num_guesses)

    def _best(self, proposals: dict[Drafter, Guesses], seq: Sequence, load: Load) -> tuple[Drafter, Choice] | None:
        if self.times is None:
            return next(((by, Choice(len(its.token_ids), 0.0, 0.0)) for by, its in proposals.items()), None)
        choices = []
        for drafter, guesses in proposals.items():
            pace = self._pace(drafter, seq, load)
            its = self.times.choices(
                load, pace.acceptance.estimate, len(guesses.token_ids), costs_drafts=drafter.costs_drafts
            )
            choices += [(drafter, choice) for choice in its]
            if not its:
                pace.rest(self.times.num_steps)
        answer = self._answers[seq.seq_id]
        lately = answer.num_tokens / max(1e-9, answer.seconds)
        tokens_per_s = max([lately, *(choice.tokens_per_s for _, choice in choices)])
        return max(choices, key=lambda pair: pair[1].num_tokens - tokens_per_s * pair[1].seconds, default=None)

    def _existing(self, drafter: Drafter, guesses: Guesses) -> Guesses:
        """Return the draft tokens before the first token outside the vocabulary."""
        for i, token_id in enumerate(guesses.token_ids):
            is_drafted = token_id == DRAFTED and i < guesses.num_drafts
            if not 0 <= token_id < self._vocab_size and not is_drafted:
                if drafter.name not in self._refused:
                    self._refused.add(drafter.name)
                    last = self._vocab_size - 1
                    logger.warning("the drafter %s guesses token %d, outside 0..%d", drafter.name, token_id, last)
                return guesses.first(i)
        return guesses

    def verified(self, seq: Sequence, num_guesses: int, token_ids: Seq[int]) -> None:
        """Count the results of a verification step. `token_ids`: the accepted tokens and one more, not yet appended."""
        num_accepted = len(token_ids) - 1
        self.num_passes += 1
        self.num_guesses += num_guesses
        self.num_accepted += num_accepted
        if (verified := self._passes.pop(seq.seq_id, None)) is None:
            return
        counts = self._counts.setdefault(verified.drafter, [[0, 0] for _ in range(self.max_guesses)])
        for position in range(num_guesses):
            counts[position][0] += 1
            counts[position][1] += position < num_accepted
        if self.times is None:
            return
        answer = self._answers[seq.seq_id]
        answer.passed(1 + num_accepted, verified.seconds)
        self._learn(answer, verified.kind, num_guesses, num_accepted)
        for kind, proposed in verified.proposed.items():
            if kind != verified.kind:
                num_compared = min(len(proposed), len(token_ids))
                num_right = next((i for i in range(num_compared) if proposed[i] != token_ids[i]), num_compared)
                self._learn(answer, kind, num_compared, num_right)

    def _learn(self, answer: _Answer, kind: str, num_guesses: int, num_right: int) -> None:
        answer.paces[kind].acceptance.verified(num_guesses, num_right)
        self._common_acceptance(kind).verified(num_guesses, num_right)

    def meters(self) -> Seq[StepMeter]:
        return () if self.times is None else (self.times,)

    def stats(self) -> dict[str, Any]:
        """Return the figures of LLM.stats. tokens_per_pass averages over verification steps."""
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
    """Return True if edits of the logits after a draft token depend on the token, so that the ranks cannot draft it."""
    return seq.editor.needs_all_tokens
