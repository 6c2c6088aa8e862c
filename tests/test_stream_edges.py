"""Every stream edge of the offload engine: no race whatever the copies' timing, and each edge is needed.

The engine runs with tags for K/V (content_model.py) on random workloads, so that hundreds of them take seconds; and
with a real model under each dropped edge, so that the order of calls in StreamedAttention is part of it.
"""

import ast
import inspect
import random
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from unittest import mock

import pytest
import torch
from checked_engine import OFFLOAD, CheckedLLM, Reference, greedy, small_staging
from content_model import ContentRunner, Simulation, VOCAB_SIZE
from dense_model import random_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from race_detector import Site
from random_workloads import play_dense, small_grain
from simulated_streams import MODES, Edge, Mode, SimulatedStreams
from tiny_models import write_tiny_model

from nanovllm.config import KVCacheSizes, KVCacheSpec
from nanovllm.engine.batch import StepPlan
from nanovllm.kvcache import offload_engine
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.offload_engine import OffloadEngine

NUM_LAYERS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class OffloadRunner(ContentRunner):
    """A ContentRunner whose memory is an OffloadEngine's: K of a layer is the tag XOR layer, V its complement."""

    def __init__(self, kv: HybridKVCacheManager, streams: SimulatedStreams) -> None:
        super().__init__(0, 0, kv.block_size)
        spec = KVCacheSpec(num_layers=NUM_LAYERS, block_size=kv.block_size, num_kv_heads=1, head_dim=1, itemsize=8)
        assert spec.staging_group_blocks >= kv.group_blocks
        with mock.patch.object(offload_engine, "make_streams", lambda device: streams):
            sizes = KVCacheSizes(len(kv.ring), len(kv.blocks))
            self.engine = OffloadEngine(spec, sizes, torch.int64, torch.device("cpu"))
        for name in ("k_cache_cpu", "v_cache_cpu", "k_cache_gpu", "v_cache_gpu", "k_staging", "v_staging"):
            streams.name_region(name, getattr(self.engine, name))
        self.compute = streams.compute

    def launch(self, plan: StepPlan) -> list[int]:
        engine = self.engine
        cells = {cell: tag for step in plan.sequences for cell, tag in self._new_cells(step).items()}
        engine.begin_step(plan.moves, sorted({slot for step in plan.sequences for slot in step.block_table}))
        moves = plan.moves
        resident = plan.is_decode and not (moves.loads or moves.copies or moves.streamed)
        at_once = resident and plan.step_id % 2 == 0  # as a CUDA graph does; else layer by layer
        if at_once:
            engine.begin_all_layers()
        for layer in range(NUM_LAYERS):
            if not at_once:
                engine.begin_layer(layer)
            self._write(layer, cells)
            if not at_once:
                engine.stored(layer)
            paged = [self._read_paged(layer, step.block_table, step.context_len) for step in plan.sequences]
            if not at_once:
                engine.attended(layer)
            streamed: list[list[int]] = [[] for _ in plan.sequences]
            for (k, v), group in zip(engine.groups(layer), plan.moves.streamed, strict=True):
                for row, table in enumerate(group.tables):
                    for i in table:
                        streamed[row] += self._read(layer, k[i], v[i])
            for step, paged_tags, streamed_tags in zip(plan.sequences, paged, streamed, strict=True):
                self._compare(step, paged_tags, streamed_tags)
        if at_once:
            engine.ran_all_layers()
        engine.end_step()
        self._sampled = [self._sample(step) for step in plan.sequences if step.sampling is not None]
        return self._sampled

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

    def _read_paged(self, layer: int, table: tuple[int, ...], context_len: int) -> list[int]:
        tags: list[int] = []
        for slot in table:
            num_tokens = min(self.block_size, context_len - len(tags))
            k, v = (cache[layer, slot, :num_tokens] for cache in (self.engine.k_cache_gpu, self.engine.v_cache_gpu))
            tags += self._read(layer, k, v)
        return tags

    def _read(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> list[int]:
        self.compute.read(k)
        self.compute.read(v)
        tags: list[int] = (k ^ layer).flatten().tolist()
        return [tag if value == ~tag else -2 for tag, value in zip(tags, (v ^ layer).flatten().tolist(), strict=True)]


# -- random workloads with tags --------------------------------------------------------------------------------------


def play_with_streams(seed: int, streams: SimulatedStreams) -> Simulation:
    """A dense workload whose copies run when `streams` says. Staging is 1 to 3 groups of 3 blocks of up to 6 tokens."""
    num_groups = 1 + seed % 3
    with small_grain(), small_staging(18, num_groups):
        return play_dense(seed, hybrid=True, make_runner=lambda kv: OffloadRunner(kv, streams))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(MODES))
def test_random_workload_no_race_and_every_sequence_sees_its_tokens(seed: int, mode: Mode) -> None:
    play_with_streams(seed, SimulatedStreams(mode, seed))


def edges_of(seeds: range) -> Counter[Edge]:
    edges: Counter[Edge] = Counter()
    for seed in seeds:
        streams = SimulatedStreams("early", seed)
        play_with_streams(seed, streams)
        edges += streams.edges_seen
    return edges
