"""KV on disk, through the engine: the right logits after a restart, whatever happens to the files meanwhile."""

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
    wait_until_stored,
)
from integrity import check_scheduler
from tiny_models import write_tiny_model

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.capabilities.disk.store import REFRESH_S, check_extent
from nanovllm.capabilities.disk.worker import KVPool
from nanovllm.errors import ConfigError


@pytest.mark.parametrize("cache", ["all GPU", "offload"])
def test_closed_engine_keeps_none_of_its_kv_cache(path: Path, cache: str) -> None:
    """What stores and loads blocks kept the cache, so the next engine of a process found no room on the GPU."""
    llm = LLM("demo", device="cpu", kv_disk_path=str(path), **CACHES[cache])
    k_cache = weakref.ref(llm.runner.memory.disk_pool()._caches[0])
    ask(llm, list(range(200)) * 5)
    llm.close()
    gc.collect()
    assert k_cache() is None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def options(path: Path) -> dict[str, Any]:
    return {"device": "cpu", "dtype": "float32", "kv_disk_path": str(path), **ALL_GPU}


# -- a restart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
def test_restarted_engine_reads_the_document_from_disk(reference: Reference, path: Path, cache: str) -> None:
    expected = HIT // 512 * 512 if "large" in cache else HIT
    for i, question in enumerate(QUESTIONS):
        with CheckedLLM(reference, kv_disk_path=str(path), **CACHES[cache]) as llm:
            while i and not llm.stats()["disk_read_byte_per_s"]:
                time.sleep(0.001)  # the start measures what it finds
            output = llm.answer_and_check([question])[0]
            assert output["num_cached_tokens"] == (expected if i else 0)
            stats = llm.stats()
            assert stats["num_disk_hit_tokens"] == output["num_cached_tokens"]
            llm.assert_nothing_left()
        assert len(extents_below(path)) == HIT // BLOCK
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
def test_two_ranks_keep_their_shards(reference: Reference, path: Path) -> None:
    """A shard that one rank has lost is a miss for all; the tokens before it are a hit.

    Regression: rank 0, which still had its own shard, never let it be stored again when blocks were evicted.
    """
    options = CACHES["all GPU"] | {"tensor_parallel_size": 2, "kv_disk_path": str(path), "kv_disk_policy": "evict"}
    hits = []
    for i in range(3):
        with CheckedLLM(reference, **options) as llm:
            hits.append(llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"])
        folders = [folder for folder in path.iterdir() if folder.is_dir()]
        assert [len(list(folder.glob("*.kv"))) for folder in folders] == [5, 5]
        if i == 0:  # damage the third extent of the rank that is not rank 0
            about = next(folder for folder in folders if '"1 of 2"' in (folder / "model.json").read_text())
            oldest_last = sorted(about.glob("*.kv"), key=lambda file: -file.stat().st_mtime_ns)
            oldest_last[2].write_bytes(b"damaged")
    assert hits == [0, 2 * BLOCK, HIT]


@pytest.mark.slow
def test_closing_waits_for_all_ranks(reference: Reference, path: Path) -> None:
    """The other ranks hear of the last stores when rank 0 may have made its own."""
    options = {"tensor_parallel_size": 2, "kv_disk_path": str(path), "kv_disk_policy": "evict"}
    for cached in (0, HIT):
        with CheckedLLM(reference, **options, **CACHES["offload"]) as llm:
            assert llm.answer_and_check([QUESTIONS[0]])[0]["num_cached_tokens"] == cached


def test_engine_that_works_ahead_stores_and_loads(reference: Reference, path: Path) -> None:
    for cached in (0, HIT):
        for num_gpu_blocks in (None, 3):
            options = cache_options(num_gpu_blocks) | {"kv_disk_path": str(path / str(num_gpu_blocks))}
            with CheckedLLM(reference, internals=WORKS_AHEAD, **options) as llm:
                outputs = llm.answer_and_check([QUESTIONS[0], *([random_prompt(700, seed=8)] if cached else [])])
                assert outputs[0]["num_cached_tokens"] == cached
                llm.assert_nothing_left()


def test_others_are_answered_while_a_prompt_is_loaded(reference: Reference, path: Path) -> None:
    """A slow disk holds up only those who wait for it."""
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


def test_load_is_given_up_when_computing_is_faster(reference: Reference, path: Path) -> None:
    """The disk answers no more, once prompts have been timed. The request is computed, and the engine can be closed."""
    with CheckedLLM(reference, kv_disk_path=str(path), **ALL_GPU) as llm:
        llm.answer_and_check([QUESTIONS[0]])
        llm.answer_and_check([random_prompt(900, seed=3)])
        wait_until_stored(llm)
        forget_all(llm)
        may_read = slow_reads(llm)
        assert llm.answer_and_check([QUESTIONS[1]])[0]["num_cached_tokens"] == 0
        stats = llm.stats()
        assert stats["num_cancelled_disk_loads"] == 1
        assert ask(llm, [*DOCUMENT[:600], 1])["num_cached_tokens"] == 512  # nobody waits for the disk meanwhile
        may_read.set()
        while llm.scheduler.disk.holders:  # type: ignore[union-attr]
            ask(llm, [1, 2, 3], max_tokens=1)
        llm.assert_nothing_left()


@pytest.mark.parametrize("model", ["reference", "hybrid"])
@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_disk_that_hangs_holds_neither_requests_nor_blocks(
    model: str, num_gpu_blocks: int | None, path: Path, request: pytest.FixtureRequest
) -> None:
    """The blocks of a load that was given up were held until the disk answered. Its own request waited for them at the
    head of the queue, and all others waited after it. What the disk delivers in the end must not get into the blocks.
    """
    reference = request.getfixturevalue(model)
    options = cache_options(num_gpu_blocks) | {"kv_disk_path": str(path)}
    options["num_cpu_blocks" if num_gpu_blocks else "num_kvcache_blocks"] = 10
    with CheckedLLM(reference, **options) as llm:
        llm.answer_and_check([QUESTIONS[0]])
        wait_until_stored(llm)
        forget_all(llm)
        may_read, disk = slow_reads(llm), llm.scheduler.disk
        waiting = llm.add_request(QUESTIONS[1], greedy())
        llm.step()
        assert disk.num_waiting == 1
        disk._clock = lambda: time.monotonic() + 1000
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
        assert disk.board.is_stuck
        may_read.set()
        while disk.board.is_stuck:
            time.sleep(0.001)
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


def test_policy_evict_stores_what_leaves_memory(reference: Reference, path: Path) -> None:
    """And nothing before: neither a prompt that has been computed, nor one that stays in memory."""
    options = cache_options(3) | {"kv_disk_path": str(path), "kv_disk_policy": "evict", "num_cpu_blocks": 16}
    with CheckedLLM(reference, **options) as llm:
        llm.answer_and_check([QUESTIONS[0]])
        wait_until_stored(llm)
        assert not extents_below(path)
        for seed in range(4):
            llm.answer_and_check([random_prompt(3 * BLOCK + 1, seed=seed)], max_tokens=30)
            wait_until_stored(llm)
        assert extents_below(path)
        assert llm.answer_and_check([QUESTIONS[1]])[0]["num_cached_tokens"] == HIT, "it had left memory"
        assert llm.stats()["num_disk_hit_tokens"] > 0
    with CheckedLLM(reference, **options) as llm:  # closing has stored the rest
        for prompt in (QUESTIONS[2], random_prompt(3 * BLOCK + 1, seed=3)):
            hit = llm.answer_and_check([prompt])[0]["num_cached_tokens"]
            assert hit == len(prompt) // BLOCK * BLOCK


def test_answer_is_found_by_the_next_turn(reference: Reference, path: Path) -> None:
    """The K and V of answers are stored when the engine is closed."""
    options = {"kv_disk_path": str(path), **cache_options(None)}
    with CheckedLLM(reference, **options) as llm:
        answer = llm.answer_and_check([QUESTIONS[0]], max_tokens=BLOCK)[0]["token_ids"]
    with CheckedLLM(reference, **options) as llm:
        turn = [*QUESTIONS[0], *answer, 1, 2, 3]
        assert llm.answer_and_check([turn])[0]["num_cached_tokens"] == (len(turn) - 4) // BLOCK * BLOCK


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


@pytest.mark.parametrize("model", ["reference", "hybrid"])
def test_two_engines_share_a_path(model: str, options: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Each finds what the other one stores, while both run."""
    directory = request.getfixturevalue(model).directory
    with LLM(directory, **options) as first, LLM(directory, **options) as second:
        ask(first, DOCUMENT)
        wait_until_stored(first)
        second.runner._disk.store.refresh()  # as its thread does every two seconds
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
        busy.runner._disk._clock = lambda: time.monotonic() + passed_s
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


@pytest.mark.parametrize("model", ["reference", "hybrid"])
def test_extents_go_through_a_buffer_where_the_cache_is_on_a_gpu(
    model: str, options: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU only reads go through buffers. Here writes do, too, except writes of states."""
    init, directory = KVPool.__init__, request.getfixturevalue(model).directory
    monkeypatch.setattr(KVPool, "__init__", partialmethod(init, needs_buffers=True))
    outputs = []
    for cached in (0, HIT):
        with LLM(directory, **options) as llm:
            outputs.append(ask(llm, DOCUMENT))
            assert outputs[-1]["num_cached_tokens"] == cached
            assert llm.stats()["disk_buffer_bytes"] > 0
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]


# -- files that are damaged, disks that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_files", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_damaged_files_change_no_token_and_fail_no_request(
    reference: Reference, options: dict[str, Any], path: Path, num_files: int
) -> None:
    with LLM(reference.directory, **options) as llm:
        num_hits = ask_amid_damage(llm, path, QUESTIONS, num_files)
    assert len(num_hits) >= 4, "damage at every extent of the document"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_engines_leave_right_tokens(reference: Reference, options: dict[str, Any], path: Path) -> None:
    assert hits_of_killed_engines(reference, path, options) > 0


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


def test_slow_disk_holds_up_no_request(
    reference: Reference, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leave out what cannot be written before its block is given away."""
    may_write = threading.Event()
    sync = os.fdatasync

    def slow_sync(fd: int) -> None:
        may_write.wait()
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", slow_sync)
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


def test_folder_that_cannot_be_written_is_read(
    reference: Reference, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckedLLM(reference, **options) as llm:
        llm.answer_and_check([QUESTIONS[0]])
    open_file = os.open

    def open_for_reading(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(30, os.strerror(30))
        return open_file(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_for_reading)
    with CheckedLLM(reference, **options) as llm:
        assert llm.answer_and_check([QUESTIONS[1]])[0]["num_cached_tokens"] == HIT
        assert llm.answer_and_check([random_prompt(600, seed=1)])[0]["num_cached_tokens"] == 0
        wait_until_stored(llm)
        assert llm.stats()["num_disk_stored_bytes"] == 0
    assert caplog.text.count("KV is only read from it") == 1


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
        ({"kv_disk_path": str(path), "kv_disk_policy": "always"}, "choose one of prompt, evict"),
        ({"kv_disk_path": str(path), "kv_disk_gb": 1e-6}, "raise kv_disk_gb"),
        ({"kv_disk_path": "/dev/null/kv"}, "kv_disk_path='/dev/null/kv' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(reference.directory, device="cpu", **ALL_GPU, **options)
