"""A step's inputs: arrays computed from the plan with numpy, and their tensors, copied to the device in one copy.

A step has T tokens of B sequences and samples S tokens. The classes hold numpy arrays on the host and tensors on the
device. `build_inputs` makes what the layers read, and `late_inputs` what only logits need. Late inputs take another
copy, because the host prepares them while the device runs the layers.
"""

import typing
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, repeat
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from nanovllm.kernels.sampling_tensors import EditTensors, SamplingTensors
from nanovllm.plan.logit_edits import Penalties, RowEdits
from nanovllm.plan.step_plan import SamplingRow, StepPlan
from nanovllm.utils.arithmetic import ceil_div

Array: TypeAlias = Any  # np.ndarray or torch.Tensor
Tree = TypeVar("Tree")

_ALIGNMENT = 16  # bytes; Triton compiles a kernel again when a pointer's alignment changes
_DTYPE_OF: dict[type, np.dtype] = {float: np.dtype(np.float32), int: np.dtype(np.int64)}
_ROW_DTYPES = tuple(_DTYPE_OF[kind] for kind in typing.get_type_hints(SamplingRow).values())  # one for each field
SAMPLING_DTYPES = (*_ROW_DTYPES, np.dtype(np.int64))  # by field of SamplingTensors


class GroupInputs(NamedTuple):
    """The keys of one streamed group that each sequence attends to."""

    context_lens: Array  # int32 [B]
    block_tables: Array  # int32 [B, blocks of a group]


class StepInputs(NamedTuple):
    """The inputs of the model and the sampler in every step. The static inputs of a graph are StepInputs, too."""

    input_ids: Array  # int64 [T]
    # int64 [T]: the row of the last sampled tokens that has this token, or -1 if the token is in input_ids
    pending_rows: Array
    positions: Array  # int64 [T]
    rope_lens: Array  # int64 [T]
    slot_mapping: Array  # int64 [T]
    cu_seqlens_q: Array  # int32 [B + 1]
    context_lens: Array  # int32 [B]
    block_tables: Array  # int32 [B, longest]
    sampling_seqs: Array  # int64 [B'], the sequences that sample
    sampling_cu_seqlens: Array  # int32 [B' + 1], cumulative numbers of tokens that they sample
    logits_rows: Array  # int64 [S], the tokens after which they sample: the last tokens of each sequence
    sampling: SamplingTensors  # each [S]
    groups: tuple[GroupInputs, ...]
    companion_columns: tuple[Array, ...]  # each int32 [B] (runner/seams.py)


class EditInputs(NamedTuple):
    edits: EditTensors
    sampling: SamplingTensors  # of the edited rows


class LogprobInputs(NamedTuple):
    """N tokens whose log-probabilities the step reports."""

    rows: Array  # int64 [N]: rows of the sampled tokens, or of the hidden states after which the tokens are scored
    token_ids: Array | None  # int64 [N]; or None for the sampled tokens
    num_top: int  # most likely tokens to report for each


class LateInputs(NamedTuple):
    """What few requests ask for, and no layer reads. Each field is None if no request of the step asks for it."""

    edits: EditInputs | None
    logprobs: LogprobInputs | None  # of sampled tokens
    prompt_logprobs: LogprobInputs | None


def pad_tables(tables: Sequence[Sequence[int]], num_columns: int) -> np.ndarray:
    """int32 [len(tables), num_columns]; missing entries are 0, a valid block."""
    padded = np.zeros((len(tables), num_columns), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def padded_groups(groups: Sequence[GroupInputs], num_rows: int) -> np.ndarray:
    """int32 [groups, num_rows, 1 + blocks of a group]: for each sequence its number of keys, then its block table. The
    rows after the last sequence have no keys.
    """
    padded = np.zeros((len(groups), num_rows, 1 + groups[0].block_tables.shape[1]), dtype=np.int32)
    for rows, (context_lens, block_tables) in zip(padded, groups, strict=True):
        rows[: len(context_lens), 0], rows[: len(context_lens), 1:] = context_lens, block_tables
    return padded


def build_inputs(
    plan: StepPlan, block_size: int, group_blocks: int, companion_columns: tuple[np.ndarray, ...] = ()
) -> StepInputs:
    """Compute the inputs of a step, on the host. A streamed group has up to `group_blocks` blocks. Hot:
    once per step.
    """
    steps = plan.sequences
    query_lens = np.array([step.num_tokens for step in steps], dtype=np.int64)
    context_lens = np.array([step.num_paged_keys for step in steps], dtype=np.int64)
    starts = np.array([step.position for step in steps], dtype=np.int64)
    prompt_lens = np.array([step.num_prompt_tokens for step in steps], dtype=np.int64)
    ends = np.cumsum(query_lens)
    tables = pad_tables([step.block_table for step in steps], max(len(step.block_table) for step in steps))

    seq = np.repeat(np.arange(len(steps)), query_lens)  # each token's sequence
    offset = np.arange(ends[-1]) - (ends - query_lens)[seq]  # index among the sequence's new tokens
    positions = starts[seq] + offset
    paged = (context_lens - query_lens)[seq] + offset  # the token's index among its sequence's paged keys
    num_sampled = np.array([step.num_sampled for step in steps], dtype=np.int64)
    logits_rows = np.flatnonzero(offset >= (query_lens - num_sampled)[seq])
    sampling_rows = [step.sampling for step in steps if step.sampling is not None]
    sampling_lens = num_sampled[num_sampled > 0]
    drafts = plan.draft_rows()
    return StepInputs(
        input_ids=np.concatenate([step.token_ids for step in steps]),
        pending_rows=_draft_numbers(plan, drafts, ends) if drafts else _previous_rows(plan, ends),
        positions=positions,
        rope_lens=np.maximum(prompt_lens[seq], positions + 1),
        slot_mapping=tables[seq, paged // block_size].astype(np.int64) * block_size + paged % block_size,
        cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=tables,
        sampling_seqs=np.flatnonzero(num_sampled),
        sampling_cu_seqlens=np.concatenate([[0], sampling_lens.cumsum()]).astype(np.int32),
        logits_rows=logits_rows,
        sampling=sampling_arrays(sampling_rows, sampling_lens, positions[logits_rows] + 1),
        groups=tuple(
            GroupInputs(np.array(group.context_lens(block_size), np.int32), pad_tables(group.tables, group_blocks))
            for group in plan.moves.streamed
        ),
        companion_columns=companion_columns,
    )


def sampling_arrays(rows: Iterable[SamplingRow], num_tokens: np.ndarray, positions: np.ndarray) -> SamplingTensors:
    """`num_tokens`: how many tokens each row samples. `positions`: of the sampled tokens, int64 [S]."""
    columns = list(zip(*rows, strict=True)) or [()] * len(_ROW_DTYPES)
    arrays = map(np.repeat, map(np.array, columns, _ROW_DTYPES), repeat(num_tokens))
    return SamplingTensors._make((*arrays, positions))


def _previous_rows(plan: StepPlan, ends: np.ndarray) -> np.ndarray:
    """Return `pending_rows`: the row of the previous step that samples a sequence's last token. `ends`: the end of each
    sequence's tokens.
    """
    rows = np.full(ends[-1], -1, dtype=np.int64)
    rows[ends - 1] = [step.previous_row for step in plan.sequences]
    return rows


def _draft_numbers(plan: StepPlan, drafts: list[list[int]], ends: np.ndarray) -> np.ndarray:
    """Return `pending_rows` of a step with drafts: a draft token's index among the drafted tokens."""
    assert all(step.previous_row < 0 for step in plan.sequences), (
        "a step with drafts needs the tokens of the previous step"
    )
    numbers = np.full(ends[-1], -1, dtype=np.int64)
    drafted = ((i, row) for i, rows in enumerate(drafts) for row in rows)
    for number, (i, row) in enumerate(drafted):
        step = plan.sequences[row]
        if i < step.num_guesses and step.guesses[i] < 0:
            numbers[ends[row] - step.num_guesses + i] = number
    return numbers


# -- edits and log-probabilities, which few requests ask for -----------------------------------------------------


def late_inputs(plan: StepPlan, sampling: SamplingTensors, vocab_size: int) -> LateInputs:
    """`sampling`: of all rows of the step, on the host."""
    return LateInputs(
        edit_inputs(plan, sampling, vocab_size), sampled_logprob_inputs(plan), prompt_logprob_inputs(plan)
    )


def sampled_logprob_inputs(plan: StepPlan) -> LogprobInputs | None:
    if not any(step.num_logprobs is not None for step in plan.sequences):
        return None
    asking = [step.num_logprobs for step in plan.sequences for _ in range(step.num_sampled)]
    rows = [row for row, num_logprobs in enumerate(asking) if num_logprobs is not None]
    return LogprobInputs(np.array(rows, np.int64), None, max(asking[row] or 0 for row in rows))


def prompt_logprob_inputs(plan: StepPlan) -> LogprobInputs | None:
    starts = accumulate((step.num_tokens for step in plan.sequences), initial=0)
    scores = [(start, step.scores) for start, step in zip(starts, plan.sequences, strict=False) if step.scores]
    if not scores:
        return None
    rows = [start + score.start + np.arange(len(score.target_ids)) for start, score in scores]
    targets = [score.target_ids for _, score in scores]
    return LogprobInputs(np.concatenate(rows), np.concatenate(targets), max(score.num_logprobs for _, score in scores))


class _EditedRow(NamedTuple):
    """One row of logits that is edited."""

    row: int  # among the sampled rows
    token: int  # the row's own token among the step's inputs
    first_new_token: int  # first of the tokens that the kernel counts for the penalties
    penalties: Penalties
    edits: RowEdits


def _edited_rows(plan: StepPlan) -> Iterator[_EditedRow]:
    first_row = num_tokens = 0
    for step in plan.sequences:
        num_tokens += step.num_tokens
        if step.edits is not None:
            first_token = num_tokens - step.num_sampled
            first_new = first_token + 1 - step.edits.num_new_tokens
            for i in range(step.num_sampled):
                yield _EditedRow(first_row + i, first_token + i, first_new, step.edits.penalties, step.edits.rows[i])
        first_row += step.num_sampled


def edit_inputs(plan: StepPlan, sampling: SamplingTensors, vocab_size: int) -> EditInputs | None:
    """`sampling`: of all rows of the step."""
    if not plan.has_edits:
        return None
    rows = list(_edited_rows(plan))
    penalties, edits = [row.penalties for row in rows], [row.edits for row in rows]
    prompt_rows, prompt_masks = _distinct_masks([each.prompt_mask for each in penalties], vocab_size)
    allowed_rows, allowed = _distinct_masks([each.allowed for each in edits], vocab_size)
    (seen_starts, seen_ends), (seen_ids, seen_counts) = _end_to_end(
        [each.token_ids for each in penalties], [each.counts for each in penalties]
    )
    biases = [each.biases for each in edits]
    (bias_starts, bias_ends), (bias_ids, bias_values) = _end_to_end(*zip(*biases, strict=True))
    arrays: dict[str, Any] = {
        "rows": np.array([row.row for row in rows], np.int64),
        "repetition": np.array([each.repetition for each in penalties], np.float32),
        "frequency": np.array([each.frequency for each in penalties], np.float32),
        "presence": np.array([each.presence for each in penalties], np.float32),
        "prompt_row": prompt_rows,
        "seen_start": seen_starts,
        "seen_end": seen_ends,
        "new_start": np.array([row.first_new_token for row in rows], np.int64),
        "new_end": np.array([row.token + 1 for row in rows], np.int64),
        "bias_start": bias_starts,
        "bias_end": bias_ends,
        "allowed_row": allowed_rows,
        "seen_ids": seen_ids,
        "seen_counts": seen_counts,
        "bias_ids": bias_ids,
        "bias_values": bias_values,
        "allowed": allowed,
        "prompt_masks": prompt_masks,
    }
    return EditInputs(EditTensors(**arrays), SamplingTensors._make(column[arrays["rows"]] for column in sampling))


def _end_to_end(*columns: Sequence[np.ndarray]) -> tuple[tuple[np.ndarray, np.ndarray], list[np.ndarray]]:
    """Concatenate each column's arrays, and return the start and end of each array, int64. An object that occurs again
    is not repeated: answers to one prompt share their biases.
    """
    starts: dict[int, int] = {}  # by the id of the first column's array
    distinct, num_entries = [], 0
    for i, array in enumerate(columns[0]):
        if id(array) not in starts:
            starts[id(array)] = num_entries
            num_entries += len(array)
            distinct.append(i)
    found = np.array([starts[id(array)] for array in columns[0]], np.int64)
    ends = found + [len(array) for array in columns[0]]
    return (found, ends), [np.concatenate([column[i] for i in distinct]) for column in columns]


def _distinct_masks(masks: Sequence[np.ndarray | None], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each mask's row, or -1, int64, and the distinct rows, int32 [K, ceil(vocab_size / 32)]."""
    distinct = {id(mask): mask for mask in masks if mask is not None}
    numbers = {id(None): -1} | dict(zip(distinct, range(len(distinct)), strict=True))
    rows = np.stack(list(distinct.values())) if distinct else np.zeros((0, ceil_div(vocab_size, 32)), np.int32)
    return np.array([numbers[id(mask)] for mask in masks], np.int64), rows


# -- to the device -----------------------------------------------------------------------------------------------


class Packing(Generic[Tree]):
    """Where the arrays of nested tuples are in a buffer that holds them one after another, each aligned."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.arrays = tree, list(_arrays_of(tree))
        self._starts = packed_starts(array.nbytes for array in self.arrays)

    @property
    def num_bytes(self) -> int:
        return self._starts[-1]

    @cached_property
    def packed(self) -> np.ndarray:
        """A buffer that holds the arrays of the tree."""
        buffer = np.zeros(self.num_bytes, np.uint8)
        self.write(buffer, self.tree)
        return buffer

    def view(self, buffer: torch.Tensor) -> Tree:
        """View a buffer of bytes as tensors of the shapes and types of the arrays."""
        places = zip(self.arrays, self._starts, strict=False)
        views = (
            buffer[start : start + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
            for array, start in places
        )
        return typing.cast(Tree, _with_tensors(self.tree, views))

    def write(self, buffer: np.ndarray, values: Tree) -> None:
        """Copy `values` to a buffer of bytes: arrays of the same types, but maybe shorter. A place of no bytes is
        skipped.
        """
        given_arrays = self.arrays if values is self.tree else _arrays_of(values)
        for array, start, given in zip(self.arrays, self._starts, given_arrays, strict=False):
            if array.nbytes:
                assert given.dtype == array.dtype and given.nbytes <= array.nbytes, "the array does not fit its place"
                buffer[start : start + given.nbytes] = given.reshape(-1).view(np.uint8)


def make_staging(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a buffer of bytes to copy to the device from, which is pinned for a GPU.

    The memory comes from torch's caching allocator, which gives it to no other buffer before the GPU has made all
    copies from it. A ring of buffers would have to wait for the GPU instead, because the host may be many copies ahead:
    each draft of a step is one.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(inputs: Tree, device: torch.device) -> Tree:
    """Move all arrays of nested tuples to the device in one copy from one buffer. Does not wait for the copy."""
    packing = Packing(inputs)
    if not packing.arrays:
        return inputs
    staging = make_staging(packing.num_bytes, device)
    packing.write(staging.numpy(), inputs)
    return packing.view(staging.to(device, non_blocking=True))


def _arrays_of(tree: Any) -> Iterator[np.ndarray]:
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, tuple):
        for value in tree:
            yield from _arrays_of(value)


def _with_tensors(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild the nested tuples with the next tensor in the place of each array."""
    if isinstance(tree, np.ndarray):
        return next(tensors)
    if not isinstance(tree, tuple):
        return tree
    values = [_with_tensors(value, tensors) for value in tree]
    return type(tree)._make(values) if hasattr(tree, "_make") else tuple(values)


def packed_starts(sizes: Iterable[int]) -> list[int]:
    """Return where arrays of these sizes start in a buffer that holds them consecutively, and where the buffer ends."""
    return list(accumulate((ceil_div(size, _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


@cache
def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype that corresponds to a numpy dtype."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
