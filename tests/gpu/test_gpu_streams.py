"""Stream edges and blocks on a real GPU: what the simulated streams cannot show.

Each edge: the stream that is waited for is slowed by `torch.cuda._sleep`. With every wait in place the answers stay
right; with one wait dropped they are wrong. (test_stream_edges does the same with a race detector, on the CPU.)

Soak: random requests, and of every block that is loaded or streamed, token by token, the checksum it had when it was
copied out.
"""

import ast
import inspect
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from checked_engine import OFFLOAD, Reference, greedy
from cpu_splits import RandomSplit
from dense_model import random_prompt
from gpu_llm import GpuLLM
from integrity import check_scheduler
from offload_workload import BLOCK, RESUMED, prompts_of, serve_resumed

from nanovllm import LLM
from nanovllm.engine.setup import Internals
from nanovllm.offload import offload_engine
from nanovllm.offload.offload_engine import OffloadEngine, offload_runs
from nanovllm.offload.streams import CudaStreams, Event, Stream, make_streams
from nanovllm.plan.kv_spec import StagingSizes
from nanovllm.plan.step_plan import KVMoves, SlotOffload
from nanovllm.runner.cuda_graphs import capture_stream
from nanovllm.runner.kv_memory import OffloadEngineFactory

pytestmark = pytest.mark.gpu

SOAK_SECONDS = float(os.environ.get("NANOVLLM_SOAK_SECONDS", "20"))


# -- every edge ------------------------------------------------------------------------------------------------------

AWAITED = {"E1": "h2d", "E2": "compute", "E3": "compute", "E4": "d2h"}
AWAITED |= {"E5": "d2h", "E6": "d2h", "E7": "h2d", "E8": "compute"}
SLEEP_MS = {"h2d": 10.0, "d2h": 20.0, "compute": 6.0}  # each several times what the host needs for a step


class WaitSite(NamedTuple):
    """A wait in the source of the offload engine."""

    label: str
    function: str
    line: int


def wait_sites() -> list[WaitSite]:
    source = inspect.getsource(offload_engine)
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    sites = []
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_wait":
                label = re.search(r"# (E\d): ", lines[node.lineno - 1])
                assert label, f"the wait in line {node.lineno} names no edge"
                sites.append(WaitSite(label[1], function.name, node.lineno))
    return sorted(sites)


@pytest.fixture(scope="module")
def cycles_per_ms() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / float(start.elapsed_time(end))


def slow_down(engine: OffloadEngine, side: str, cycles: int) -> None:
    """Copies of h2d or d2h start late; or compute does: its stores, its paged reads, its reads of staging."""
    if side != "compute":
        stream: Any = getattr(engine.streams, side)

        def late(copy: Callable[..., None]) -> Callable[..., None]:
            def late_copy(*tensors: Any) -> None:
                with torch.cuda.stream(stream.stream):
                    torch.cuda._sleep(cycles)
                copy(*tensors)

            return late_copy

        stream.copy_all, stream.copy_rows = late(stream.copy_all), late(stream.copy_rows)
        return
    begin_layer, stored, staged_buffers = engine.begin_layer, engine.stored, engine.staged_buffers

    def late_begin_layer(layer: int) -> None:
        begin_layer(layer)
        torch.cuda._sleep(cycles)

    def late_stored(layer: int) -> None:
        stored(layer)
        torch.cuda._sleep(cycles)

    def late_staged_buffers() -> Iterator[int]:
        for buffer in staged_buffers():
            torch.cuda._sleep(cycles)
            yield buffer

    engine.begin_layer, engine.stored = late_begin_layer, late_stored  # type: ignore[method-assign]
    engine.staged_buffers = late_staged_buffers  # type: ignore[method-assign]


def engine_without_wait(line: int) -> OffloadEngineFactory:
    """Makes offload engines in which the wait in this line of their source is not made."""

    class WithoutWait(OffloadEngine):
        @staticmethod
        def _wait(stream: Stream, event: Event | None) -> None:
            if event is not None and sys._getframe(1).f_lineno != line:
                stream.wait(event)

    return lambda spec, num_cpu_blocks, dtype, device: WithoutWait(
        spec, num_cpu_blocks, dtype, device, make_streams(device)
    )


Slow: TypeAlias = Callable[[OffloadEngine], None]


class SlowLLM(GpuLLM):
    """Eager, so that every step goes layer by layer; `slow` is applied to its offload engine."""

    def __init__(self, reference: Reference, slow: Slow, internals: Internals, **options: Any) -> None:
        super().__init__(reference, enforce_eager=True, internals=internals, **(OFFLOAD | options))
        assert self.runner.offload is not None
        slow(self.runner.offload)


def serve_long(reference: Reference, slow: Slow, internals: Internals) -> None:
    """One prompt through two slots, a block a step: slots are written again while their copies are on the way out
    (E3, E4), blocks streamed that have just been copied out (E6), staging wraps (E7, E8).
    """
    (prompt,) = prompts_of(6 * BLOCK + 9)
    internals = replace(internals, staging=StagingSizes(BLOCK, 2))
    with SlowLLM(reference, slow, internals, num_gpu_blocks=2, max_num_batched_tokens=BLOCK) as llm:
        llm.answer_and_check([prompt], max_tokens=4)


def serve_preempted(reference: Reference, slow: Slow, internals: Internals) -> None:
    """The second request is preempted while its last step may still run. Blocks of the first one are loaded to stay
    (E1) over the slots that step reads (E2).
    """
    preempt_and_check(reference, slow, internals, num_gpu_blocks=6)


def serve_preempted_in_a_grain(reference: Reference, slow: Slow, internals: Internals) -> None:
    """The same, and the partial block of the second request holds a grain, so it is copied out before a block of the
    first one is loaded over it (E5).
    """
    preempt_and_check(reference, slow, internals, num_gpu_blocks=4, kvcache_block_size=2 * BLOCK)


def preempt_and_check(reference: Reference, slow: Slow, internals: Internals, **options: Any) -> None:
    prompts = prompts_of(7 * BLOCK + 30, 3 * BLOCK + 40)
    with SlowLLM(reference, slow, internals, max_num_batched_tokens=1000, **options) as llm:

        def preempt_sometimes(num_step: int) -> None:
            if len(llm.plans) % 5 == 0 and llm.plans and llm.plans[-1].is_decode:
                llm.preempt_next()

        llm.answer_and_check(prompts, max_tokens=16, before_step=preempt_sometimes)
        assert llm.stats()["num_preemptions"] >= 2


def serve_one_ahead(reference: Reference, slow: Slow, internals: Internals) -> None:
    """A block is loaded one step after it was copied out (E6)."""
    with SlowLLM(reference, slow, internals, **RESUMED) as llm:
        serve_resumed(llm)


WORKLOADS = (serve_long, serve_preempted, serve_preempted_in_a_grain, serve_one_ahead)
WRONG = re.compile("answered wrongly|logits are")


def test_wait_sites_are_all_edges() -> None:
    assert {site.label for site in wait_sites()} == set(AWAITED)


@pytest.mark.parametrize("site", wait_sites(), ids=lambda site: f"{site.label}-{site.function}")
def test_without_an_edge_and_its_awaited_side_slow_answers_are_wrong(
    reference: Reference, cycles_per_ms: float, site: WaitSite
) -> None:
    """With the wait in place the same sleep changes nothing, and warms up what the second run must find compiled.

    The host runs at most one step ahead of the GPU, and other edges order much of what this one orders. So not every
    workload shows every edge; each edge has one that is made for it.
    """
    side = AWAITED[site.label]
    cycles = int(SLEEP_MS[side] * cycles_per_ms)

    def slow(engine: OffloadEngine) -> None:
        slow_down(engine, side, cycles)

    without_wait = Internals(make_offload_engine=engine_without_wait(site.line))
    for workload in WORKLOADS:
        workload(reference, slow, Internals())
        try:
            workload(reference, slow, without_wait)
        except AssertionError as error:
            if not WRONG.search(str(error)):
                raise
            return
    pytest.fail(f"nothing happens without {site}")


def test_new_streams_of_living_owners_differ() -> None:
    """Regression: torch hands out 32 streams in turns, and a stream of an engine was the one that captured a graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    living: list[CudaStreams] = []
    for _ in range(100):
        torch.cuda.Stream(device)
        living = [*living[-4:], CudaStreams(device)]
        streams = [stream.stream for streams in living for stream in (streams.h2d, streams.d2h)]
        assert len({stream.cuda_stream for stream in [*streams, capture_stream(device)]}) == len(streams) + 1


def test_events_of_copies_out_are_let_go_when_the_gpu_is_done_with_them(
    reference: Reference, cycles_per_ms: float
) -> None:
    """While the copies are slow their events are kept."""
    (prompt,) = prompts_of(6 * BLOCK + 9)
    options: dict[str, Any] = {"num_gpu_blocks": 4, "max_num_batched_tokens": BLOCK}
    with SlowLLM(reference, lambda engine: None, Internals(), **options) as llm:
        engine: Any = llm.runner.offload
        llm.answer_and_check([prompt], max_tokens=4)
        torch.cuda.synchronize()
        engine.begin_step(KVMoves(), ())
        assert (engine.cpu_block_offload_done > 0).any() and len(engine._d2h_log) == 0
        with torch.cuda.stream(engine.streams.d2h.stream):
            torch.cuda._sleep(int(200 * cycles_per_ms))
        num_layers = engine.spec.num_layers
        engine.offload_slots(offload_runs((SlotOffload(0, 0, 0, 1),), BLOCK), None)
        engine.begin_step(KVMoves(), ())
        assert len(engine._d2h_log) == num_layers
        torch.cuda.synchronize()
        engine.begin_step(KVMoves(), ())
        assert len(engine._d2h_log) == 0


# -- soak --------------------------------------------------------------------------------------------------------------


class ChecksummedOffloadEngine(OffloadEngine):
    """Knows, of every token copied out, the sum of its K and of its V; checks them of every token that comes back.

    All of it is enqueued on the compute stream, in the order of the model's own work: the host waits for nothing, so
    the copies run as they always do. A token that was never copied out matches nothing.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        layers, num_cpu_blocks, block_size = self.k_cache_cpu.shape[:3]
        self.sums = self.k_staging.new_zeros(2, layers, num_cpu_blocks, block_size, dtype=torch.int64) - 1
        self.num_wrong_tokens = self.k_staging.new_zeros(3, dtype=torch.int64)  # in slots, in staging, in CPU memory
        self.pool = [self.streams.on_device(cache) for cache in (self.k_cache_cpu, self.v_cache_cpu)]

    def allocate_slots(self, num_ring_slots: int) -> None:
        """Counting starts here: start-up streams a block that was never written, to measure its memory."""
        super().allocate_slots(num_ring_slots)
        self.num_wrong_tokens.zero_()
        self.num_checked_tokens: Counter[int] = Counter()

    def _slot_sums(self, layer: int, ring_slot: int, start: int, end: int) -> torch.Tensor:
        caches = (self.k_cache_gpu, self.v_cache_gpu)
        return torch.stack([token_sums(cache[layer, ring_slot, start:end]) for cache in caches])

    def _note(self, layer: int, ring_slot: int, cpu_block_id: int, start: int, end: int) -> None:
        self.sums[:, layer, cpu_block_id, start:end] = self._slot_sums(layer, ring_slot, start, end)

    def _compare(self, kind: int, layer: int, cpu_block_id: int, sums: torch.Tensor, start: int = 0) -> None:
        num_tokens = sums.shape[1]
        expected = self.sums[:, layer, cpu_block_id, start : start + num_tokens]
        self.num_wrong_tokens[kind] += (expected != sums).sum()
        self.num_checked_tokens[kind] += num_tokens

    def begin_step(self, moves: KVMoves, slots_in_use: Iterable[int]) -> None:
        for ring_slot, cpu_block_id, start, end in moves.flushes:
            for layer in range(self.spec.num_layers):
                self._note(layer, ring_slot, cpu_block_id, start, end)
            self.ring_slot_compute_done[ring_slot] = self._compute_log.next_batch  # the reads above are uses, too
        if moves.flushes:
            self._compute_log.add(self._record(self.streams.compute), self.spec.num_layers)
        super().begin_step(moves, slots_in_use)

    def begin_layer(self, layer: int) -> None:
        super().begin_layer(layer)
        self._layer = layer  # whose groups come next
        for cpu_block_id, ring_slot, num_tokens in self._moves.loads:
            self._compare(0, layer, cpu_block_id, self._slot_sums(layer, ring_slot, 0, num_tokens))
        for cpu_block_id, start, end in chain.from_iterable(self._moves.cpu_spans):
            sums = torch.stack([token_sums(cache[layer, cpu_block_id, start:end]) for cache in self.pool])
            self._compare(2, layer, cpu_block_id, sums, start)

    def stored(self, layer: int) -> None:
        super().stored(layer)  # copies from slot to slot are part of what is copied out
        for ring_slot, cpu_block_id, start, end in self._moves.offloads:
            self._note(layer, ring_slot, cpu_block_id, start, end)

    def ran_all_layers(self) -> None:
        for ring_slot, cpu_block_id, start, end in self._moves.offloads:
            for layer in range(self.spec.num_layers):
                self._note(layer, ring_slot, cpu_block_id, start, end)
        super().ran_all_layers()

    def staged_buffers(self) -> Iterator[int]:
        for buffer, group in zip(super().staged_buffers(), self._moves.streamed, strict=True):
            for i, cpu_block_id in enumerate(group.cpu_block_ids):
                is_last = i == len(group.cpu_block_ids) - 1
                num_tokens = self.spec.block_size - (group.num_cut_tokens if is_last else 0)
                caches = (self.k_staging, self.v_staging)
                sums = torch.stack([token_sums(cache[buffer, i, :num_tokens]) for cache in caches])
                self._compare(1, self._layer, cpu_block_id, sums)
            yield buffer


def token_sums(cache: torch.Tensor) -> torch.Tensor:
    """int64 [tokens] of a cache [tokens, kv heads, head dim]: the sum of the bit patterns."""
    return cache.flatten(1).view(torch.int32).sum(dim=1, dtype=torch.int64)


DOCUMENTS = [random_prompt(length, seed=length) for length in (7 * BLOCK + 100, 5 * BLOCK, 2 * BLOCK + 3)]


def random_request(rng: random.Random) -> list[int]:
    """New, or beginning like one of the documents."""
    document = rng.choice(DOCUMENTS)
    num_shared = rng.choice([0, 0, BLOCK, rng.randint(1, len(document)), len(document)])
    own = [rng.randrange(320) for _ in range(rng.choice([1, 5, 60, BLOCK, 3 * BLOCK - 1]))]
    return document[:num_shared] + own


def soak(llm: GpuLLM, seconds: float, seed: int) -> list[tuple[list[int], list[int]]]:
    """Random arrivals, aborts and preemptions for so long; returns the prompts and answers of a few hundred."""
    rng = random.Random(seed)
    prompts: dict[int, list[int]] = {}
    answers: list[tuple[list[int], list[int]]] = []
    engine: Any = llm.runner.offload
    end_s, num_steps = time.monotonic() + seconds, 0
    while prompts or time.monotonic() < end_s:
        if time.monotonic() < end_s and len(prompts) < 10 and rng.random() < 0.3:
            prompt = random_request(rng)
            prompts[llm.add_request(prompt, greedy(rng.choice([1, 3, 10, 40])))] = prompt
        if prompts and rng.random() < 0.01:
            request_id = rng.choice(list(prompts))
            llm.abort(request_id)
        if rng.random() < 0.02:
            llm.preempt_next()
        for request_id, output in llm.step().finished.items():
            prompt = prompts.pop(request_id)
            if output["finish_reason"] == "length":
                answers.append((prompt, output["token_ids"]))
        num_steps += 1
        if num_steps % 200 == 0:
            check_scheduler(llm.scheduler)
            assert engine.num_wrong_tokens.tolist() == [0, 0, 0], f"seed {seed}, after {num_steps} steps"
            llm.plans.clear()
            llm.logits.clear()
    llm.assert_nothing_left()
    return rng.sample(answers, min(len(answers), 300))


@pytest.mark.slow
@pytest.mark.timeout(SOAK_SECONDS * 2 + 300)
@pytest.mark.parametrize("cpu_attention", ["off", "on"])
@pytest.mark.parametrize(("num_gpu_blocks", "block_size"), [(2, BLOCK), (5, BLOCK), (3, 2 * BLOCK), (12, BLOCK)])
def test_soak_every_block_that_comes_back_is_the_one_that_was_written(
    reference: Reference, tmp_path: Path, num_gpu_blocks: int, block_size: int, cpu_attention: str
) -> None:
    """An eighth of NANOVLLM_SOAK_SECONDS each; NANOVLLM_SOAK_SEED varies it. Answers are compared with all-GPU ones.

    With the CPU part every step divides the missing tokens at random between the link and the CPU.
    """
    seed = int(os.environ.get("NANOVLLM_SOAK_SEED", "0")) + num_gpu_blocks
    options = OFFLOAD | {"num_gpu_blocks": num_gpu_blocks, "kvcache_block_size": block_size, "num_cpu_blocks": 60}
    options["cpu_attention"] = cpu_attention
    internals = Internals(
        staging=StagingSizes(2 * block_size, 2),
        make_offload_engine=lambda spec, num_cpu_blocks, dtype, device: ChecksummedOffloadEngine(
            spec, num_cpu_blocks, dtype, device, make_streams(device)
        ),
        cpu_split=RandomSplit(generator=random.Random(seed)) if cpu_attention == "on" else None,
    )
    with GpuLLM(reference, internals=internals, max_num_batched_tokens=1500, **options) as llm:
        answers = soak(llm, SOAK_SECONDS / 8, seed)
        engine: Any = llm.runner.offload
        checked = engine.num_checked_tokens
        kinds = dict(zip(("in slots", "in staging", "in CPU memory"), (checked[i] for i in range(3)), strict=True))
        print(f"{llm.stats()['num_steps']} steps, tokens of a layer checked: {kinds}")
        assert engine.num_wrong_tokens.tolist() == [0, 0, 0], f"seed {seed}"
        assert checked[0] + checked[1] > 0 and (checked[2] > 0) == (cpu_attention == "on")
    all_gpu: dict[str, Any] = {"num_kvcache_blocks": 200, "max_num_seqs": 16, "dtype": "float32", "device": "cuda"}
    with LLM(str(reference.directory), **all_gpu) as llm_all_gpu:
        params = [greedy(len(answer)) for _, answer in answers]
        outputs = llm_all_gpu.generate([prompt for prompt, _ in answers], params, use_tqdm=False)
    wrong = [i for i, (output, (_, answer)) in enumerate(zip(outputs, answers, strict=True))
             if output["token_ids"] != answer]  # fmt: skip
    assert not wrong, f"seed {seed}: {len(wrong)} of {len(answers)} answers differ"
