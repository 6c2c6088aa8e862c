"""KV on disk, through the engine: the right logits after a restart, even if files are damaged or removed meanwhile."""

import asyncio
import gc
import os
import threading
import time
import weakref
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from checked_engine import ALL_GPU, WORKS_AHEAD, CheckedLLM, Reference, cache_options, greedy
from dense_model import random_prompt
from disk_engines import (
    BLOCK,
    CACHES,
    DOCUMENT,
    HIT,
    QUESTIONS,
    ask,
    ask_amid_damage,
    extents_below,
    forget_all,
    hits_of_killed_engines,
    slow_reads,
    states_below,
    wait_until_stored,
)
from integrity import check_scheduler
from tiers import tiered
from tiny_models import write_tiny_model

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.capabilities.disk import tier
from nanovllm.capabilities.disk.disk_moves import PAUSE_S
from nanovllm.capabilities.disk.start import measure_disk
from nanovllm.capabilities.disk.store import REFRESH_S, check_extent
from nanovllm.capabilities.disk.worker import KVPool
from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.engine.setup import Internals
from nanovllm.errors import ConfigError

pytestmark = pytest.mark.usefixtures("patient_disk")


@pytest.mark.parametrize("cache", ["all GPU", "offload"])
def test_closed_engine_keeps_none_of_its_kv_cache(path: Path, cache: str) -> None:
    """The disk's threads kept the cache, so the next engine of a process found no room on the GPU."""
    llm = LLM("demo", device="cpu", kv_disk_path=str(path), **CACHES[cache])
    k_cache = weakref.ref(llm.runner.memory.whole_cache[0])
    ask(llm, list(range(200)) * 5)
    llm.close()
    gc.collect()
    assert k_cache() is None


# -- a restart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", tiered(CACHES, ("all GPU, large blocks", "offload")))
def test_restarted_engine_reads_the_document_from_disk(model: Reference, path: Path, cache: str) -> None:
    """With recurrent layers it begins at the state on disk, and nothing after the state was stored."""
    expected = HIT // 512 * 512 if "large" in cache else HIT
    for i, question in enumerate(QUESTIONS):
        with CheckedLLM(model, kv_disk_path=str(path), **CACHES[cache]) as llm:
            assert llm.answer_and_check([question])[0]["num_cached_tokens"] == (expected if i else 0)
            stats, spec = llm.stats(), llm.runner.spec
            assert stats["num_disk_hit_tokens"] == (expected if i else 0)
            assert stats["num_disk_hit_states"] == (spec.has_states and i > 0)
            llm.assert_nothing_left()
        states = states_below(path)
        assert len(extents_below(path)) == (expected // BLOCK + 1 if spec.has_states else HIT // BLOCK)
        assert [file.stat().st_size for file in states] == ([4096 + spec.states.state_bytes] if spec.has_states else [])
    assert stats["num_disk_misses"] == stats["num_waiting_for_disk"] == 0
    assert stats["num_disk_stored_bytes"] == 0, "what is on disk is not written again"
    assert stats["disk_read_byte_per_s"] > 0


def test_caches_of_all_kinds_share_extents(reference: Reference, path: Path) -> None:
    """The files depend neither on the size of blocks nor on offload."""
    hits = []
    for cache in [*CACHES, *CACHES]:
        with CheckedLLM(reference, kv_disk_path=str(path), **CACHES[cache]) as llm:
            hits.append(llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"])
    assert hits == [0, 1024, HIT, HIT, HIT, 1024, HIT, HIT]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["all GPU", "offload"])
def test_two_ranks_keep_their_shards(model: Reference, path: Path, cache: str) -> None:
    """A shard that one rank has lost shortens the hit of both, and is written again. Closing waits for both ranks.

    Regression: rank 0, which still had its own shard, never let it be stored again.
    """
    hits = []
    for i in range(3):
        with CheckedLLM(model, tensor_parallel_size=2, kv_disk_path=str(path), **CACHES[cache]) as llm:
            hits.append(llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"])
            has_states = llm.runner.spec.has_states
        folders = [folder for folder in path.iterdir() if folder.is_dir()]
        num_states = has_states * min(i + 1, 2)  # the second one where the extents on disk ended
        assert [len(list(folder.glob("*.kv"))) for folder in folders] == [5 + num_states] * 2
        if i == 0:  # damage the third extent of the rank that is not rank 0
            about = next(folder for folder in folders if '"1 of 2"' in (folder / "model.json").read_text())
            oldest_last = sorted(about.glob("*.kv"), key=lambda file: -file.stat().st_mtime_ns)
            oldest_last[2].write_bytes(b"damaged")
    assert hits == [0, 0 if has_states else 2 * BLOCK, HIT]


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_engine_that_works_ahead_loads_several_sequences_while_others_run(
    model: Reference, path: Path, num_gpu_blocks: int | None
) -> None:
    options = cache_options(num_gpu_blocks) | {"kv_disk_path": str(path), "internals": WORKS_AHEAD}
    others = [random_prompt(700, seed=i) for i in (7, 8)]
    with CheckedLLM(model, **options) as llm:
        llm.answer_and_check([QUESTIONS[0], *others])
    with CheckedLLM(model, **options) as llm:
        outputs = llm.answer_and_check([*QUESTIONS, random_prompt(500, seed=9), *others])
        assert [output["num_cached_tokens"] for output in outputs] == [HIT, HIT, HIT, 0, 512, 512]
        llm.assert_nothing_left()


def test_others_are_answered_while_a_prompt_is_loaded(reference: Reference, path: Path) -> None:
    """A slow disk delays only the requests that wait for it."""
    with CheckedLLM(reference, kv_disk_path=str(path), **ALL_GPU) as llm:
        llm.answer_and_check([QUESTIONS[0]])
    with CheckedLLM(reference, kv_disk_path=str(path), **ALL_GPU) as llm:
        may_read = slow_reads(llm)
        waiting = llm.add_request(QUESTIONS[1], greedy())
        other = llm.add_request(random_prompt(300, seed=1), greedy())
        finished: dict[int, Any] = {}
        while other not in finished:
            finished |= llm.step().finished
        assert waiting not in finished and llm.stats()["num_waiting_for_disk"] == 1
        may_read.set()
        finished |= llm.finish_all()
        assert finished[waiting]["num_cached_tokens"] == HIT
        llm.check(waiting, QUESTIONS[1], finished[waiting])
        llm.assert_nothing_left()


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_disk_that_hangs_holds_neither_requests_nor_blocks(
    model: Reference, num_gpu_blocks: int | None, path: Path
) -> None:
    """The blocks of a load that was given up were held until the disk answered. Its own request waited for them at the
    head of the queue, and all others waited after it. Data that arrives later must not get into the blocks.
    """
    options = cache_options(num_gpu_blocks) | {"kv_disk_path": str(path)}
    options["num_cpu_blocks" if num_gpu_blocks else "num_kvcache_blocks"] = 10
    with CheckedLLM(model, **options) as llm:
        llm.answer_and_check([QUESTIONS[0]])
        wait_until_stored(llm)
        forget_all(llm)
        may_read, disk, now_s = slow_reads(llm), llm.scheduler.store, 1000.0
        disk._clock = lambda: now_s
        waiting = llm.add_request(QUESTIONS[1], greedy())
        llm.step()
        assert disk.num_waiting == 1
        now_s += tier.STALL_S + 1
        short = llm.add_request([1, 2, 3], greedy())
        finished = llm.finish_all()
        for request_id, prompt in ((waiting, QUESTIONS[1]), (short, [1, 2, 3])):
            llm.check(request_id, prompt, finished[request_id])
            assert finished[request_id]["num_cached_tokens"] == 0
        assert llm.stats()["num_cancelled_disk_loads"] == 1
        llm.assert_nothing_left()
        large = random_prompt(8 * BLOCK, seed=1)
        llm.answer_and_check([large])
        forget_all(llm)
        assert llm.answer_and_check([QUESTIONS[2]])[0]["num_cached_tokens"] == 0, "nothing is asked of the disk"
        may_read.set()
        now_s += PAUSE_S
        assert llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"] == HIT, "in memory"
        forget_all(llm)
        assert llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"] == HIT, "on disk"
        llm.assert_nothing_left()


def test_aborted_load_gives_its_blocks_back(reference: Reference, path: Path) -> None:
    for num_gpu_blocks in (None, 3):
        options = cache_options(num_gpu_blocks) | {"kv_disk_path": str(path)}
        with CheckedLLM(reference, **options) as llm:
            ask(llm, QUESTIONS[0])
            wait_until_stored(llm)
            forget_all(llm)
            may_read = slow_reads(llm)
            ids = [llm.add_request(question, greedy()) for question in QUESTIONS]
            for _ in range(3):
                llm.step()
            assert llm.stats()["num_waiting_for_disk"] == 3
            assert all(llm.abort(request_id) for request_id in (ids[0], ids[2]))
            check_scheduler(llm.scheduler)
            may_read.set()
            finished = llm.finish_all()
            assert [finished[request_id]["finish_reason"] for request_id in ids] == ["abort", "length", "abort"]
            llm.check(ids[1], QUESTIONS[1], finished[ids[1]])
            llm.assert_nothing_left()


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_prompt_is_on_disk_once_it_is_computed_and_its_answer_when_it_ends(reference: Reference, path: Path) -> None:
    """So blocks that leave memory are on disk, and the next turn finds the answer."""
    options = {"kv_disk_path": str(path), **cache_options(None)}
    with CheckedLLM(reference, **options) as llm:
        request_id, finished = llm.add_request(QUESTIONS[0], greedy(BLOCK)), dict[int, Any]()
        while not llm.stats()["num_decode_tokens"]:
            llm.step()
        wait_until_stored(llm)
        assert len(extents_below(path)) == HIT // BLOCK
        while request_id not in finished:
            finished |= llm.step().finished
        wait_until_stored(llm)
        turn = [*QUESTIONS[0], *finished[request_id]["token_ids"], 1, 2, 3]
        forget_all(llm)
        assert llm.answer_and_check([turn])[0]["num_cached_tokens"] == (len(turn) - 4) // BLOCK * BLOCK


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_prefix_is_loaded_only_from_the_measured_length_on(
    model: Reference, path: Path, num_gpu_blocks: int | None
) -> None:
    """Shorter ones are computed. Start-up measures the length on a GPU only, but measuring works on a CPU, too."""
    options = {"kv_disk_path": str(path), **cache_options(num_gpu_blocks)}
    for least_tokens, cached in ((0, 0), (HIT, HIT), (HIT + BLOCK, 0)):
        with CheckedLLM(model, internals=Internals(least_load_tokens=least_tokens), **options) as llm:
            assert llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"] == cached
    with CheckedLLM(model, **options) as llm:
        rates = llm.runner.apply(measure_disk)
        assert rates.num_tokens == 300 and rates.prompt_s > 0 and rates.read_byte_per_s > 0
        llm.answer_and_check([QUESTIONS[0]])
        llm.assert_nothing_left()


def test_salts_share_nothing_on_disk(reference: Reference, options: dict[str, Any]) -> None:
    salts = ["a", "b", None]
    for cached in (0, HIT):
        with LLM(reference.directory, **options) as llm:
            prompts = [{"prompt_token_ids": DOCUMENT, "cache_salt": salt} for salt in salts]
            assert [ask(llm, prompt)["num_cached_tokens"] for prompt in prompts] == [cached] * 3
    assert len(extents_below(Path(options["kv_disk_path"]))) == 3 * HIT // BLOCK


def test_prompt_that_is_scored_reads_nothing(reference: Reference, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    for _ in range(2):
        with LLM(reference.directory, **options) as llm:
            output = llm.generate([DOCUMENT], params, use_tqdm=False)[0]
            assert output["num_cached_tokens"] == 0 and len(output["prompt_logprobs"]) == len(DOCUMENT)


def test_other_weights_dtype_or_config_share_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    first, moved = (write_tiny_model(tmp_path / name, max_position_embeddings=2048) for name in ("first", "moved"))
    other = write_tiny_model(tmp_path / "other", max_position_embeddings=2048, seed=1)
    theta = {"hf_overrides": {"rope_theta": 1234.0}}
    variants = [(first, {}), (other, {}), (first, {"dtype": "bfloat16"}), (first, theta), (moved, {}), (first, {})]
    hits = []
    for directory, changes in variants:
        with LLM(directory, **options | changes) as llm:
            hits.append(ask(llm, DOCUMENT)["num_cached_tokens"])
    assert hits == [0, 0, 0, 0, HIT, HIT]


def test_async_engine_reads_from_disk(reference: Reference, options: dict[str, Any]) -> None:
    async def cached() -> int:
        async with AsyncLLM(reference.directory, **options) as engine:
            outputs = [update.output async for update in engine.generate(DOCUMENT, greedy())]
            assert outputs[-1] is not None
            return outputs[-1]["num_cached_tokens"]

    assert [asyncio.run(cached()) for _ in range(2)] == [0, HIT]


def test_two_engines_share_a_path(model: Reference, options: dict[str, Any]) -> None:
    """Each finds what the other one stores, while both run."""
    with LLM(model.directory, **options) as first, LLM(model.directory, **options) as second:
        ask(first, DOCUMENT)
        wait_until_stored(first)
        second.runner.store.store.refresh()  # as its thread does every two seconds
        assert ask(second, DOCUMENT)["num_cached_tokens"] == HIT


def test_busy_engine_sees_what_another_one_changes(reference: Reference, path: Path, options: dict[str, Any]) -> None:
    """It looked only after two seconds without work, so it never found extents of others, nor that some were gone."""
    passed_s = 0.0

    def stay_busy(llm: LLM) -> None:
        """For longer than the interval, with pauses that are shorter."""
        nonlocal passed_s
        for _ in range(6):
            ask(llm, random_prompt(300, seed=int(100 * passed_s)))
            wait_until_stored(llm)
            passed_s += REFRESH_S / 4

    with LLM(reference.directory, **options) as busy, LLM(reference.directory, **options) as other:
        busy.runner.store._clock = lambda: time.monotonic() + passed_s
        ask(other, DOCUMENT)
        wait_until_stored(other)
        stay_busy(busy)
        assert ask(busy, DOCUMENT)["num_cached_tokens"] == HIT
        for file in extents_below(path):
            file.unlink()
        stay_busy(busy)
        ask(busy, DOCUMENT)
        wait_until_stored(busy)
        forget_all(busy)
        assert ask(busy, DOCUMENT)["num_cached_tokens"] == HIT and busy.stats()["num_disk_misses"] == 0


def test_extents_go_through_a_buffer_where_the_cache_is_on_a_gpu(
    model: Reference, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU only reads go through buffers. Here writes do, too, except writes of states."""
    monkeypatch.setattr(KVPool, "__init__", partialmethod(KVPool.__init__, needs_buffers=True))
    outputs = []
    for cached in (0, HIT):
        with LLM(model.directory, **options) as llm:
            outputs.append(ask(llm, DOCUMENT))
            assert outputs[-1]["num_cached_tokens"] == cached
            assert llm.stats()["disk_buffer_bytes"] > 0
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]


# -- files that are damaged, disks that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_files", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_damaged_files_change_no_token_and_fail_no_request(
    model: Reference, options: dict[str, Any], path: Path, num_files: int
) -> None:
    with LLM(model.directory, **options) as llm:
        states = [each for each in llm.scheduler.kv.companions if isinstance(each, RecurrentStates)]
        for each in states:
            each.snapshot_tokens = BLOCK
        num_hits = ask_amid_damage(llm, path, QUESTIONS, num_files)
        assert (llm.stats()["num_disk_hit_states"] > 0) == bool(states)
    assert len(num_hits) >= 3, "damage at every extent and state of the document"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_engines_leave_right_tokens(model: Reference, options: dict[str, Any], path: Path) -> None:
    assert hits_of_killed_engines(model, path, options) > 0


def test_full_disk_leaves_the_engine_serving(
    reference: Reference, options: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwritev", fail)
    with LLM(reference.directory, **options) as llm:
        first = ask(llm, DOCUMENT)
        wait_until_stored(llm)
        stats = llm.stats()
        assert (stats["num_disk_bytes"], stats["num_dropped_extents"]) == (0, HIT // BLOCK)
        forget_all(llm)
        assert ask(llm, DOCUMENT)["token_ids"] == first["token_ids"]
    assert not extents_below(path)


def test_slow_disk_holds_up_no_request(reference: Reference, path: Path, may_write: threading.Event) -> None:
    """Leave out what cannot be written before its block is given away."""
    options = cache_options(3) | {"kv_disk_path": str(path), "num_cpu_blocks": 16}
    with CheckedLLM(reference, **options) as llm:
        for seed in range(6):
            llm.answer_and_check([random_prompt(5 * BLOCK + 1, seed=seed)])
        assert not extents_below(path) and llm.stats()["num_extents_to_store"] > 0
        may_write.set()
        wait_until_stored(llm)
        assert 0 < llm.stats()["num_dropped_extents"] < 30
        llm.assert_nothing_left()
    assert [check_extent(file) for file in extents_below(path)]
    with CheckedLLM(reference, **options) as llm:
        for seed in range(6):
            llm.answer_and_check([random_prompt(5 * BLOCK + 1, seed=seed)])
        assert llm.stats()["num_disk_hit_tokens"] > 0


def test_small_limit_keeps_the_beginning_of_a_document(reference: Reference, path: Path) -> None:
    """Without its beginning the rest of a document would be of no use."""
    extent_bytes = 256 * 512 + 4096
    limit_gb = 4.9 * extent_bytes / 2**30
    options = {"kv_disk_path": str(path), "kv_disk_gb": limit_gb, **ALL_GPU}
    for cached in (0, 4 * BLOCK, 4 * BLOCK):
        with CheckedLLM(reference, **options) as llm:
            assert llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"] == cached
            assert llm.stats()["num_disk_bytes"] <= limit_gb * 2**30
    other = random_prompt(3 * BLOCK + 1, seed=9)
    for cached in (0, 3 * BLOCK):  # a later document takes its place
        with CheckedLLM(reference, **options) as llm:
            assert llm.answer_and_check([other])[0]["num_cached_tokens"] == cached


def test_refusals_name_the_remedy(reference: Reference, path: Path) -> None:
    for options, message in (
        ({"kv_disk_gb": 1.0}, "kv_disk_gb=1 limits what is below kv_disk_path; add kv_disk_path"),
        ({"kv_disk_path": ""}, "kv_disk_path='' must be a folder"),
        ({"kv_disk_path": str(path), "enable_prefix_caching": False}, "leave out enable_prefix_caching=False"),
        ({"kv_disk_path": str(path), "kv_disk_gb": 1e-6}, "raise kv_disk_gb"),
        ({"kv_disk_path": "/dev/null/kv"}, "kv_disk_path='/dev/null/kv' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(reference.directory, device="cpu", **ALL_GPU, **options)
