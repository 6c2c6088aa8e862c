"""The CPU attends to some of the missing keys: the same logits and tokens for every split, and every edge is needed."""

import inspect
import random
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from checked_engine import OFFLOAD, CheckedLLM, Reference
from cpu_splits import ALL, RandomSplit, splitting
from offload_workload import BLOCK, prompts_of, serve_everything
from race_detector import StreamRaceError
from simulated_streams import MODES, Edge, Mode, SimulatedEvent, SimulatedStreams

from nanovllm.capabilities.cpu_attention import queue as cpu_attention
from nanovllm.capabilities.cpu_attention.cpu_split import CpuRate, CpuSplit
from nanovllm.capabilities.cpu_attention.queue import CpuAttention
from nanovllm.engine.setup import Internals
from nanovllm.offload.streams import TIMED_EVERY
from nanovllm.plan.kv_spec import StagingSizes
from nanovllm.plan.step_plan import StepPlan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WITH_CPU = OFFLOAD | {"cpu_attention": "on", "num_gpu_blocks": 2}


def num_cpu_tokens(plan: StepPlan) -> int:
    return sum(span.end - span.start for row in plan.moves.cpu_spans for span in row)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, ALL])
def test_every_split_is_exact(reference: Reference, device: str, num_tokens: int) -> None:
    with CheckedLLM(reference, device=device, internals=splitting(num_tokens), **WITH_CPU) as llm:
        llm.answer_and_check(prompts_of(5 * BLOCK + 7), max_tokens=8)
        decodes = [plan for plan in llm.plans if plan.is_decode]
        num_missing = 4 * BLOCK  # of five full blocks, since the newest block has the other slot
        assert {num_cpu_tokens(plan) for plan in decodes} == {min(num_tokens, num_missing)}
        assert all(bool(plan.moves.streamed) == (num_tokens < num_missing) for plan in decodes)
        llm.assert_nothing_left()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "block_size"), [(100, 2 * BLOCK), (3 * BLOCK, BLOCK), (ALL, 2 * BLOCK)])
def test_several_sequences_with_small_chunks_are_exact(
    reference: Reference, device: str, num_tokens: int, block_size: int
) -> None:
    """Chunks of up to 60 tokens, so that the CPU attends for rows of many queries, and for none in the last layer."""
    options = WITH_CPU | {"kvcache_block_size": block_size, "num_gpu_blocks": 3, "max_num_batched_tokens": 60}
    with CheckedLLM(reference, device=device, internals=splitting(num_tokens), **options) as llm:
        llm.answer_and_check(prompts_of(5 * BLOCK + 7, 3 * BLOCK + 50, 2 * BLOCK), max_tokens=20)
        shares = [plan for plan in llm.plans if plan.moves.cpu_spans]
        assert any(max(step.num_tokens for step in plan.sequences) > 10 for plan in shares)
        assert any(len(plan.sequences) > 2 and plan.is_decode for plan in shares)
        llm.assert_nothing_left()


def test_long_chunk_streams_everything(reference: Reference) -> None:
    options = WITH_CPU | {"max_num_batched_tokens": 600, "num_gpu_blocks": 4}
    with CheckedLLM(reference, internals=splitting(ALL), **options) as llm:
        llm.answer_and_check(prompts_of(6 * BLOCK + 7))
        long = [plan for plan in llm.plans if plan.num_tokens > 512 and plan.moves.brings_in_keys]
        assert long and not any(plan.moves.cpu_spans for plan in long)


@pytest.mark.parametrize("cpu_attention", ["auto", "on"])
def test_engine_on_a_cpu_leaves_every_missing_block_where_it_is(reference: Reference, cpu_attention: str) -> None:
    options = WITH_CPU | {"cpu_attention": cpu_attention}
    with CheckedLLM(reference, **options) as llm:
        llm.answer_and_check(prompts_of(6 * BLOCK + 9, 40))
        assert sum(map(num_cpu_tokens, llm.plans)) == llm.stats()["num_cpu_tokens"] > 0
        assert not any(plan.moves.streamed for plan in llm.plans)
    with CheckedLLM(reference, **WITH_CPU | {"cpu_attention": "off"}) as llm:
        llm.answer_and_check(prompts_of(6 * BLOCK + 9))
        assert llm.stats()["num_cpu_tokens"] == 0 and any(plan.moves.streamed for plan in llm.plans)


# -- streams ---------------------------------------------------------------------------------------------------------


def serve_with(reference: Reference, streams: SimulatedStreams, seed: int, block_size: int = BLOCK) -> None:
    split = RandomSplit(generator=random.Random(seed))
    internals = Internals(cpu_split=split, staging=StagingSizes(2 * block_size, 2), works_ahead=seed % 2 == 1)
    options = WITH_CPU | {"kvcache_block_size": block_size, "num_gpu_blocks": 2 + seed % 3}
    with CheckedLLM(reference, streams=streams, internals=internals, **options) as llm:
        serve_everything(llm)
        assert any(plan.moves.cpu_spans and plan.moves.streamed for plan in llm.plans)


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        ("late", 0),
        ("early", 1),
        ("random", 2),
        *(pytest.param("random", seed, marks=pytest.mark.slow) for seed in (3, 4)),
    ],
)
def test_simulated_streams_are_exact_and_without_a_race(reference: Reference, mode: Mode, seed: int) -> None:
    serve_with(reference, SimulatedStreams(mode, seed), seed, block_size=BLOCK * (1 + seed // 3 % 2))


SEEDS = range(3)


@pytest.fixture(scope="module")
def edges(reference: Reference) -> dict[Edge, int]:
    """Each edge of the CPU's part that orders something, and a seed whose workload has it."""
    seen: dict[Edge, int] = {}
    for seed in SEEDS:
        streams = SimulatedStreams("early", seed)
        serve_with(reference, streams, seed)
        for edge, count in streams.edges_seen.items():
            if count and edge.site.file == "queue.py":
                seen.setdefault(edge, seed)
    return seen


def test_workloads_use_every_wait_in_the_source(edges: dict[Edge, int]) -> None:
    lines = inspect.getsource(cpu_attention).splitlines()
    used = {re.search(r"# (E\d+)", lines[edge.site.line - 1])[1] for edge in edges}  # type: ignore[index]
    documented = set(re.findall(r"^  (E\d+) ", inspect.getdoc(cpu_attention) or "", flags=re.MULTILINE))
    assert used == documented == {"E11", "E12"}


def test_every_edge_is_needed(reference: Reference, edges: dict[Edge, int]) -> None:
    for edge, seed in edges.items():
        with pytest.raises(StreamRaceError):
            serve_with(reference, SimulatedStreams("early", seed, drop={edge}), seed)


def test_results_merged_too_early_show_in_the_logits(reference: Reference, edges: dict[Edge, int]) -> None:
    """E12, without the race detector. E11 cannot show here, because compute runs at once; it does on a GPU."""
    lines = inspect.getsource(cpu_attention).splitlines()
    dropped = {edge: seed for edge, seed in edges.items() if "# E12" in lines[edge.site.line - 1]}
    assert any(
        fails(partial(serve_with, reference, SimulatedStreams(mode, seed, drop={edge}, check_races=False), seed))
        for edge, seed in dropped.items()
        for mode in MODES
    )


def fails(serve: Callable[[], None]) -> bool:
    try:
        serve()
    except AssertionError:
        return True
    return False


class SlowCpuStreams(SimulatedStreams):
    """The CPU takes far longer for a layer than the start has measured."""

    def timing_event(self) -> SimulatedEvent:
        return self.event()

    def seconds(self, start: SimulatedEvent, end: SimulatedEvent) -> float | None:
        assert start.point is not None and end.point is not None and start.point.stream is end.point.stream
        return 1.0 if end.point.stream is self._cpu else None


def test_split_follows_the_times_of_the_streams(reference: Reference) -> None:
    """Through the engine: events on the streams, then the times of a step, the split, and the next plans."""
    split = CpuSplit(
        token_bytes=1,
        max_queries=512,
        max_sequence_queries=512,
        is_forced=True,
        link_byte_per_s=1e5,
        cpu_rates=(CpuRate(512, 1e5),),
        unit_tokens=1,
    )
    internals = Internals(cpu_split=split, works_ahead=True)
    with CheckedLLM(reference, streams=SlowCpuStreams("late"), internals=internals, **WITH_CPU) as llm:
        llm.answer_and_check(prompts_of(5 * BLOCK + 7), max_tokens=100)
        shares = [num_cpu_tokens(plan) for plan in llm.plans if plan.is_decode]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == 2 * BLOCK and shares[-1] < BLOCK
        assert llm.stats()["cpu_attention_byte_per_s"] < 5e4


def test_timed_copies_are_released_without_cpu_attention(reference: Reference) -> None:
    """Their events were kept for as long as the engine existed."""
    options = WITH_CPU | {"cpu_attention": "off"}
    with CheckedLLM(reference, streams=SlowCpuStreams("late"), **options) as llm:
        llm.answer_and_check(prompts_of(5 * BLOCK + 7), max_tokens=20)
        assert llm.runner.offload.timer._num_pieces > TIMED_EVERY
        assert not llm.runner.offload.timer.take()


def test_memory_of_jobs_that_are_done_is_released(reference: Reference) -> None:
    with CheckedLLM(reference, internals=splitting(ALL), **WITH_CPU) as llm:
        llm.answer_and_check(prompts_of(5 * BLOCK + 7), max_tokens=40)
        cpu = llm.runner.memory.cpu
        assert isinstance(cpu, CpuAttention) and len(cpu._jobs) <= 2
        assert torch.isfinite(cpu.result_rows(1).out_THD).all()
