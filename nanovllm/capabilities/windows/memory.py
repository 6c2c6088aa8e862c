"""WindowMemory: one rank's keys of the layers with a window, in rings on the GPU and in snapshots in CPU memory.

Legend: T packed tokens of a step, B sequences, H query heads, K kv heads, D head dim, P tokens per page, N pages,
M pages of a sequence in a block table.

A sequence's keys in these layers are a state like the states of recurrent layers, in the same slots and snapshots
(capabilities/recurrent/places.py): a ring of the newest tokens for each layer (WindowSpec). A slot's rings are
contiguous:

    | layer 0: pages of K | pages of V | layer 1: pages of K | pages of V | ...

A layer's K is a view of all pages of all slots that begins at the layer's first page, so one block table serves all
layers. The attention kernels see a paged cache whose block table begins at the page of the oldest key in a window, and
a sequence may have a page twice there: at its beginning with old tokens and at its end with new ones.

A step writes up to `max_short_tokens` new tokens of a sequence to its ring and then attends. Longer chunks would
replace keys that their first tokens need. So in a step with a longer chunk, layers write K and V to a buffer, the
*fresh* keys. A long chunk attends to a copy of the preceding window and of its fresh keys in another buffer, the
*workspace*, and its end goes to the ring afterwards. All layers share both buffers. If several long chunks do not fit
the workspace together, they attend one after another.

K and V of a rejected draft token stay in the ring until the next step overwrites them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch
from nanovllm.capabilities.recurrent.memory import NO_STATE, SlotMemory
from nanovllm.capabilities.recurrent.places import StateStep
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.plan.kv_spec import WindowSpec
from nanovllm.plan.step_plan import SequenceStep, StepPlan
from nanovllm.runner.inputs import Array, to_device
from nanovllm.runner.kv_memory import KVMemory
from nanovllm.runner.seams import CompanionColumns, CompanionMemory, LayerMemoryOf
from nanovllm.utils.arithmetic import ceil_div


class Row(NamedTuple):
    """The new tokens of a sequence in a step."""

    slot: int
    start: int  # position of the first new token
    end: int  # position after the last new token
    saves: tuple[tuple[int, int], ...]  # positions whose preceding window is copied to a snapshot, and the snapshots

    @classmethod
    def of(cls, step: SequenceStep) -> "Row":
        state = step.payload(StateStep) or NO_STATE
        saves = ((step.position + save.num_tokens, save.snapshot) for save in state.saves if save.slot < 0)
        return cls(state.target, step.position, step.position + step.num_tokens, tuple(saves))

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Copies(NamedTuple):
    """Copies of tokens from cells of one cache to cells of another, int64 each."""

    sources: Array
    targets: Array


class Part(NamedTuple):
    """Some sequences of a step that attend together. `tokens`: int64, their places among the step's tokens."""

    tokens: Array
    fresh: Copies  # from the fresh keys to the cache in which the sequences attend
    old: Copies  # from the rings to the workspace; empty if the sequences attend in their rings
    ends: Copies  # from the workspace to the rings
    saves: tuple[tuple[int, Copies], ...]  # snapshots, and copies from the cache to them
    cu_seqlens_q: Array
    context_lens: Array
    block_tables: Array


class WindowMemory(SlotMemory):
    """The rings of a rank."""

    paddings = (0, 0)  # a padding row has no keys, and writes none

    def __init__(
        self,
        spec: WindowSpec,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int,
        num_snapshots: int,
    ) -> None:
        s, self.spec, self.backend, self.dtype, self.device = spec, spec, backend, dtype, device
        of_slot = s.num_layers, 2, s.num_pages, s.page_tokens, s.num_kv_heads, s.head_dim
        super().__init__([(of_slot, dtype)], device, num_slots, num_snapshots)
        self.slot_pages = 2 * s.num_layers * s.num_pages
        pages_NPKD, num_pages = self.slots[0].view(-1, *of_slot[3:]), (num_slots - 1) * self.slot_pages + s.num_pages
        starts = range(0, self.slot_pages, s.num_pages)
        k_and_v = [pages_NPKD[start : start + num_pages] for start in starts]
        self.layers = list(zip(k_and_v[::2], k_and_v[1::2], strict=True))

    def columns(self, plan: StepPlan) -> tuple[np.ndarray, ...]:
        """Return the slot of each sequence, and its number of tokens after the step."""
        rows = [Row.of(step) for step in plan.sequences]
        return np.array([row.slot for row in rows], np.int32), np.array([row.end for row in rows], np.int32)

    def layer_memory(self, given: CompanionColumns) -> LayerMemoryOf:
        if given.plan is None:
            return GraphRings(self, given).of_layer
        rows = [Row.of(step) for step in given.plan.sequences]
        is_short = all(row.num_tokens <= self.spec.max_short_tokens and not row.saves for row in rows)
        return (StepRings(self, rows) if is_short else StepChunks(self, rows)).of_layer

    def launch_kernels(
        self,
        q_THD: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        max_context_len: int,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        queries = q_THD.new_zeros(*q_THD.shape[:2], self.spec.head_dim)
        self.backend.launch_kernels(queries, self.layers[0][0], self.spec.window, sinks_H)

    # -- places of tokens, on the host ------------------------------------------------------------------------------

    def cells(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """Return the cells of tokens in a slot's rings."""
        size = self.spec.page_tokens
        return (slot * self.slot_pages + positions // size % self.spec.num_pages) * size + positions % size

    def table(self, row: Row) -> tuple[np.ndarray, int]:
        """Return the pages that a row's tokens see in their ring, and the number of keys in these pages."""
        size, num_pages = self.spec.page_tokens, self.spec.num_pages
        first = self.first_key(row.start + 1) // size
        pages = np.arange(first, ceil_div(row.end, size))
        return row.slot * self.slot_pages + pages % num_pages, row.end - first * size

    def first_key(self, num_tokens: int) -> int:
        """Return the position of the oldest key that the last of `num_tokens` tokens sees."""
        return max(0, num_tokens - self.spec.window)

    def batch(self, part: Part, host: HostTables) -> PagedBatch:
        return PagedBatch(
            cu_seqlens_q=part.cu_seqlens_q,
            context_lens=part.context_lens,
            block_tables=part.block_tables,
            max_query_len=max(host.query_lens),
            max_context_len=max(host.context_lens),
            causal=True,
            host=host,
            window=self.spec.window,
        )


class RingKeys(NamedTuple):
    """The keys of a layer in a step whose new tokens all go to rings: a WindowKeys (attention/base.py)."""

    cells: KVCells
    batch: PagedBatch
    backend: AttentionBackend
    scale: float

    def attend(self, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        k, v, _ = self.cells
        return self.backend.attend(q_THD, k, v, self.batch, self.scale, sinks_H).out_THD


class GraphRings:
    """The rings in a CUDA graph, where only the device knows the slots and lengths. The graph computes the block tables
    when its first layer asks for them.
    """

    def __init__(self, memory: WindowMemory, given: CompanionColumns) -> None:
        self.memory, self.given = memory, given
        self._batch: PagedBatch | None = None
        self._cells_T = given.cu_seqlens_q

    def of_layer(self, layer: int) -> RingKeys:
        if self._batch is None:
            from nanovllm.kernels.window_rows import window_rows

            spec, (slots, ends), cu_seqlens_q = self.memory.spec, self.given.columns, self.given.cu_seqlens_q
            context_lens, block_tables, self._cells_T = window_rows(
                cu_seqlens_q, slots, ends, spec.window, spec.page_tokens, spec.num_pages, self.memory.slot_pages
            )
            self._batch = PagedBatch(
                cu_seqlens_q=cu_seqlens_q,
                context_lens=context_lens,
                block_tables=block_tables,
                max_query_len=self.given.max_query_len,
                max_context_len=block_tables.shape[1] * spec.page_tokens,
                causal=True,
                window=spec.window,
            )
        k, v = self.memory.layers[layer]
        return RingKeys(KVCells(k, v, self._cells_T), self._batch, self.memory.backend, self.memory.spec.scale)


class StepRings:
    """The rings in a step that is launched kernel by kernel."""

    def __init__(self, memory: WindowMemory, rows: Sequence[Row]) -> None:
        self.memory = memory
        part, host = _part_in_rings(memory, rows, range(len(rows)))
        part = to_device(part, memory.device)
        self._cells_T, self._batch = part.fresh.targets, memory.batch(part, host)

    def of_layer(self, layer: int) -> RingKeys:
        k, v = self.memory.layers[layer]
        return RingKeys(KVCells(k, v, self._cells_T), self._batch, self.memory.backend, self.memory.spec.scale)


class StepChunks:
    """The keys in a step with chunks that are too long for the rings, or with saves in the middle of chunks."""

    def __init__(self, memory: WindowMemory, rows: Sequence[Row]) -> None:
        self.memory, spec = memory, memory.spec
        num_tokens = sum(row.num_tokens for row in rows)
        capacity = ceil_div(spec.window + num_tokens, spec.page_tokens) + 1  # pages
        short = [i for i, row in enumerate(rows) if row.num_tokens <= spec.max_short_tokens]
        planned = [_part_in_rings(memory, rows, short)] if short else []
        groups = _groups(memory, rows, capacity)
        planned += [_part_in_workspace(memory, rows, group) for group in groups]
        parts: tuple[Part, ...] = to_device(tuple(part for part, _ in planned), memory.device)
        batches = [memory.batch(part, host) for part, (_, host) in zip(parts, planned, strict=True)]
        self.ring_parts = list(zip(parts, batches, strict=True))[: bool(short)]
        self.workspace_parts = list(zip(parts, batches, strict=True))[bool(short) :]
        shape = 1, num_tokens, spec.num_kv_heads, spec.head_dim
        self.fresh = [torch.empty(shape, dtype=memory.dtype, device=memory.device) for _ in ("k", "v")]
        # Zeros, because keys before a window are masked, and a weight of 0 does not cancel NaN
        shape = capacity if groups else 0, spec.page_tokens, spec.num_kv_heads, spec.head_dim
        self.workspace = [torch.zeros(shape, dtype=memory.dtype, device=memory.device) for _ in ("k", "v")]
        self._all_cells_T = torch.arange(num_tokens, device=memory.device)

    def of_layer(self, layer: int) -> "ChunkKeys":
        k, v = self.fresh
        return ChunkKeys(KVCells(k, v, self._all_cells_T), self, layer, self.memory.layers[layer])

    def save(self, layer: int, part: Part, caches: Sequence[torch.Tensor]) -> None:
        """Copy windows in the middle of chunks to snapshots."""
        for snapshot, copies in part.saves:
            for target, cache in zip(self.memory.snapshots[0][snapshot, layer], caches, strict=True):
                ring = torch.zeros(target.shape, dtype=target.dtype, device=cache.device)
                _copy(cache, ring, copies)
                target.copy_(ring, non_blocking=True)


class ChunkKeys(NamedTuple):
    """The keys of a layer in such a step: a WindowKeys (attention/base.py)."""

    cells: KVCells  # of the fresh keys
    step: StepChunks
    layer: int
    rings: tuple[torch.Tensor, torch.Tensor]

    def attend(self, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        out_THD, step = torch.empty_like(q_THD), self.step
        for parts, caches in ((step.ring_parts, self.rings), (step.workspace_parts, step.workspace)):
            for part, batch in parts:
                for ring, fresh, cache in zip(self.rings, step.fresh, caches, strict=True):
                    _copy(ring, cache, part.old)
                    _copy(fresh, cache, part.fresh)
                    _copy(cache, ring, part.ends)
                step.save(self.layer, part, caches)
                memory, q = step.memory, q_THD[part.tokens]
                k, v = caches
                out_THD[part.tokens] = memory.backend.attend(q, k, v, batch, memory.spec.scale, sinks_H).out_THD
        return out_THD


def _copy(source_NPKD: torch.Tensor, target_NPKD: torch.Tensor, copies: Copies) -> None:
    if len(copies.sources):
        tokens = source_NPKD.flatten(0, 1)[copies.sources]
        target_NPKD.flatten(0, 1)[copies.targets] = tokens


def _part_in_rings(memory: WindowMemory, rows: Sequence[Row], chosen: Sequence[int]) -> tuple[Part, HostTables]:
    """Plan the rows `chosen` so that they attend in their rings."""
    starts = _token_starts(rows)
    tables = [memory.table(rows[i]) for i in chosen]
    tokens = _joined(starts[i] + np.arange(rows[i].num_tokens) for i in chosen)
    cells = _joined(memory.cells(rows[i].slot, np.arange(rows[i].start, rows[i].end)) for i in chosen)
    none = Copies(_joined(()), _joined(()))
    saves: list[tuple[int, Copies]] = []
    for i in chosen:
        for position, snapshot in rows[i].saves:
            kept = _window(memory, position)
            saves.append((snapshot, Copies(memory.cells(rows[i].slot, kept), memory.cells(0, kept))))
    return _make_part(rows, chosen, tables, tokens, Copies(tokens, cells), none, none, saves)


def _part_in_workspace(memory: WindowMemory, rows: Sequence[Row], chosen: Sequence[int]) -> tuple[Part, HostTables]:
    """Plan the rows `chosen` so that they attend in the workspace, one after another in its pages."""
    starts, size, first_page = _token_starts(rows), memory.spec.page_tokens, 0
    tables: list[tuple[np.ndarray, int]] = []
    tokens, fresh, old_sources, old_targets, end_sources, end_targets = ([] for _ in range(6))
    saves: list[tuple[int, Copies]] = []
    for i in chosen:
        row = rows[i]
        first_key = memory.first_key(row.start + 1)
        base = first_key // size * size  # position of the first cell
        num_pages = ceil_div(row.end - base, size)
        tables.append((first_page + np.arange(num_pages), row.end - base))
        shift, old = first_page * size - base, np.arange(first_key, row.start)
        tokens.append(starts[i] + np.arange(row.num_tokens))
        fresh.append(shift + np.arange(row.start, row.end))
        old_sources.append(memory.cells(row.slot, old))
        old_targets.append(shift + old)
        kept = _window(memory, row.end)
        end_sources.append(shift + kept)
        end_targets.append(memory.cells(row.slot, kept))
        for position, snapshot in row.saves:
            kept = _window(memory, position)
            saves.append((snapshot, Copies(shift + kept, memory.cells(0, kept))))
        first_page += num_pages
    joined = _joined(tokens)
    old_copies = Copies(_joined(old_sources), _joined(old_targets))
    ends = Copies(_joined(end_sources), _joined(end_targets))
    return _make_part(rows, chosen, tables, joined, Copies(joined, _joined(fresh)), old_copies, ends, saves)


def _make_part(
    rows: Sequence[Row],
    chosen: Sequence[int],
    tables: Sequence[tuple[np.ndarray, int]],
    tokens: np.ndarray,
    fresh: Copies,
    old: Copies,
    ends: Copies,
    saves: Sequence[tuple[int, Copies]],
) -> tuple[Part, HostTables]:
    query_lens, context_lens = [rows[i].num_tokens for i in chosen], [num_keys for _, num_keys in tables]
    padded = np.zeros((len(tables), max(2, *(len(pages) for pages, _ in tables))), np.int32)
    for padded_row, (pages, _) in zip(padded, tables, strict=True):
        padded_row[: len(pages)] = pages
    cu_seqlens_q = np.cumsum([0, *query_lens], dtype=np.int32)
    part = Part(tokens, fresh, old, ends, tuple(saves), cu_seqlens_q, np.array(context_lens, np.int32), padded)
    return part, HostTables(query_lens, context_lens, [pages.tolist() for pages, _ in tables])


def _window(memory: WindowMemory, position: int) -> np.ndarray:
    """Return the positions that the token at `position` sees before itself."""
    return np.arange(memory.first_key(position + 1), position)


def _token_starts(rows: Sequence[Row]) -> np.ndarray:
    return np.cumsum([0, *(row.num_tokens for row in rows)])


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _groups(memory: WindowMemory, rows: Sequence[Row], capacity: int) -> list[list[int]]:
    """Divide the rows with long chunks into groups that fit a workspace of `capacity` pages."""
    size, groups, num_used = memory.spec.page_tokens, list[list[int]](), capacity
    for i, row in enumerate(rows):
        if row.num_tokens <= memory.spec.max_short_tokens:
            continue
        num_pages = ceil_div(row.end, size) - memory.first_key(row.start + 1) // size
        if num_used + num_pages > capacity:
            groups.append([])
            num_used = 0
        groups[-1].append(i)
        num_used += num_pages
    return groups


@dataclass(frozen=True)
class WindowSetup:
    """A CompanionSetup."""

    num_slots: int
    num_snapshots: int

    def allocate(self, memory: KVMemory) -> WindowMemory:
        spec = memory.spec.states
        assert isinstance(spec, WindowSpec), "the model has layers with a window"
        return WindowMemory(spec, memory.backend, memory.dtype, memory.device, self.num_slots, self.num_snapshots)

    def make_drafts(self, companion: CompanionMemory) -> None:
        return None
