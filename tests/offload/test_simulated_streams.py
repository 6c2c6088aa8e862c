"""The simulator under a miniature ring, and call by call."""

from collections.abc import Sequence

import pytest
import torch
from race_detector import StreamRaceError
from simulated_streams import MODES, Mode, SimulatedStreams, TrackedBackend, write_cells

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.layers.rotary_embedding import KVCells

NUM_BLOCKS = 3
NUM_STEPS = 24


def run_ring(streams: SimulatedStreams) -> None:
    """Blocks 0, 1, 2, 0, ... through two slots, each loaded one step ahead of its reader.

    Block 0 is changed in its slot and written back. Every seventh step writes its slot afresh instead of loading it.
    """
    blocks = torch.arange(NUM_BLOCKS * 4, dtype=torch.float32).view(NUM_BLOCKS, 4)
    slots = torch.full((2, 4), torch.nan)
    ready, read, offloaded = ([streams.event() for _ in range(2)] for _ in range(3))
    written_back = [streams.event() for _ in range(NUM_BLOCKS)]
    streams.name_region("blocks", blocks)
    streams.name_region("slots", slots)

    def fresh(step: int) -> bool:
        return step % 7 == 6

    def load(step: int) -> None:
        slot, block = step % 2, step % NUM_BLOCKS
        if step == NUM_STEPS or fresh(step):
            return
        streams.h2d.wait(read[slot])  # last reader -> overwrite
        streams.h2d.wait(offloaded[slot])  # copied out -> overwrite
        streams.h2d.wait(written_back[block])  # copied out -> copied in
        streams.h2d.copy(slots[slot], blocks[block])
        streams.h2d.record(ready[slot])

    load(0)
    for step in range(NUM_STEPS):
        slot, block = step % 2, step % NUM_BLOCKS
        load(step + 1)
        if fresh(step):
            streams.compute.wait(offloaded[slot])  # copied out -> written afresh
            streams.compute.write(slots[slot])
            slots[slot] = 100.0 + step
        else:
            streams.compute.wait(ready[slot])  # copied in -> read
        streams.compute.read(slots[slot])
        if block == 0:
            streams.compute.write(slots[slot])
            slots[slot] += step + 1
        streams.compute.record(read[slot])
        if block == 0 or fresh(step):
            streams.d2h.wait(read[slot])  # written -> copied out
            streams.d2h.copy(blocks[block], slots[slot])
            streams.d2h.record(offloaded[slot])
            streams.d2h.record(written_back[block])
    streams.synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_ring_without_any_one_edge_races(mode: Mode) -> None:
    streams = SimulatedStreams(mode)
    run_ring(streams)
    assert len(streams.edges_seen) == 6 and all(streams.edges_seen.values())
    for edge in streams.edges_seen:
        with pytest.raises(StreamRaceError, match=r"(blocks|slots)\[\d"):
            run_ring(SimulatedStreams(mode, drop={edge}))


def test_edges_through_a_wait_helper_are_told_apart_by_the_lines_that_call_it() -> None:
    streams = SimulatedStreams()
    event, src, dst = streams.event(), torch.ones(4), torch.zeros(4)

    def _wait() -> None:
        streams.compute.wait(event)

    streams.h2d.copy(dst, src)
    streams.h2d.record(event)
    _wait()
    _wait()
    first, second = sorted(streams.edges_seen)
    assert second.site.line == first.site.line + 1
    assert [streams.edges_seen[first], streams.edges_seen[second]] == [1, 0]


@pytest.mark.parametrize("mode", MODES)
def test_long_chains_of_waits_between_the_copy_streams_end(mode: Mode) -> None:
    """Thousands of waits to and fro neither deadlock nor recurse."""
    streams = SimulatedStreams(mode)
    event, a, b = streams.event(), torch.zeros(1), torch.zeros(1)
    streams.compute.write(a)
    a += 1
    streams.compute.record(event)
    for _ in range(3000):
        streams.h2d.wait(event)
        streams.h2d.copy(b, a)
        streams.h2d.record(event)
        streams.d2h.wait(event)
        streams.d2h.copy(a, b)
        streams.d2h.record(event)
    streams.compute.wait(event)
    streams.compute.read(a)
    assert a.item() == b.item() == 1


def test_late_copy_runs_only_when_forced_and_early_at_once() -> None:
    for streams, at_once in ((SimulatedStreams("late"), 0.0), (SimulatedStreams("early"), 1.0)):
        src, dst = torch.ones(4), torch.zeros(4)
        streams.h2d.copy(dst, src)
        streams.h2d.record(streams.event())
        assert dst[0].item() == at_once
        streams.synchronize()
        assert dst[0].item() == 1


@pytest.mark.parametrize("mode", MODES)
def test_work_runs_in_order_with_copies_and_races_like_a_copy(mode: Mode) -> None:
    streams, raw, added, out = SimulatedStreams(mode), torch.zeros(4), torch.ones(4), torch.zeros(4)
    for value in (1.0, 2.0):
        streams.h2d.copy(raw, torch.full((4,), value))
        streams.h2d.run(out, raw, lambda: out.copy_(10 * out + raw))
    streams.h2d.run(out, added, lambda: out.add_(added))
    for declare, verb in ((streams.d2h.read, "writes"), (streams.d2h.write, "writes"), (streams.d2h.write, "reads")):
        with pytest.raises(StreamRaceError, match=f"not ordered after h2d {verb}"):
            declare(out if verb == "writes" else added)
    streams.synchronize()
    assert out.tolist() == [13.0] * 4
    streams.compute.run(out, added, lambda: out.add_(added))
    assert out.tolist() == [14.0] * 4


def test_copy_of_unequal_or_strided_tensors_is_refused() -> None:
    streams = SimulatedStreams()
    with pytest.raises(AssertionError, match="shapes"):
        streams.h2d.copy(torch.zeros(2), torch.zeros(3))
    with pytest.raises(AssertionError, match="dtypes"):
        streams.h2d.copy(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="contiguous"):
        streams.h2d.copy(torch.zeros(2, 2).T, torch.zeros(2, 2))


class NullBackend(AttentionBackend):
    name = "null"

    @classmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        return parts[0]

    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        return PartialAttention(q_THD, torch.zeros(q_THD.shape[1], len(q_THD)))


NUM_SLOTS, BLOCK_SIZE = 4, 4


def cells_that_race(declare: str) -> tuple[list[int], list[int]]:
    """Cells of the K and of the V cache that h2d may not write after the tracked call."""
    racing: tuple[list[int], list[int]] = ([], [])
    for cache_index in range(2):
        for cell in range(NUM_SLOTS * BLOCK_SIZE):
            streams = SimulatedStreams()
            backend = TrackedBackend(NullBackend(), streams)
            k_cache, v_cache = caches = [torch.zeros(NUM_SLOTS, BLOCK_SIZE, 1, 2) for _ in range(2)]
            if declare == "store":
                write_cells(streams, KVCells(k_cache, v_cache, torch.tensor([7, 8, 9, -1, 2])))
            else:
                host = HostTables(
                    query_lens=[2, 1, 0, 1], context_lens=[6, 3, 4, 0], block_tables=[[3, 1, 0], [1], [2], []]
                )
                unused = torch.zeros(1, dtype=torch.int32)
                batch = PagedBatch(unused, unused, unused, 2, 6, True, host)
                backend.attend(torch.zeros(4, 1, 2), k_cache, v_cache, batch, 1.0)
            try:
                streams.h2d.copy(caches[cache_index].flatten(0, 1)[cell], torch.zeros(1, 2))
            except StreamRaceError:
                racing[cache_index].append(cell)
    return racing


def test_write_cells_writes_the_cells_of_the_slot_mapping() -> None:
    assert cells_that_race("store") == ([2, 7, 8, 9], [2, 7, 8, 9])


def test_tracked_attend_reads_the_valid_tokens_of_every_table() -> None:
    """Block 3 in full, of block 1 two tokens for one sequence and three for another; no queries, no reads."""
    assert cells_that_race("attend") == ([4, 5, 6, 12, 13, 14, 15], [4, 5, 6, 12, 13, 14, 15])
