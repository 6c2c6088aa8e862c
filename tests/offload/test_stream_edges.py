"""Every stream edge of the offload engine: no race whatever the copies' timing, and each edge is needed.

The engine runs with tags for K/V (content_model.py) on random workloads, so that hundreds of them take seconds; and
with a real model under each dropped edge, so that the order of calls in MergedAttention is part of it.
"""

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import groupby

import pytest
import torch
from checked_engine import OFFLOAD, WORKS_AHEAD, CheckedLLM, Reference, small_staging
from content_model import ContentError, ContentRunner, Simulation
from dense_model import random_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_workload import BLOCK, RESUMED, serve_resumed
from race_detector import Site, StreamRaceError
from random_workloads import play_dense
from simulated_streams import MODES, Edge, Mode, SimulatedStreams
from tiers import RUNS_ALL, examples

from nanovllm.capabilities.cpu_attention.job import RowSpans, TokenSpan
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.offload import offload_engine
from nanovllm.offload.offload_engine import OffloadEngine, load_runs, offload_runs, staging_runs
from nanovllm.offload.streams import Event
from nanovllm.plan.kv_spec import KVCacheSpec, StagingSizes
from nanovllm.plan.step_plan import KVMoves, StepPlan

NUM_LAYERS = 2


class TagJob:
    """An AttentionJob for tags: which spans of each row a layer reads, and the tags that were there when it ran."""

    def __init__(self, plan: StepPlan, engine: OffloadEngine) -> None:
        self.k_cache, self.v_cache = engine.k_cache_cpu, engine.v_cache_cpu
        self.q_THD, self.out_THD, self.lse_HT = (torch.zeros(1) for _ in range(3))
        block_size = engine.spec.block_size
        self.rows = [
            RowSpans(1, tuple(TokenSpan(block_id * block_size + start, end - start) for block_id, start, end in spans))
            for spans in plan.moves.cpu_spans
        ]
        self.tags: list[list[int]] = []  # of each row, in the layer that ran last


class TagKernel:
    def attend(self, job: TagJob, layer: int) -> None:
        caches = [cache[layer].flatten() for cache in (job.k_cache, job.v_cache)]
        job.tags = []
        for row in job.rows:
            places = [first + i for first, num_tokens in row.spans for i in range(num_tokens)]
            k, v = (cache[places] for cache in caches)
            job.tags.append(tags_of(k, v, layer))


def tags_of(k: torch.Tensor, v: torch.Tensor, layer: int) -> list[int]:
    """K of a layer is the tag XOR layer, V its complement; -2 where the two do not fit."""
    tags: list[int] = (k ^ layer).flatten().tolist()
    return [tag if value == ~tag else -2 for tag, value in zip(tags, (v ^ layer).flatten().tolist(), strict=True)]


class OffloadRunner(ContentRunner):
    """A ContentRunner whose memory is an OffloadEngine's: K of a layer is the tag XOR layer, V its complement."""

    def __init__(self, kv: HybridKVCacheManager, streams: SimulatedStreams, staging: StagingSizes) -> None:
        super().__init__(0, 0, kv.block_size)
        shape = {"block_size": kv.block_size, "num_kv_heads": 1, "head_dim": 1, "itemsize": 8}
        spec = KVCacheSpec(num_layers=NUM_LAYERS, **shape, staging=staging)
        assert spec.staging_group_blocks >= kv.group_blocks
        self.engine = OffloadEngine(spec, len(kv.blocks), torch.int64, torch.device("cpu"), streams)
        self.engine.allocate_slots(len(kv.ring))
        for name in ("k_cache_cpu", "v_cache_cpu", "k_cache_gpu", "v_cache_gpu", "k_staging", "v_staging"):
            streams.name_region(name, getattr(self.engine, name))
        self.streams, self.compute = streams, streams.compute
        self.cpu = streams.cpu(TagKernel())  # type: ignore[arg-type]
        self.num_steps = 0

    def launch(self, plan: StepPlan) -> list[int]:
        self.num_steps += 1
        engine = self.engine
        drafted = self._draft(plan)
        runs = [self._tokens(row, step, drafted) for row, step in enumerate(plan.sequences)]
        new_cells = [self._new_cells(step, run) for step, run in zip(plan.sequences, runs, strict=True)]
        cells = {cell: tag for some in new_cells for cell, tag in some.items()}
        engine.begin_step(plan.moves, sorted({slot for step in plan.sequences for slot in step.block_table}))
        moves = plan.moves
        if drafted:  # they write to the cells of the guesses, which the step writes again
            engine.begin_all_layers()
            for layer in range(NUM_LAYERS):
                self._write(layer, cells)
        resident = plan.is_decode and not (moves.loads or moves.copies or moves.brings_in_keys)
        job = TagJob(plan, engine)
        at_once = resident and self.num_steps % 2 == 0  # as a CUDA graph does; else layer by layer
        if at_once:
            engine.begin_all_layers()
        for layer in range(NUM_LAYERS):
            if not at_once:
                engine.begin_layer(layer)
            self._write(layer, cells)
            if not at_once:
                engine.stored(layer)
            attended = self._attend_on_cpu(job, layer) if moves.cpu_spans else None
            paged = [self._read_paged(layer, step.block_table, step.num_paged_keys) for step in plan.sequences]
            if not at_once:
                engine.attended()
            brought_in: list[list[int]] = [[] for _ in plan.sequences]
            for (k, v), group in zip(engine.groups(), plan.moves.streamed, strict=True):
                for row, num_tokens in enumerate(group.context_lens(self.block_size)):
                    brought_in[row] += self._read_table(layer, k, v, group.tables[row], num_tokens)
            if attended is not None:
                self.compute.wait(attended)
                self.compute.read(job.out_THD)
                brought_in = [tags + others for tags, others in zip(brought_in, job.tags, strict=True)]
            for step, run, paged_tags, other_tags in zip(plan.sequences, runs, paged, brought_in, strict=True):
                self._compare(step, run, paged_tags, other_tags)
        if at_once:
            engine.ran_all_layers()
        engine.end_step()
        return self._sample_all(plan, runs, drafted)

    def _write(self, layer: int, cells: dict[tuple[int, int], int]) -> None:
        """Each slot's new cells are neighbours."""
        for slot, group in groupby(sorted(cells), key=lambda cell: cell[0]):
            offsets = [offset for _, offset in group]
            span = slice(offsets[0], offsets[-1] + 1)
            assert len(offsets) == span.stop - span.start
            tags = torch.tensor([cells[slot, offset] for offset in offsets]).view(-1, 1, 1)
            for cache, values in ((self.engine.k_cache_gpu, tags), (self.engine.v_cache_gpu, ~tags)):
                self.compute.write(cache[layer, slot, span])
                cache[layer, slot, span] = values ^ layer

    def _attend_on_cpu(self, job: TagJob, layer: int) -> Event:
        """As CpuAttention does it."""
        self.compute.write(job.q_THD)
        query_ready = self.streams.event()
        self.compute.record(query_ready)
        self.cpu.wait(query_ready)
        return self.cpu.attend(job, layer)  # type: ignore[arg-type]

    def _read_paged(self, layer: int, table: tuple[int, ...], context_len: int) -> list[int]:
        caches = self.engine.k_cache_gpu[layer], self.engine.v_cache_gpu[layer]
        return self._read_table(layer, *caches, table, context_len)

    def _read_table(
        self, layer: int, k_NPKD: torch.Tensor, v_NPKD: torch.Tensor, table: tuple[int, ...], num_tokens: int
    ) -> list[int]:
        tags: list[int] = []
        for block in table:
            valid = slice(min(self.block_size, num_tokens - len(tags)))
            tags += self._read(layer, k_NPKD[block, valid], v_NPKD[block, valid])
        return tags

    def _read(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> list[int]:
        self.compute.read(k)
        self.compute.read(v)
        return tags_of(k, v, layer)


# -- random workloads with tags --------------------------------------------------------------------------------------


def play_with_streams(seed: int, streams: SimulatedStreams, with_cpu: bool = False, drafter: str = "") -> Simulation:
    """A dense workload whose copies run when `streams` says. Staging is 1 to 3 groups of 3 blocks of up to 6 tokens."""
    staging = StagingSizes(group_tokens=18, num_groups=1 + seed % 3)
    return play_dense(
        seed,
        hybrid=True,
        with_cpu=with_cpu,
        drafter=drafter,
        make_runner=lambda kv: OffloadRunner(kv, streams, staging),
    )


SEEDS = (
    75,
    81,
    92,
    107,
    131,
    132,
    141,
    187,
    *range(8 if RUNS_ALL else 3),
)  # the first ones load what was just copied out (E6)
Workloads = dict[int, tuple[Simulation, SimulatedStreams]]


@pytest.fixture(scope="module")
def workloads() -> Workloads:
    """The workload of each of SEEDS, played with copies that run as early as they may."""
    played = {}
    for seed in SEEDS:
        streams = SimulatedStreams("early", seed)
        played[seed] = play_with_streams(seed, streams), streams
    return played


@settings(max_examples=examples(120))
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(MODES),
    with_cpu=st.booleans(),
    drafter=st.sampled_from(["", "random", "mixed"]),
)
def test_random_workload_no_race_and_every_sequence_sees_its_tokens(
    seed: int, mode: Mode, with_cpu: bool, drafter: str
) -> None:
    play_with_streams(seed, SimulatedStreams(mode, seed), with_cpu, drafter)


def test_events_of_copies_that_are_done_are_let_go() -> None:
    """Regression: one event stayed alive for each CPU block and layer, 614,000 for a pool of 600 GiB, and each was
    waited for long after it was done.
    """
    streams = SimulatedStreams("early")
    simulation = play_with_streams(11, streams)
    engine = simulation.runner.engine  # type: ignore[attr-defined]
    moves = [plan.moves for plan in simulation.plans]
    num_batches = sum(bool(m.offloads) + bool(m.flushes) for m in moves)
    assert (engine.cpu_block_offload_done > 0).sum() > 10 and num_batches > 20
    for _ in range(40):  # the simulated host learns of it sooner or later
        engine.begin_step(KVMoves(), ())
        engine.end_step()
    assert len(engine._d2h_log) == len(engine._compute_log) == 0
    assert engine._d2h_log.find(int(engine.cpu_block_offload_done.max()), NUM_LAYERS - 1) is None
    assert engine.cpu_block_offload_done.max() == num_batches
    assert engine.ring_slot_compute_done.max() == len(moves)


def test_event_taken_for_done_too_early_is_noticed() -> None:
    class CredulousStreams(SimulatedStreams):
        def is_done(self, event: Event) -> bool:
            return True

    num_noticed = 0
    for seed in SEEDS:
        try:
            play_with_streams(seed, CredulousStreams("late", seed))
        except AssertionError:
            num_noticed += 1
    assert num_noticed > 3


def runs_by_kind(simulation: Simulation) -> dict[str, list[int]]:
    """Blocks of each copy that the workload made in a layer, in whole blocks."""
    block_size = simulation.kv.block_size  # type: ignore[attr-defined]
    lengths: dict[str, list[int]] = {"load": [], "offload": [], "flush": [], "staging": []}
    for plan in simulation.plans:
        moves = plan.moves
        runs = {"load": load_runs(moves.loads, block_size), "offload": offload_runs(moves.offloads, block_size)}
        runs |= {"flush": offload_runs(moves.flushes, block_size)}
        runs |= {"staging": tuple(r for g in moves.streamed for r in staging_runs(g, block_size))}
        for kind, some in runs.items():
            lengths[kind] += [run.num_tokens // block_size for run in some]
    return lengths


def test_workloads_hold_runs_of_several_blocks_and_of_one(workloads: Workloads) -> None:
    """So what the other tests here prove holds for both."""
    lengths: dict[str, list[int]] = {}
    for simulation, _ in workloads.values():
        for kind, some in runs_by_kind(simulation).items():
            lengths.setdefault(kind, []).extend(some)
    for kind in ("load", "offload", "staging"):
        num_long = sum(length > 1 for length in lengths[kind])
        assert num_long > 10 and 1 in lengths[kind], f"{kind}: {num_long} of {len(lengths[kind])} runs are long"
    assert lengths["flush"]  # of partial blocks, which have nothing to join


# -- every edge, and what happens without it --------------------------------------------------------------------------


def wait_lines() -> dict[int, str]:
    """Line number -> text of every wait in the source of the offload engine."""
    source = inspect.getsource(offload_engine)
    lines = source.splitlines()
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = ("_wait", "wait")  # the second one in the first one only, which passes it on
    waits = [call for call in calls if isinstance(call, ast.Attribute) and call.attr in names]
    assert [call.attr for call in waits].count("wait") == 1
    return {call.lineno: lines[call.lineno - 1] for call in waits if call.attr == "_wait"}


@pytest.fixture(scope="module")
def edges(workloads: Workloads) -> dict[Edge, list[int]]:
    """Each edge and the seeds of the workloads in which it orders something."""
    seen: dict[Edge, list[int]] = {}
    for seed, (_, streams) in workloads.items():
        for edge, count in streams.edges_seen.items():
            if count:
                seen.setdefault(edge, []).append(seed)
    return seen


def test_workloads_use_every_wait_in_the_source(edges: dict[Edge, list[int]]) -> None:
    lines = wait_lines()
    assert {edge.site for edge in edges} == {Site("offload_engine.py", line) for line in lines}
    assert len(edges) == len(lines), "a wait is for the work of two streams"
    documented = set(re.findall(r"^  (E\d)", offload_engine.__doc__ or "", re.MULTILINE))
    commented = {label for line in lines.values() for label in re.findall(r"# (E\d): ", line)}
    assert commented == documented == {f"E{i}" for i in range(1, 9)}


@pytest.mark.parametrize("line", sorted(wait_lines()))
def test_without_an_edge_a_race_is_found(edges: dict[Edge, list[int]], line: int) -> None:
    (edge,) = (edge for edge in edges if edge.site.line == line)
    for seed in edges[edge]:
        try:
            play_with_streams(seed, SimulatedStreams("early", seed, drop={edge}))
        except StreamRaceError:
            return
    pytest.fail(f"nothing happens without: {edge}")


def test_without_an_edge_to_a_copy_the_values_are_wrong(edges: dict[Edge, list[int]]) -> None:
    """Without the race detector. Waits for compute (E2, E3, E8) cannot show here: compute is never late."""
    to_copies = [edge for edge in edges if edge.recorded_on != "compute"]
    assert len(to_copies) == 6
    for edge in to_copies:
        assert any(
            has_wrong_values(seed, SimulatedStreams(mode, seed, drop={edge}, check_races=False))
            for seed in edges[edge]
            for mode in MODES
        ), f"nothing happens without: {edge}"


def has_wrong_values(seed: int, streams: SimulatedStreams) -> bool:
    try:
        play_with_streams(seed, streams)
    except ContentError:
        return True
    return False


# -- the same with a model -------------------------------------------------------------------------------------------


def serve_preempted(reference: Reference, num_gpu_blocks: int, streams: SimulatedStreams) -> None:
    """Two long requests and two that begin like the first, with preemptions, so that partial blocks come and go."""
    long, longer = random_prompt(3 * BLOCK - 37, seed=1), random_prompt(5 * BLOCK + 9, seed=2)
    prompts = [long, longer, long[: BLOCK + 3], long[:BLOCK] + random_prompt(9, seed=3)]
    options = OFFLOAD | {"kvcache_block_size": 2 * BLOCK, "num_gpu_blocks": num_gpu_blocks}
    staging = small_staging(2 * BLOCK, 2)
    with CheckedLLM(reference, streams=streams, internals=staging, **options) as llm:

        def preempt_often(num_step: int) -> None:
            if num_step % 2:
                llm.preempt_next()

        llm.answer_and_check(prompts, max_tokens=8, before_step=preempt_often)
        llm.answer_and_check([long[: 2 * BLOCK + 5], longer])


def serve_one_ahead(reference: Reference, streams: SimulatedStreams) -> None:
    with CheckedLLM(reference, streams=streams, internals=WORKS_AHEAD, **OFFLOAD | RESUMED) as llm:
        serve_resumed(llm)


Workload = Callable[[SimulatedStreams], None]


@pytest.fixture(scope="module")
def model_edges(reference: Reference) -> dict[Edge, list[Workload]]:
    """Each edge and the workloads in which it orders something."""
    workloads: list[Workload] = [partial(serve_preempted, reference, num_gpu_blocks) for num_gpu_blocks in (2, 3, 4, 5)]
    workloads.append(partial(serve_one_ahead, reference))
    seen: dict[Edge, list[Workload]] = {}
    for workload in workloads:
        streams = SimulatedStreams("late")
        workload(streams)
        for edge, count in streams.edges_seen.items():
            if count:
                seen.setdefault(edge, []).append(workload)
    return seen


@pytest.mark.parametrize("line", sorted(wait_lines()))
def test_model_without_an_edge_fails(model_edges: dict[Edge, list[Workload]], line: int) -> None:
    (edge,) = (edge for edge in model_edges if edge.site.line == line)
    for workload in model_edges[edge]:
        try:
            workload(SimulatedStreams("late", drop={edge}))
        except AssertionError:  # of the race detector, or wrong logits
            return
    pytest.fail(f"nothing happens without: {edge}")
