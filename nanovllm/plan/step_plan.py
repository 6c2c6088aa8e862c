"""The plan of one step: everything the ranks must do, in integers. Rank 0 makes it and pickles it to the others."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from nanovllm.plan.logit_edits import LogitEdits
from nanovllm.sampling_params import SamplingParams


class SlotLoad(NamedTuple):
    """A copy of the first tokens of a CPU block to a slot, in every layer. From this step on the block is resident."""

    cpu_block_id: int
    ring_slot: int
    num_tokens: int


class SlotCopy(NamedTuple):
    """A copy of the first tokens of one slot to another, on the GPU, after this step's K/V are stored."""

    src_slot: int
    dst_slot: int
    num_tokens: int


class SlotOffload(NamedTuple):
    """A copy of tokens start..end-1 of a slot to the same positions of a CPU block, in every layer."""

    ring_slot: int
    cpu_block_id: int
    start: int
    end: int


class StreamedGroup(NamedTuple):
    """Full CPU blocks that are copied to one staging group and attended to in one call.

    `tables[row]`: the blocks, as indices into `cpu_block_ids`, that sequence `row` of the step attends to. The CPU
    attends to the last `num_cut_tokens` tokens of the last block; they are not copied.
    """

    cpu_block_ids: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    num_cut_tokens: int = 0

    def num_tokens(self, block_size: int) -> int:
        """Count the tokens that are copied."""
        return len(self.cpu_block_ids) * block_size - self.num_cut_tokens

    def context_lens(self, block_size: int) -> list[int]:
        """Count the keys of the group that each sequence attends to."""
        last = len(self.cpu_block_ids) - 1
        return [
            len(table) * block_size - (self.num_cut_tokens if table and table[-1] == last else 0)
            for table in self.tables
        ]


class CpuSpan(NamedTuple):
    """Tokens start..end-1 of a CPU block, which the CPU attends to where they lie."""

    cpu_block_id: int
    start: int
    end: int


class StepPayload(Protocol):
    """What a companion (kvcache/companion.py) does in a step. Its half on each rank finds the payload by its type."""

    @property
    def acts_by_layer(self) -> bool:
        """True if the payload acts between the parts of a layer, so no graph of all layers can run the step."""


class SequencePayload(Protocol):
    """What a companion does for a sequence of a step."""

    def in_draft(self, draft: "SequenceStep", step: "SequenceStep", i: int) -> "SequenceStep":
        """Return draft number `i` of `step` as the companion changes it (see StepPlan.draft_rows)."""


P = TypeVar("P", bound=tuple)


def find_payload(payloads: tuple[Any, ...], kind: type[P]) -> P | None:
    """Return the payload of this type, or None if there is none."""
    return next((payload for payload in payloads if type(payload) is kind), None)


@dataclass(frozen=True)
class KVMoves:
    """Moves between CPU memory and the GPU in a step. Without offload, there are only payloads.

    Everything takes effect in this order. First the flushes: they copy evicted blocks out before anything overwrites
    their slots. Then, in each layer, the loads, the storing of the new K/V, the copies, the offloads, attention over
    the paged keys, and attention over the streamed groups. Concurrently with the last two, the CPU attends to
    `cpu_spans`, a tuple for each sequence of the step, or none at all. A payload says when it takes effect.
    """

    flushes: tuple[SlotOffload, ...] = ()
    loads: tuple[SlotLoad, ...] = ()
    copies: tuple[SlotCopy, ...] = ()
    offloads: tuple[SlotOffload, ...] = ()
    streamed: tuple[StreamedGroup, ...] = ()
    cpu_spans: tuple[tuple[CpuSpan, ...], ...] = ()
    taken_slots: tuple[int, ...] = ()  # slots given to another block in this step, which writes to them
    payloads: tuple[StepPayload, ...] = ()

    @property
    def brings_in_keys(self) -> bool:
        """True if a sequence attends to keys that are not on the GPU."""
        return bool(self.streamed or self.cpu_spans)

    @property
    def acts_by_layer(self) -> bool:
        """True if a payload acts between the parts of a layer."""
        return any(payload.acts_by_layer for payload in self.payloads)


class SamplingRow(NamedTuple):
    """Parameters for sampling a sequence's tokens. The seed and a token's position alone determine the noise.

    The other fields have the names of SamplingParams. The sampler gets one array for each field, in this order, of
    float32 or int64 numbers, and one of positions (kernels/sampling_tensors.py).
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0

    @classmethod
    def make(cls, params: SamplingParams, seed: int) -> "SamplingRow":
        return cls._make((*(getattr(params, name) for name in cls._fields[:-1]), seed))


class PromptScores(NamedTuple):
    """Prompt tokens whose log-probabilities a step computes: those that follow its tokens from number `start` on."""

    start: int
    target_ids: np.ndarray  # int64 [N], the tokens that follow
    num_logprobs: int  # most likely tokens to report for each


class LayerTimes(NamedTuple):
    """Means over the layers of a step that were timed, on rank 0."""

    link: tuple[float, float] | None  # tokens of a streamed group, and seconds; None if none was timed
    cpu_s: float | None  # seconds of the CPU's attention in a layer, or None if none was timed


class DraftTimes(NamedTuple):
    """Seconds of a draft, measured at start-up: with no keys but the newest, and for each further one."""

    base_s: float = 0.0
    key_s: float = 0.0


class SequenceStep(NamedTuple):
    """The new tokens of one sequence and where its paged keys are.

    The paged keys are all keys of the sequence except those that are streamed or that the CPU attends to. `block_table`
    lists the gpu_block_ids that hold them. The last `num_tokens` of the `num_paged_keys` keys are those of the new
    tokens; the blocks before them may be in any order. All blocks before those of the new tokens are full.

    With speculation the last `num_guesses` new tokens are guesses, and the step samples after each of them too. An id
    of -1 among them is drafted by the ranks before the step's own pass.
    """

    seq_id: int
    token_ids: np.ndarray  # int64 [num_tokens]; -1 for a token that the previous step is still sampling, or a draft
    position: int  # the first new token's
    num_prompt_tokens: int
    block_table: tuple[int, ...]
    num_paged_keys: int
    sampling: SamplingRow | None  # None: the prompt continues in a later step
    previous_row: int = -1  # row of the previous step whose sampled token is this step's last token
    num_guesses: int = 0
    num_drafts: int = 0  # tokens that the ranks draft one after another, of which those with id -1 become guesses
    edits: LogitEdits | None = None
    num_logprobs: int | None = None  # most likely tokens to report beside each sampled one; None: no log-probabilities
    scores: PromptScores | None = None
    payloads: tuple[SequencePayload, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the step samples: the one after each guess, and the one before the first guess."""
        return 0 if self.sampling is None else 1 + self.num_guesses

    @property
    def sampled_position(self) -> int:
        """The position of the first token that the step samples."""
        return self.position + len(self.token_ids) - self.num_guesses

    def payload(self, kind: type[P]) -> P | None:
        """Return the payload of this type, or None if there is none."""
        return find_payload(self.payloads, kind)

    def with_payload(self, payload: SequencePayload) -> "SequenceStep":
        """Replace the payload of the same type."""
        return self._replace(payloads=tuple(payload if type(each) is type(payload) else each for each in self.payloads))

    @property
    def guesses(self) -> list[int]:
        return self.token_ids[self.num_tokens - self.num_guesses :].tolist()


@dataclass(frozen=True)
class StepPlan:
    """One step, the same on every rank: the sequences in the order of their rows, and what moves.

    The step's sampled tokens are in the order of the sequences that sample, and in order of position for each of them.
    All steps run in the order in which they were planned, because a plan builds on the K/V and the sampled tokens of
    the plans before it.
    """

    sequences: tuple[SequenceStep, ...]
    moves: KVMoves

    @property
    def num_tokens(self) -> int:
        return sum(seq.num_tokens for seq in self.sequences)

    @property
    def num_sampled(self) -> int:
        return sum(seq.num_sampled for seq in self.sequences)

    @cached_property
    def is_decode(self) -> bool:
        """True if every sequence samples after each of its tokens."""
        return all(seq.num_tokens == seq.num_sampled for seq in self.sequences)

    @cached_property
    def has_guesses(self) -> bool:
        return any(seq.num_guesses for seq in self.sequences)

    @property
    def has_pending(self) -> bool:
        """True if the ids of some tokens are known only on the device: sampled by the last step, or drafted."""
        return any(seq.previous_row >= 0 or seq.num_drafts for seq in self.sequences)

    @property
    def has_edits(self) -> bool:
        return any(seq.edits is not None for seq in self.sequences)

    @property
    def has_samples(self) -> bool:
        return any(seq.num_sampled for seq in self.sequences)

    @property
    def has_scores(self) -> bool:
        return any(seq.scores is not None for seq in self.sequences)

    def draft_rows(self) -> list[list[int]]:
        """For each draft that precedes the step's own pass, the rows of the sequences that take part.

        The drafted tokens follow the sampled ones in the step's result, in this order.
        """
        num_drafts = max((seq.num_drafts for seq in self.sequences), default=0)
        return [[row for row, seq in enumerate(self.sequences) if seq.num_drafts > i] for i in range(num_drafts)]

    def verified_tokens(self, token_ids: list[int]) -> list[list[int]]:
        """For each row, return the sampled tokens up to the first that differs from the guess at its position.

        A sampled token after a wrong guess follows a text that the sequence does not have. `token_ids` are the step's
        result: the sampled tokens, and then the drafted ones.
        """
        if not self.has_guesses:
            ids = iter(token_ids)
            return [[] if step.sampling is None else [next(ids)] for step in self.sequences]
        sampled, tokens = iter(token_ids[: self.num_sampled]), []
        guesses = self._guesses(token_ids[self.num_sampled :])
        for step, guessed in zip(self.sequences, guesses, strict=True):
            own = list(islice(sampled, step.num_sampled))
            num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guessed, own, strict=False)))
            tokens.append(own[: num_right + 1])
        return tokens

    def _guesses(self, drafted: list[int]) -> list[list[int]]:
        """Each row's guesses, with the drafted tokens in their places."""
        guesses, drafts = [step.guesses for step in self.sequences], iter(drafted)
        for i, rows in enumerate(self.draft_rows()):
            for row in rows:
                draft = next(drafts)
                if i < len(guesses[row]) and guesses[row][i] < 0:
                    guesses[row][i] = draft
        return guesses
