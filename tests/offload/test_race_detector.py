"""The race detector against brute force, on random programs of the simulated streams."""

import random
from typing import NamedTuple

import pytest
import torch
from race_detector import StreamRaceError
from simulated_streams import MODES, SimulatedStreams
from tiers import RUNS_ALL


class Copy(NamedTuple):
    stream: int
    dst: int
    src: int
    num_cells: int


class Record(NamedTuple):
    stream: int
    event: int


class Wait(NamedTuple):
    stream: int
    event: int


class Synchronize(NamedTuple):
    pass


Call = Copy | Record | Wait | Synchronize
NUM_CELLS = 12


def random_program(rng: random.Random) -> list[Call]:
    calls: list[Call] = []
    for _ in range(rng.randint(5, 60)):
        stream, event = rng.randrange(3), rng.randrange(4)
        num_cells = rng.randint(1, 3)
        dst, src = rng.randrange(NUM_CELLS - num_cells), rng.randrange(NUM_CELLS - num_cells)
        copy = Copy(stream, dst, src, num_cells) if abs(dst - src) >= num_cells else Synchronize()
        choices: list[Call] = [copy, Record(stream, event), Wait(stream, event)]
        calls += rng.choices(choices, weights=[2, 3, 5])
    return calls


def run_program(calls: list[Call], streams: SimulatedStreams) -> tuple[int, torch.Tensor]:
    """Returns the index of the call that raced (or the number of calls) and the memory after it."""
    memory = torch.arange(NUM_CELLS)
    queues = (streams.compute, streams.h2d, streams.d2h)
    events = [streams.event() for _ in range(4)]
    for i, call in enumerate(calls):
        match call:
            case Copy(stream, dst, src, num_cells):
                try:
                    queues[stream].copy(memory[dst : dst + num_cells], memory[src : src + num_cells])
                except StreamRaceError:
                    return i, memory
            case Record(stream, event):
                queues[stream].record(events[event])
            case Wait(stream, event):
                queues[stream].wait(events[event])
            case Synchronize():
                streams.synchronize()
    streams.synchronize()
    return len(calls), memory


def first_race(calls: list[Call]) -> int:
    """By the definition: the calls each call comes after, in full, and every pair of copies compared."""
    stream_work: list[frozenset[int]] = [frozenset()] * 3  # what the next work of each stream comes after
    event_work: list[frozenset[int]] = [frozenset()] * 4
    for i, call in enumerate(calls):
        match call:
            case Copy(stream, dst, src, num_cells):
                for j, other in enumerate(calls[:i]):
                    if not isinstance(other, Copy) or other.stream == stream or j in stream_work[stream]:
                        continue
                    written, read = set(range(dst, dst + num_cells)), set(range(src, src + num_cells))
                    other_written = set(range(other.dst, other.dst + other.num_cells))
                    other_read = set(range(other.src, other.src + other.num_cells))
                    if written & (other_written | other_read) or read & other_written:
                        return i
                stream_work[stream] |= {i}
            case Record(stream, event):
                event_work[event] = stream_work[stream]
            case Wait(stream, event):
                stream_work[stream] |= event_work[event]
            case Synchronize():
                done = stream_work[1] | stream_work[2]
                stream_work = [work | done for work in stream_work]
    return len(calls)


def test_random_programs_race_exactly_where_brute_force_says() -> None:
    rng = random.Random(0)
    num_clean, num_programs = 0, 1500 if RUNS_ALL else 300
    for _ in range(num_programs):
        calls = random_program(rng)
        expected = first_race(calls)
        race, memory = run_program(calls, SimulatedStreams("early"))
        assert race == expected
        num_clean += race == len(calls)
        clean = calls[:race]
        _, memory = run_program(clean, SimulatedStreams("early"))
        for mode in MODES:
            assert torch.equal(run_program(clean, SimulatedStreams(mode))[1], memory)
    assert 0.2 < num_clean / num_programs < 0.8  # the programs are worth their time


def test_race_message_names_streams_lines_and_the_part_of_the_region() -> None:
    streams = SimulatedStreams()
    k_cache = torch.zeros(2, 3, 4, 1, 8)
    streams.name_region("k_cache_gpu", k_cache)
    streams.compute.read(k_cache[1, 2, :3])
    with pytest.raises(StreamRaceError) as error:
        streams.h2d.copy(k_cache[1, 2, 1:], torch.ones(3, 1, 8))
    site = r"test_race_detector\.py:\d+"
    assert error.match(rf"k_cache_gpu\[1, 2, 1:3\]: h2d writes at {site}, not ordered after compute reads at {site}")
