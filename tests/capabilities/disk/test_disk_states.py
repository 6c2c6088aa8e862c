"""Models with recurrent layers or windows and KV on disk: a restarted engine begins where a state is, with the right
logits.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checked_engine import ALL_GPU, CheckedLLM, Reference, cache_options
from content_model import companion_of
from dense_model import random_prompt
from disk_engines import BLOCK, CACHES, DOCUMENT, HIT, QUESTIONS, ask, extents_below, states_below, wait_until_stored
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.capabilities.disk.disk_moves import is_state_key, state_key
from nanovllm.capabilities.disk.store import check_extent, list_extents
from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes

LONG_QUESTIONS = [[*DOCUMENT, *random_prompt(300, seed=i)] for i in range(3)]
SLOW = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("patient_disk")


@pytest.fixture
def restart(stateful: Reference, path: Path) -> Callable[..., CheckedLLM]:
    """Start an engine that leaves a state every `state_every` tokens."""

    def start(state_every: int = 8192, **changes: Any) -> CheckedLLM:
        cache = {} if changes.keys() & {"num_kvcache_blocks", "num_cpu_blocks"} else ALL_GPU
        llm = CheckedLLM(stateful, kv_disk_path=str(path), **cache, **changes)
        companion_of(llm.scheduler.kv, RecurrentStates).snapshot_tokens = state_every
        return llm

    return start


def hits(llm: CheckedLLM, *prompts: list[int]) -> list[int]:
    """The reused tokens of prompts that are asked one after the other; checks the logits."""
    return [llm.answer_and_check([prompt])[0]["num_cached_tokens"] for prompt in prompts]


# -- a restart ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_state_is_left_where_a_question_parts_from_what_is_on_disk(
    restart: Callable[..., CheckedLLM], num_gpu_blocks: int | None
) -> None:
    """As in memory: the first question leaves a state at its end, the second one also at the end of the document."""
    found = []
    for question in (0, 1, 2, 2):
        with restart(**cache_options(num_gpu_blocks)) as llm:
            found += hits(llm, LONG_QUESTIONS[question])
    assert found == [0, 0, HIT, HIT + BLOCK]


def test_engines_of_all_kinds_share_states(restart: Callable[..., CheckedLLM]) -> None:
    """The files depend neither on the size of blocks, nor on offload, nor on draft tokens, whose inputs are not stored.

    Large blocks find the state only where one of them ends.
    """
    found = []
    for cache in CACHES.values():
        for speculation in ("off", "prompt_lookup"):
            with restart(**(cache | {"speculation": speculation})) as llm:
                found += hits(llm, QUESTIONS[0])
    assert found == [0, HIT, 0, 1024, HIT, HIT, HIT, HIT]


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


def test_weights_in_fp8_share_nothing_with_the_same_weights_and_activations_in_fp8(
    hybrid: Reference, options: dict[str, Any]
) -> None:
    cached = []
    for quantization in ("fp8_dynamic", "fp8", "fp8_dynamic"):
        with LLM(hybrid.directory, **options, quantization=quantization) as llm:
            cached.append(ask(llm, QUESTIONS[0], max_tokens=1)["num_cached_tokens"])
    assert cached == [0, 0, HIT]


@pytest.mark.parametrize("quantization", ["fp8", pytest.param("int4", marks=SLOW)])
def test_quantized_weights(hybrid: Reference, options: dict[str, Any], quantization: str) -> None:
    """They share nothing with the weights that they were rounded from."""
    outputs = []
    for changes in ({}, {"quantization": quantization}, {"quantization": quantization}):
        with LLM(hybrid.directory, **options, **changes) as llm:
            outputs.append(ask(llm, QUESTIONS[0], max_tokens=20))
    assert [output["num_cached_tokens"] for output in outputs] == [0, 0, HIT]
    assert outputs[2]["token_ids"] == outputs[1]["token_ids"]


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_long_prompt_leaves_states_on_its_way(restart: Callable[..., CheckedLLM], path: Path) -> None:
    """Another prompt that parts from it anywhere is read up to the last of these."""
    with restart(2 * BLOCK) as llm:
        hits(llm, QUESTIONS[0])
    assert len(states_below(path)) == 3
    with restart(2 * BLOCK) as llm:
        assert hits(llm, [*DOCUMENT[: 3 * BLOCK], *random_prompt(30, seed=1)]) == [2 * BLOCK]
        assert llm.stats()["num_disk_hit_tokens"] == 2 * BLOCK


def test_nothing_is_stored_after_the_last_state(restart: Callable[..., CheckedLLM], path: Path) -> None:
    """Not even when the engine is closed: an answer is of no use without the state at its end."""
    question = [*DOCUMENT, *random_prompt(200)]
    with restart() as llm:
        answer = llm.answer_and_check([question], max_tokens=50)[0]["token_ids"]
        assert len(llm.scheduler.kv.pool.index) == HIT // BLOCK + 1
    assert len(extents_below(path)) == HIT // BLOCK + 1, "and of these, one is a state"
    with restart() as llm:
        turn = [*question, *answer, 1, 2, 3]
        assert hits(llm, turn, turn) == [HIT, HIT + BLOCK]


@pytest.mark.parametrize("cache", ["all GPU, large blocks", "offload"])
def test_nothing_is_stored_after_the_last_state_in_its_block(
    restart: Callable[..., CheckedLLM], path: Path, cache: str
) -> None:
    """Regression: with offload and blocks above 256 tokens, the rest of the last state's block was stored."""
    changes = CACHES[cache] | {"kvcache_block_size": 2 * BLOCK}
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
    restart: Callable[..., CheckedLLM], path: Path, may_write: threading.Event
) -> None:
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


def test_experts(tmp_path: Path) -> None:
    reference = Reference(write_tiny_model(tmp_path, "qwen3_5_moe", num_layers=4, max_position_embeddings=2048))
    for cached in (0, 2 * BLOCK):
        with CheckedLLM(reference, kv_disk_path=str(tmp_path / "kv"), **cache_options(3)) as llm:
            assert hits(llm, DOCUMENT[: 2 * BLOCK + 1]) == [cached]
