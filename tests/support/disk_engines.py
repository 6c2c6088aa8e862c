"""Engines with KV on disk in tests: waiting for the disk, slowing it down, damaging files, and kills."""

import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checked_engine import CheckedLLM, Reference, cache_options, greedy
from dense_model import random_prompt
from integrity import check_scheduler
from server_process import PRELOADED

from nanovllm import LLM
from nanovllm.capabilities.disk.disk_moves import DISK_GRAIN_TOKENS
from nanovllm.capabilities.disk.store import check_extent, list_extents

BLOCK = DISK_GRAIN_TOKENS
DOCUMENT = random_prompt(5 * BLOCK + 17, seed=5)
QUESTIONS = [[*DOCUMENT, *random_prompt(9, seed=i)] for i in range(3)]  # each ends in the document's last block
HIT = 5 * BLOCK
CACHES: dict[str, dict[str, Any]] = {
    "all GPU": cache_options(None),
    "all GPU, large blocks": cache_options(None) | {"kvcache_block_size": 2 * BLOCK, "num_kvcache_blocks": 20},
    "offload": cache_options(3),
    "offload, CPU attends": cache_options(3) | {"cpu_attention": "on"},
}


def ask(llm: LLM, prompt: Any, max_tokens: int = 6) -> Any:
    return llm.generate([prompt], greedy(max_tokens), use_tqdm=False)[0]


def forget_all(llm: LLM) -> None:
    """Empty the prefix cache in memory."""
    pool = llm.scheduler.kv.pool
    for block_id in list(pool.cached_ids):
        llm.scheduler.kv._empty(pool.blocks[block_id])
        pool.discard(pool.blocks[block_id])


def wait_until_stored(llm: LLM) -> None:
    disk = llm.scheduler.store
    assert disk is not None
    while disk.num_pending:
        time.sleep(0.001)


def extents_below(path: Path) -> list[Path]:
    return sorted(extent.path for extent in list_extents(path).extents)


def states_below(path: Path) -> list[Path]:
    """Return the files of states, the latest place first."""
    found = [extent for extent in list_extents(path).extents if extent.is_state]
    return [extent.path for extent in sorted(found, key=lambda extent: extent.used_s)]


def slow_reads(llm: LLM) -> threading.Event:
    """Let reads wait for the event that is returned."""
    may_read = threading.Event()
    store = llm.runner.store.store
    read = store.read

    def slow_read(*args: Any) -> bool:
        may_read.wait()
        return bool(read(*args))

    store.read = slow_read
    return may_read


def damage(file: Path, rng: random.Random) -> None:
    """Damage a file at any place of the header or the payload, replace it, or remove it."""
    data = bytearray(file.read_bytes() or b"\0")  # it may have been damaged before
    start = rng.choice([rng.randrange(min(4096, len(data))), rng.randrange(len(data))])
    match rng.randrange(7):
        case 0 | 1:
            data[start] ^= 1 << rng.randrange(8)
        case 2:
            data[start : start + 4096] = rng.randbytes(len(data[start : start + 4096]))
        case 3:
            del data[start:]
        case 4:
            file.unlink()
            return
        case 5:
            other = rng.choice([each for each in file.parent.glob("*.kv") if each != file] or [file])
            data = bytearray(other.read_bytes()) if other != file else data[:-1]
        case 6:
            data += b"\0"
    file.write_bytes(data)


def ask_amid_damage(llm: LLM, path: Path, questions: Sequence[Any], num_files: int) -> set[int]:
    """Ask at random while `num_files` files are damaged. No answer may change.

    Returns the different numbers of tokens that were reused.
    """
    rng, num_damaged, num_hits = random.Random(num_files), 0, set()
    expected = [ask(llm, question)["token_ids"] for question in questions]
    while num_damaged < num_files:
        wait_until_stored(llm)
        forget_all(llm)
        files = extents_below(path)
        for file in rng.sample(files, min(len(files), rng.choice([1, 1, 2, 5]))):
            damage(file, rng)
            num_damaged += 1
        i = rng.randrange(len(questions))
        output = ask(llm, questions[i])
        assert output["token_ids"] == expected[i] and output["finish_reason"] == "length"
        num_hits.add(output["num_cached_tokens"])
        llm.runner.store.store.refresh()
    check_scheduler(llm.scheduler)
    return num_hits


def ask_until_killed(model: Path, path: Path, is_ready: Any) -> None:
    with LLM(model, device="cpu", dtype="float32", num_kvcache_blocks=12, kv_disk_path=str(path)) as llm:
        is_ready.set()
        while True:
            ask(llm, random_prompt(random.randrange(300, 1500), seed=random.randrange(6)))


def hits_of_killed_engines(reference: Reference, path: Path, options: dict[str, Any]) -> int:
    """Two engines at a time ask at random and are killed; what they leave gives the logits of transformers.

    Returns how many tokens were reused. The engines come from a fork server that has imported torch once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    rng = random.Random(0)
    hits = 0
    for _ in range(10):
        ready = [context.Event() for _ in range(2)]
        engines = [context.Process(target=ask_until_killed, args=(reference.directory, path, each)) for each in ready]
        for engine in engines:
            engine.start()
        assert all(each.wait(60) for each in ready)
        time.sleep(rng.random())
        for engine in engines:
            engine.kill()
            engine.join()
            assert engine.exitcode == -signal.SIGKILL
        assert [check_extent(file) for file in extents_below(path)]
        with CheckedLLM(reference, **options) as llm:
            for seed in range(6):
                hits += llm.answer_and_check([random_prompt(1100, seed=seed)])[0]["num_cached_tokens"]
            assert llm.stats()["num_disk_misses"] == 0
    return hits
