"""Models with recurrent layers and KV on disk: a restarted engine begins where a state is, with the right logits."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checked_engine import ALL_GPU, WORKS_AHEAD, CheckedLLM, Reference, cache_options, greedy
from content_model import companion_of
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
    wait_until_stored,
)
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.capabilities.disk.disk_moves import DISK_HEADER_BYTES, is_state_key, state_key
from nanovllm.capabilities.disk.store import check_extent, list_extents
from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes

LONG_QUESTIONS = [[*DOCUMENT, *random_prompt(300, seed=i)] for i in range(3)]
SLOW = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def options(path: Path) -> dict[str, Any]:
    return {"device": "cpu", "dtype": "float32", "kv_disk_path": str(path), **ALL_GPU}


@pytest.fixture
def restart(hybrid: Reference, path: Path) -> Callable[..., CheckedLLM]:
    """Start an engine that leaves a state every `state_every` tokens."""

    def start(state_every: int = 8192, **changes: Any) -> CheckedLLM:
        cache = {} if changes.keys() & {"num_kvcache_blocks", "num_cpu_blocks"} else ALL_GPU
        llm = CheckedLLM(hybrid, kv_disk_path=str(path), **cache, **changes)
        companion_of(llm.scheduler.kv, RecurrentStates).snapshot_tokens = state_every
        return llm

    return start


def hits(llm: CheckedLLM, *prompts: list[int]) -> list[int]:
    """The reused tokens of prompts that are asked one after the other; checks the logits."""
    return [llm.answer_and_check([prompt])[0]["num_cached_tokens"] for prompt in prompts]


def states_below(path: Path) -> list[Path]:
    """Those of later places first."""
    found = [extent for extent in list_extents(path).extents if extent.is_state]
    return [extent.path for extent in sorted(found, key=lambda extent: extent.used_s)]


# -- a restart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache", ["all GPU", *(pytest.param(name, marks=SLOW) for name in CACHES if "," in name), "offload"]
)
def test_restarted_engine_begins_where_a_state_is(restart: Callable[..., CheckedLLM], path: Path, cache: str) -> None:
    expected = HIT // 512 * 512 if "large" in cache else HIT
    for i, question in enumerate(QUESTIONS):
        with restart(**CACHES[cache]) as llm:
            assert hits(llm, question) == [expected if i else 0]
            stats = llm.stats()
            assert stats["num_disk_hit_tokens"] == (expected if i else 0)
            assert stats["num_disk_hit_states"] == stats["num_state_loads"] == (i > 0)
            llm.assert_nothing_left()
        assert (len(extents_below(path)), len(states_below(path))) == (expected // BLOCK + 1, 1)
    assert stats["num_disk_stored_bytes"] == stats["num_disk_misses"] == 0
    states, spec = states_below(path), llm.runner.spec.states
    assert states[0].stat().st_size == DISK_HEADER_BYTES + spec.state_bytes


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_state_is_left_where_a_question_parts_from_what_is_on_disk(
    restart: Callable[..., CheckedLLM], num_gpu_blocks: int | None
) -> None:
    """As in memory: the first question's state is behind its own end, the second one leaves one at the document's."""
    found = []
    for question in (0, 1, 2, 2):
        with restart(**cache_options(num_gpu_blocks)) as llm:
            found += hits(llm, LONG_QUESTIONS[question])
    assert found == [0, 0, HIT, HIT + BLOCK]


def test_engines_of_all_kinds_share_states(restart: Callable[..., CheckedLLM]) -> None:
    """The files depend neither on the size of blocks, nor on offload, nor on guesses, whose inputs are beside a state.

    Large blocks find the state only where one of them ends.
    """
    found = []
    for cache in CACHES.values():
        for speculation in ("off", "prompt_lookup"):
            with restart(**(cache | {"speculation": speculation})) as llm:
                found += hits(llm, QUESTIONS[0])
    assert found == [0, HIT, 0, 1024, HIT, HIT, HIT, HIT]


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_several_sequences_load_while_others_run(
    restart: Callable[..., CheckedLLM], num_gpu_blocks: int | None
) -> None:
    """Also with an engine that works ahead."""
    changes = cache_options(num_gpu_blocks) | {"internals": WORKS_AHEAD}
    others = [random_prompt(700, seed=i) for i in (7, 8)]
    with restart(**changes) as llm:
        llm.answer_and_check([QUESTIONS[0], *others])
    with restart(**changes) as llm:
        outputs = llm.answer_and_check([*QUESTIONS, random_prompt(500, seed=9), *others])
        assert [output["num_cached_tokens"] for output in outputs] == [HIT, HIT, HIT, 0, 512, 512]
        llm.assert_nothing_left()


def test_state_alone_is_read_where_the_keys_are_in_memory(restart: Callable[..., CheckedLLM]) -> None:
    with restart() as llm:
        hits(llm, QUESTIONS[0])
        wait_until_stored(llm)
        snapshots = llm.scheduler.kv.pool.index.snapshots
        for prefix_id in list(snapshots._by_prefix):
            snapshots.forget(prefix_id)
        assert hits(llm, QUESTIONS[1]) == [HIT]
        stats = llm.stats()
        assert (stats["num_disk_hit_states"], stats["num_disk_hit_tokens"]) == (1, 0)
        assert stats["num_disk_loaded_bytes"] == llm.runner.spec.states.state_bytes
        llm.assert_nothing_left()


@pytest.mark.parametrize("quantization", ["fp8", pytest.param("int4", marks=SLOW)])
def test_quantized_weights(hybrid: Reference, options: dict[str, Any], quantization: str) -> None:
    """They share nothing with the weights that they were rounded from."""
    outputs = []
    for changes in ({}, {"quantization": quantization}, {"quantization": quantization}):
        with LLM(hybrid.directory, **options, **changes) as llm:
            outputs.append(ask(llm, QUESTIONS[0], max_tokens=20))
    assert [output["num_cached_tokens"] for output in outputs] == [0, 0, HIT]
    assert outputs[2]["token_ids"] == outputs[1]["token_ids"]


@SLOW
def test_two_ranks_keep_their_shards(restart: Callable[..., CheckedLLM], path: Path) -> None:
    """If one rank has lost its part of a state, all begin at an earlier one."""
    found = []
    for i in range(3):
        with restart(2 * BLOCK, tensor_parallel_size=2, **CACHES["offload"]) as llm:
            found += hits(llm, QUESTIONS[0])
        folders = [folder for folder in path.iterdir() if folder.is_dir()]
        assert [len(list(folder.glob("*.kv"))) for folder in folders] == [8, 8]
        if i == 0:
            (other,) = (folder for folder in folders if '"1 of 2"' in (folder / "model.json").read_text())
            next(file for file in states_below(path) if file.parent == other).write_bytes(b"damaged")
    assert found == [0, 4 * BLOCK, HIT]


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_long_prompt_leaves_states_on_its_way(restart: Callable[..., CheckedLLM], path: Path) -> None:
    """Another prompt that parts from it anywhere is read up to the last of these."""
    with restart(2 * BLOCK) as llm:
        hits(llm, QUESTIONS[0])
    assert len(states_below(path)) == 3
    with restart(2 * BLOCK) as llm:
        assert hits(llm, [*DOCUMENT[: 3 * BLOCK], *random_prompt(30, seed=1)]) == [2 * BLOCK]
        assert llm.stats()["num_disk_hit_tokens"] == 2 * BLOCK


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_policy_evict_stores_states_that_leave_memory(
    restart: Callable[..., CheckedLLM], path: Path, num_gpu_blocks: int | None
) -> None:
    small = {"num_kvcache_blocks": 16} if num_gpu_blocks is None else {"num_cpu_blocks": 16}
    changes = cache_options(num_gpu_blocks) | small | {"kv_disk_policy": "evict"}
    with restart(**changes) as llm:
        hits(llm, QUESTIONS[0])
        wait_until_stored(llm)
        assert not extents_below(path)
        for seed in range(4):
            hits(llm, random_prompt(3 * BLOCK + 1, seed=seed))
            wait_until_stored(llm)
        assert hits(llm, QUESTIONS[1]) == [HIT], "it had left memory"
        assert llm.stats()["num_disk_hit_states"] == 1
    with restart(**changes) as llm:  # closing has stored the rest
        assert hits(llm, QUESTIONS[2], random_prompt(3 * BLOCK + 1, seed=3)) == [HIT, 3 * BLOCK]


def test_state_leaves_memory_before_its_keys(restart: Callable[..., CheckedLLM], path: Path) -> None:
    """With few snapshots and the policy `evict`."""
    with restart(kv_disk_policy="evict") as llm:
        snapshots = llm.scheduler.kv.pool.index.snapshots
        snapshots.count, snapshots._unused = 4, list(range(4))
        for seed in range(6):
            hits(llm, random_prompt(BLOCK + 1, seed=seed))
            wait_until_stored(llm)
        assert hits(llm, random_prompt(BLOCK + 1, seed=0)) == [BLOCK]
        assert llm.stats()["num_disk_hit_states"] == 1


def test_state_leaves_memory_while_its_sequence_runs(restart: Callable[..., CheckedLLM]) -> None:
    with restart(kv_disk_policy="evict") as llm:
        snapshots = llm.scheduler.kv.pool.index.snapshots
        snapshots.count, snapshots._unused = 4, list(range(4))
        prompts = [random_prompt(BLOCK + 1, seed=seed) for seed in range(6)]
        first = llm.add_request(prompts[0], greedy(60))
        while llm.stats()["num_decode_tokens"] == 0:
            llm.step()
        for prompt in prompts[1:]:
            llm.add_request(prompt, greedy(2))
        while first not in llm.step().finished:
            wait_until_stored(llm)
        forget_all(llm)
        assert hits(llm, prompts[0]) == [BLOCK]


def test_nothing_is_stored_behind_the_last_state(restart: Callable[..., CheckedLLM], path: Path) -> None:
    """Not even when the engine is closed: nobody could use an answer without the state at its end."""
    question = [*DOCUMENT, *random_prompt(200)]
    with restart() as llm:
        answer = llm.answer_and_check([question], max_tokens=50)[0]["token_ids"]
        assert len(llm.scheduler.kv.pool.index) == HIT // BLOCK + 1
    assert len(extents_below(path)) == HIT // BLOCK + 1, "and of these, one is a state"
    with restart() as llm:
        turn = [*question, *answer, 1, 2, 3]
        assert hits(llm, turn, turn) == [HIT, HIT + BLOCK]


@pytest.mark.parametrize("policy", ["prompt", "evict"])
@pytest.mark.parametrize("cache", ["all GPU, large blocks", "offload"])
def test_nothing_is_stored_behind_the_last_state_in_its_block(
    restart: Callable[..., CheckedLLM], path: Path, cache: str, policy: str
) -> None:
    """Regression: with offload and blocks above 256 tokens, the rest of the last state's block was stored."""
    changes = CACHES[cache] | {"kvcache_block_size": 2 * BLOCK, "kv_disk_policy": policy}
    question = random_prompt(3 * BLOCK + (246 if cache == "offload" else -10))
    with restart(**changes) as llm:
        answer = llm.answer_and_check([question], max_tokens=20)[0]["token_ids"]
    state = (3 if cache == "offload" else 2) * BLOCK  # in the middle of a block that the answer fills, or at its end
    assert len(extents_below(path)) == state // BLOCK + 1
    with restart(**changes) as llm:
        assert hits(llm, [*question, *answer, 1]) == [state]


def test_small_limit_keeps_the_beginning_of_a_document(restart: Callable[..., CheckedLLM], path: Path) -> None:
    with restart() as llm:
        hits(llm, random_prompt(BLOCK + 1))
    extents = sorted(list_extents(path).extents, key=lambda extent: extent.is_state)
    extent_bytes, state_bytes = (extent.num_bytes for extent in extents)
    limit = {"kv_disk_gb": (4 * extent_bytes + 1.5 * state_bytes) / 2**30}
    for cached in (0, 2 * BLOCK, 2 * BLOCK):
        with restart(2 * BLOCK, **limit) as llm:
            assert hits(llm, QUESTIONS[0]) == [cached]
            assert llm.stats()["num_disk_bytes"] <= limit["kv_disk_gb"] * 2**30
    other = random_prompt(BLOCK + 1, seed=9)
    for cached in (0, BLOCK):  # a later document takes its place
        with restart(**limit) as llm:
            assert hits(llm, other) == [cached]
    least_bytes = extent_bytes + state_bytes
    with pytest.raises(ConfigError, match=f"256 tokens of this model, which take {format_bytes(least_bytes)}; raise"):
        restart(kv_disk_gb=(least_bytes - 1) / 2**30)


def test_states_are_evicted_with_their_extents(restart: Callable[..., CheckedLLM], path: Path) -> None:
    """Every state that is left can be used, and at most one document has extents without the state at its end."""
    with restart() as llm:
        hits(llm, random_prompt(3 * BLOCK + 1, seed=0))
    limit = 3.6 * list_extents(path).num_bytes / 2**30
    with restart(kv_disk_gb=limit) as llm:
        for seed in (1, 2, 3, 4, 3, 5, 6):
            hits(llm, random_prompt(3 * BLOCK + 1, seed=seed))
            wait_until_stored(llm)
        assert llm.stats()["num_disk_evictions"] > 0
    headers = [check_extent(file) for file in extents_below(path)]
    parents = {header.key: header.parent for header in headers if not is_state_key(header.key)}
    useful: set[bytes] = set()
    states = [header.key for header in headers if is_state_key(header.key)]
    for key in states:
        prefix = next(known for known in parents if state_key(known) == key)
        for _ in range(3):
            useful.add(prefix)
            prefix = parents[prefix]
    assert len(states) == 3 and len(useful) == 9 and len(parents) <= 11
    with restart() as llm:
        assert hits(llm, *(random_prompt(3 * BLOCK + 1, seed=seed) for seed in (3, 5, 6))) == [3 * BLOCK] * 3


def test_slow_disk_leaves_out_states_that_are_given_away(
    restart: Callable[..., CheckedLLM], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    sync = os.fdatasync

    def slow_sync(fd: int) -> None:
        may_write.wait()
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    prompts = [random_prompt(BLOCK + 1, seed=seed) for seed in range(8)]
    with restart() as llm:
        snapshots = llm.scheduler.kv.pool.index.snapshots
        snapshots.count, snapshots._unused = 3, list(range(3))
        hits(llm, *prompts)
        may_write.set()
        wait_until_stored(llm)
        assert 0 < llm.stats()["num_dropped_extents"] <= 5
    num_stored = len([check_extent(file) for file in states_below(path)])
    with restart() as llm:
        assert sum(hits(llm, *prompts)) == num_stored * BLOCK >= 3 * BLOCK


# -- files that are not what they should be ----------------------------------------------------------------------------


def test_damaged_state_makes_the_prompt_begin_at_an_earlier_one(
    restart: Callable[..., CheckedLLM], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log; the state is written again."""
    found = []
    for i in range(3):
        with caplog.at_level(logging.WARNING, "nanovllm"), restart(2 * BLOCK) as llm:
            found += hits(llm, QUESTIONS[0])
            assert llm.stats()["num_disk_misses"] == (i == 1)
        if i == 0:
            damaged = states_below(path)[0]
            damaged.write_bytes(damaged.read_bytes()[:-1])
    assert found == [0, 4 * BLOCK, HIT]
    assert [record.getMessage().count(str(damaged)) for record in caplog.records] == [1]


def test_missing_extent_makes_the_prompt_begin_at_the_state_before(
    restart: Callable[..., CheckedLLM], path: Path
) -> None:
    """Whether the engine knows that it is missing or finds out."""
    with restart(2 * BLOCK) as llm:
        hits(llm, QUESTIONS[0])
    extents = [extent for extent in list_extents(path).extents if not extent.is_state]
    third = sorted(extents, key=lambda extent: -extent.used_s)[2].path
    for is_known in (True, False):
        content = third.read_bytes()
        if is_known:
            third.unlink()
        with restart(2 * BLOCK) as llm:
            if not is_known:
                third.unlink()
            assert hits(llm, QUESTIONS[0]) == [2 * BLOCK]
            assert llm.stats()["num_disk_misses"] == (not is_known)
        third.write_bytes(content)


@pytest.mark.parametrize("kept", ["states", "extents"])
def test_states_or_extents_alone_are_of_no_use(
    restart: Callable[..., CheckedLLM], path: Path, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    with restart() as llm:
        hits(llm, QUESTIONS[0])
    for file in extents_below(path):
        if is_state_key(bytes.fromhex(file.stem)) != (kept == "states"):
            file.unlink()
    caplog.clear()
    for cached in (0, HIT):
        with restart() as llm:
            assert hits(llm, QUESTIONS[0]) == [cached]
            assert llm.stats()["num_disk_misses"] == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("num_files", [20, pytest.param(300, marks=SLOW)])
def test_damaged_files_change_no_token_and_fail_no_request(
    hybrid: Reference, options: dict[str, Any], path: Path, num_files: int
) -> None:
    with LLM(hybrid.directory, **options) as llm:
        companion_of(llm.scheduler.kv, RecurrentStates).snapshot_tokens = BLOCK
        num_hits = ask_amid_damage(llm, path, QUESTIONS, num_files)
        assert llm.stats()["num_disk_hit_states"] > 0
    assert len(num_hits) >= 3, "damage at every extent and state of the document"


@SLOW
@pytest.mark.timeout(900)
def test_killed_engines_leave_right_tokens(hybrid: Reference, options: dict[str, Any], path: Path) -> None:
    assert hits_of_killed_engines(hybrid, path, options) > 0


def test_experts(tmp_path: Path) -> None:
    reference = Reference(write_tiny_model(tmp_path, "qwen3_5_moe", num_layers=4, max_position_embeddings=2048))
    for cached in (0, 2 * BLOCK):
        with CheckedLLM(reference, kv_disk_path=str(tmp_path / "kv"), **cache_options(3)) as llm:
            assert hits(llm, DOCUMENT[: 2 * BLOCK + 1]) == [cached]
