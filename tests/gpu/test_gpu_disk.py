"""KV on disk with a CUDA GPU: pinned buffers, streams and versions beside steps that run ahead."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import Reference, cache_options
from dense_model import random_prompt
from gpu_llm import GpuLLM

from nanovllm.capabilities.disk.disk_moves import DISK_GRAIN_TOKENS, NUM_READERS
from nanovllm.capabilities.disk.worker import _folded, weights_identity
from nanovllm.engine.setup import Internals

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("patient_disk")]

# A GPU computes the prompts of a tiny model in less time than a disk needs to deliver them
ALWAYS_LOADS = Internals(least_load_tokens=0)
BLOCK = DISK_GRAIN_TOKENS
DOCUMENT = random_prompt(5 * BLOCK + 17, seed=5)
CACHES: dict[str, dict[str, Any]] = {
    "all GPU": cache_options(None),
    "large blocks": cache_options(None) | {"kvcache_block_size": 2 * BLOCK, "num_kvcache_blocks": 20},
    "offload": cache_options(3),
    "offload, CPU attends": cache_options(3) | {"cpu_attention": "on"},
}


@pytest.mark.parametrize("cache", CACHES)
def test_restarted_engine_gives_the_logits_of_transformers(reference: Reference, tmp_path: Path, cache: str) -> None:
    expected = 5 * BLOCK // (512 if cache == "large blocks" else BLOCK) * (512 if cache == "large blocks" else BLOCK)
    for i in range(3):
        with GpuLLM(reference, kv_disk_path=str(tmp_path), internals=ALWAYS_LOADS, **CACHES[cache]) as llm:
            output = llm.answer_and_check([[*DOCUMENT, i, 1, 2], random_prompt(300, seed=i)])[0]
            assert output["num_cached_tokens"] == (expected if i else 0)
            extent_bytes = llm.runner.store._pool.extent_bytes
            needs_buffers = cache in ("all GPU", "large blocks")
            assert llm.stats()["disk_buffer_bytes"] == (NUM_READERS + needs_buffers) * extent_bytes
            llm.assert_nothing_left()
    assert llm.runner.store.num_misses == 0


@pytest.mark.parametrize("cache", ["all GPU", "offload"])
def test_blocks_that_are_given_away_while_they_are_stored_give_right_logits(
    reference: Reference, tmp_path: Path, cache: str
) -> None:
    """A pool for two documents, and many more of them: what is written is right, or is dropped."""
    small = {"num_kvcache_blocks": 14} if cache == "all GPU" else {"num_cpu_blocks": 14}
    options = CACHES[cache] | small | {"kv_disk_path": str(tmp_path), "internals": ALWAYS_LOADS}
    rng = random.Random(0)
    with GpuLLM(reference, **options) as llm:
        for _ in range(40):
            prompts = [random_prompt(rng.randrange(300, 1300), seed=rng.randrange(8)) for _ in range(2)]
            llm.answer_and_check(prompts)
        assert llm.stats()["num_disk_hit_tokens"] > 0
        llm.assert_nothing_left()


@pytest.mark.parametrize("cache", ["all GPU", "offload"])
def test_restarted_engine_begins_where_a_state_is(hybrid: Reference, tmp_path: Path, cache: str) -> None:
    """Snapshots are written by the compute stream, and read and filled by the threads of the disk."""
    for i in range(3):
        with GpuLLM(hybrid, kv_disk_path=str(tmp_path), internals=ALWAYS_LOADS, **CACHES[cache]) as llm:
            output = llm.answer_and_check([[*DOCUMENT, i, 1, 2], random_prompt(300, seed=i)])[0]
            assert output["num_cached_tokens"] == (5 * BLOCK if i else 0)
            assert llm.stats()["num_disk_hit_states"] == (i > 0)
            llm.assert_nothing_left()


@pytest.mark.parametrize("cache", ["all GPU", "offload"])
def test_snapshots_that_are_given_away_while_they_are_stored_give_right_logits(
    hybrid: Reference, tmp_path: Path, cache: str
) -> None:
    small = {"num_kvcache_blocks": 14} if cache == "all GPU" else {"num_cpu_blocks": 14}
    options = CACHES[cache] | small | {"kv_disk_path": str(tmp_path), "internals": ALWAYS_LOADS}
    rng = random.Random(0)
    with GpuLLM(hybrid, **options) as llm:
        snapshots = llm.scheduler.kv.pool.index.snapshots
        snapshots.count, snapshots._unused = 4, list(range(4))
        for _ in range(40):
            prompts = [random_prompt(rng.randrange(300, 1300), seed=rng.randrange(8)) for _ in range(2)]
            llm.answer_and_check(prompts)
        assert llm.stats()["num_disk_hit_states"] > 0
        llm.assert_nothing_left()


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("cache", ["all GPU", "offload"])
@pytest.mark.parametrize("is_recurrent", [False, True], ids=["attention", "recurrent"])
def test_measuring_at_the_start_leaves_no_trace(
    reference: Reference, hybrid: Reference, tmp_path: Path, is_recurrent: bool, cache: str, enforce_eager: bool
) -> None:
    """The prompt that is computed to compare with the disk writes to block 0 and slot 0. The second start has files."""
    own = hybrid if is_recurrent else reference
    for i in range(2):
        with GpuLLM(own, kv_disk_path=str(tmp_path), enforce_eager=enforce_eager, **CACHES[cache]) as llm:
            llm.answer_and_check([[*DOCUMENT, i, 1, 2], random_prompt(300, seed=i)])
            llm.assert_nothing_left()


def test_identity_of_weights_tells_every_change() -> None:
    rng = random.Random(0)
    for size in (0, 1, 3, 4, 5, 4 * 2**22 - 1, 4 * 2**22 + 1):
        data = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
        before = _folded(data)
        assert torch.equal(before, _folded(data.clone()))
        for _ in range(min(size, 8)):
            changed = data.clone()
            changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
            assert not torch.equal(before, _folded(changed))
    model = torch.nn.Linear(64, 64, device="cuda")
    before_all = weights_identity(model)
    with torch.no_grad():
        model.bias[-1] += 1
    assert weights_identity(model) != before_all
