"""The simulator under a miniature ring, and call by call."""

from collections.abc import Sequence

import pytest
import torch
from race_detector import StreamRaceError
from simulated_streams import MODES, Edge, Mode, SimulatedStreams, TrackedBackend, write_cells

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.layers.rotary_embedding import KVCells

NUM_BLOCKS = 3
NUM_STEPS = 24


def run_ring(streams: SimulatedStreams) -> tuple[list[float], torch.Tensor]:
    """Blocks 0, 1, 2, 0, ... through two slots, each loaded one step ahead of its reader.

    Block 0 is changed in its slot and written back. Every seventh step writes its slot afresh instead of loading it.
    Returns what the readers saw and the blocks at the end.
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

    seen = []
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
        seen.append(slots[slot].sum().item())
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
    return seen, blocks


def ring_edges() -> list[Edge]:
    streams = SimulatedStreams()
    run_ring(streams)
    return sorted(streams.edges_seen)


def test_ring_with_all_edges_gives_equal_results_in_every_mode() -> None:
    expected_seen, expected_blocks = run_ring(SimulatedStreams("early"))
    for streams in (SimulatedStreams("late"), *(SimulatedStreams("random", seed) for seed in range(20))):
        seen, blocks = run_ring(streams)
        assert seen == expected_seen
        assert torch.equal(blocks, expected_blocks)


def test_ring_edges_seen_counts_the_orders_each_wait_made() -> None:
    streams = SimulatedStreams()
    run_ring(streams)
    edges = streams.edges_seen
    assert sorted((edge.waiting, edge.recorded_on) for edge in edges) == [
        ("compute", "d2h"),
        ("compute", "h2d"),
        ("d2h", "compute"),
        ("h2d", "compute"),
        ("h2d", "d2h"),
        ("h2d", "d2h"),
    ]
    assert {edge.site.file for edge in edges} == {"test_simulated_streams.py"}
    assert all(count > 0 for count in edges.values())


@pytest.mark.parametrize("mode", MODES)
def test_ring_without_any_one_edge_races(mode: Mode) -> None:
    for edge in ring_edges():
        with pytest.raises(StreamRaceError, match=r"(blocks|slots)\[\d"):
            run_ring(SimulatedStreams(mode, drop={edge}))


def test_ring_without_an_edge_gives_wrong_values_in_some_mode_when_races_are_not_checked() -> None:
    """The modes bite by themselves, but for work that must come after compute: compute at once is never late."""
    expected_seen, expected_blocks = run_ring(SimulatedStreams())

    def wrong(streams: SimulatedStreams) -> bool:
        seen, blocks = run_ring(streams)
        return seen != expected_seen or not torch.equal(blocks, expected_blocks)

    for edge in ring_edges():
        found_late = wrong(SimulatedStreams("late", drop={edge}, check_races=False))
        found_random = sum(wrong(SimulatedStreams("random", seed, {edge}, check_races=False)) for seed in range(40))
        assert (found_late or found_random > 0) == (edge.recorded_on != "compute"), edge


def test_wait_means_the_record_so_far_when_the_event_is_recorded_again() -> None:
    streams = SimulatedStreams("late")
    event, src, dst = streams.event(), torch.ones(2, 4), torch.zeros(2, 4)
    streams.h2d.copy(dst[0], src[0])
    streams.h2d.record(event)
    streams.d2h.wait(event)  # for the first copy only
    streams.h2d.copy(dst[1], src[1])
    streams.h2d.record(event)
    out = torch.zeros(4)
    streams.d2h.copy(out, dst[0])
    done = streams.event()
    streams.d2h.record(done)
    streams.compute.wait(done)
    assert out.tolist() == [1] * 4
    assert dst[1].tolist() == [0] * 4
    with pytest.raises(StreamRaceError):
        streams.d2h.copy(out, dst[1])


def test_wait_for_the_second_record_waits_for_all_before_it() -> None:
    streams = SimulatedStreams("late")
    event, src, dst = streams.event(), torch.ones(2, 4), torch.zeros(2, 4)
    for row in range(2):
        streams.h2d.copy(dst[row], src[row])
        streams.h2d.record(event)
    streams.compute.wait(event)
    streams.compute.read(dst)
    assert dst.min() == 1


@pytest.mark.parametrize("mode", MODES)
def test_wait_for_an_event_never_recorded_is_nothing(mode: Mode) -> None:
    streams = SimulatedStreams(mode)
    event, src, dst = streams.event(), torch.ones(4), torch.zeros(4)
    streams.h2d.wait(event)
    streams.h2d.copy(dst, src)
    streams.compute.wait(event)
    assert not streams.edges_seen
    with pytest.raises(StreamRaceError):
        streams.compute.read(dst)


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
def test_order_goes_through_a_second_stream(mode: Mode) -> None:
    streams = SimulatedStreams(mode)
    copied_in, copied_out = streams.event(), streams.event()
    src, slot, dst = torch.ones(4), torch.zeros(4), torch.zeros(4)
    streams.h2d.copy(slot, src)
    streams.h2d.record(copied_in)
    streams.d2h.wait(copied_in)
    streams.d2h.copy(dst, slot)
    streams.d2h.record(copied_out)
    streams.compute.wait(copied_out)  # and so for h2d
    streams.compute.read(slot)
    streams.compute.read(dst)
    assert slot.min() == dst.min() == 1


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


def test_synchronize_orders_everything_after_the_copies() -> None:
    streams = SimulatedStreams("late")
    src, dst = torch.ones(4), torch.zeros(4)
    streams.d2h.copy(dst, src)
    streams.synchronize()
    streams.h2d.copy(src, dst)
    with pytest.raises(StreamRaceError):
        streams.compute.read(src)


def test_copy_on_the_compute_stream_runs_at_once_and_is_checked() -> None:
    streams = SimulatedStreams("late")
    slots = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    streams.compute.copy(slots[1], slots[0])
    assert slots[1].tolist() == [1, 2]
    with pytest.raises(StreamRaceError, match=r"h2d writes.*not ordered after compute reads"):
        streams.h2d.copy(slots[0], torch.zeros(2))


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
