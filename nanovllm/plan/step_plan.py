"""The plan of one step: everything the ranks must do, in integers. Rank 0 makes the plan and sends it to all ranks."""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from nanovllm.plan.logit_edits import LogitEdits
from nanovllm.sampling_params import SamplingParams


class SlotLoad(NamedTuple):
    """A copy of the first tokens of a CPU block to a slot, in every layer. The block is resident from this step on."""

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

    `tables[row]` lists the blocks, as indices into `cpu_block_ids`, that sequence `row` of the step attends to. The
    last `num_cut_tokens` tokens of the last block are not copied, because the CPU attends to them.
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
    """Tokens start..end-1 of a CPU block, which the CPU attends to without copying them."""

    cpu_block_id: int
    start: int
    end: int


class StepPayload(Protocol):
    """Work of a companion (kvcache/seams.py) in a step. Each rank's half of the companion looks it up by type."""

    @property
    def acts_by_layer(self) -> bool:
        """Return True if the payload acts between the parts of a layer, so no graph of all layers can run the step."""


class SequencePayload(Protocol):
    """Work of a companion for one sequence of a step."""

    def in_draft(self, draft: "SequenceStep", step: "SequenceStep", i: int) -> "SequenceStep":
        """Return draft number `i` of `step` as the companion changes it (see StepPlan.draft_rows)."""


P = TypeVar("P", bound=tuple)


def find_payload(payloads: tuple[Any, ...], kind: type[P]) -> P | None:
    """Return the payload of this type, or None if there is none."""
    return next((payload for payload in payloads if type(payload) is kind), None)


@dataclass(frozen=True)
class KVMoves:
    """Moves between CPU memory and the GPU in a step. Without offload, there are only payloads.

    The moves take effect in this order. First come the flushes, which copy evicted blocks to CPU memory before anything
    overwrites their slots. Each layer then runs the loads, the storing of the new K/V, the copies, the offloads,
    attention over the paged keys, and attention over the streamed groups. Concurrently with attention on the GPU, the
    CPU attends to `cpu_spans`, which is empty or has a tuple for each sequence of the step. The type of a payload
    documents when the payload takes effect.
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
        """Return True if a sequence attends to keys that are not on the GPU."""
        return bool(self.streamed or self.cpu_spans)

    @property
    def acts_by_layer(self) -> bool:
        """Return True if a payload acts between the parts of a layer."""
        return any(payload.acts_by_layer for payload in self.payloads)


class SamplingRow(NamedTuple):
    """Parameters for sampling a sequence's tokens. The seed and a token's position alone determine the noise.

    All fields except `seed` have the names of SamplingParams. The sampler gets one float32 or int64 array for each
    field, in this order, and an array of positions (kernels/sampling_tensors.py).
    """

    temperature: float = 0.0  # 0 for greedy sampling
    top_k: int = 0  # disabled if 0 or -1
    top_p: float = 1.0  # disabled if 1
    min_p: float = 0.0  # disabled if 0
    seed: int = 0

    @classmethod
    def make(cls, params: SamplingParams, seed: int) -> "SamplingRow":
        return cls._make((*(getattr(params, name) for name in cls._fields[:-1]), seed))


class PromptScores(NamedTuple):
    """Prompt tokens whose log-probabilities a step computes: each follows one of the step's tokens from `start` on."""

    start: int  # index among the sequence's tokens in the step
    target_ids: np.ndarray  # int64 [N], the tokens to score
    num_logprobs: int  # number of most likely tokens to report at each position


class LayerTimes(NamedTuple):
    """Means over the timed layers of a step, on rank 0."""

    link: tuple[float, float] | None  # tokens and seconds of a streamed group, or None if no group was timed
    cpu_s: float | None  # seconds of the CPU's attention in a layer, or None if no layer was timed


class DraftTimes(NamedTuple):
    """Duration of a draft in seconds, measured at start-up: base_s + key_s * number of keys."""

    base_s: float = 0.0
    key_s: float = 0.0


class SequenceStep(NamedTuple):
    """The new tokens of one sequence and where its paged keys are.

    The paged keys are all keys of the sequence except streamed keys and keys that the CPU attends to. `block_table`
    lists the gpu_block_ids that hold the paged keys. The last `num_tokens` of the `num_paged_keys` keys belong to the
    new tokens. All blocks before the new tokens' blocks are full, and may be in any order.

    With speculation, the last `num_guesses` new tokens are draft tokens, and the step also samples after each draft
    token. The ranks draft the tokens with id -1 before they run the step.
    """

    seq_id: int
    token_ids: np.ndarray  # int64 [num_tokens]; -1 for a token that the previous step is still sampling, or a draft
    position: int  # of the first new token
    num_prompt_tokens: int
    block_table: tuple[int, ...]
    num_paged_keys: int
    sampling: SamplingRow | None  # or None if the prompt continues in a later step
    previous_row: int = -1  # row of the previous step that samples this step's last token
    num_guesses: int = 0
    num_drafts: int = 0  # tokens that the ranks draft one after another; each replaces an id of -1, or is discarded
    edits: LogitEdits | None = None
    num_logprobs: int | None = None  # most likely tokens to report per sampled token, or None for no log-probabilities
    scores: PromptScores | None = None
    payloads: tuple[SequencePayload, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Count the tokens that the step samples: one after each draft token, and one for the first draft token's
        position.
        """
        return 0 if self.sampling is None else 1 + self.num_guesses

    @property
    def sampled_position(self) -> int:
        """Return the position of the first token that the step samples."""
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
    """One step, the same on every rank: the sequences in the order of their rows, and the moves of K and V.

    The step's sampled tokens are in the order of the sequences that sample, and in order of position for each sequence.
    All steps run in the order in which they were planned, because a plan relies on the K/V and the sampled tokens of
    all earlier plans.
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
        """Return True if every sequence samples after each of its tokens."""
        return all(seq.num_tokens == seq.num_sampled for seq in self.sequences)

    @cached_property
    def has_guesses(self) -> bool:
        return any(seq.num_guesses for seq in self.sequences)

    @property
    def has_pending(self) -> bool:
        """Return True if only the device knows the ids of some tokens: sampled by the last step, or drafted."""
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
        """Return, for each draft that the ranks run before the step, the rows of the sequences that draft a token.

        In the step's result, the drafted tokens follow the sampled tokens, in this order.
        """
        num_drafts = max((seq.num_drafts for seq in self.sequences), default=0)
        return [[row for row, seq in enumerate(self.sequences) if seq.num_drafts > i] for i in range(num_drafts)]

    def verified_tokens(self, token_ids: list[int]) -> list[list[int]]:
        """For each row, return the sampled tokens up to the first that differs from the draft token at its position.

        Tokens sampled after a wrong draft token are discarded. token_ids: the step's result, which is the sampled
        tokens followed by the drafted tokens.
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
        """Return each row's draft tokens, with the tokens that the ranks drafted in place of -1."""
        guesses, drafts = [step.guesses for step in self.sequences], iter(drafted)
        for i, rows in enumerate(self.draft_rows()):
            for row in rows:
                draft = next(drafts)
                if i < len(guesses[row]) and guesses[row][i] < 0:
                    guesses[row][i] = draft
        return guesses
