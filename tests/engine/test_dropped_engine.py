"""An engine that is dropped without `close`: its memory and its threads go with it."""

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.engine.setup import Internals

ALL_GPU = {"num_kvcache_blocks": 20}
OFFLOAD = {"enable_cpu_offload": True, "num_cpu_blocks": 20, "num_gpu_blocks": 4, "kvcache_block_size": 256}
PLAIN = OFFLOAD | {"speculation": "off"}
KINDS: dict[str, dict[str, Any]] = {
    "all GPU": ALL_GPU,
    "offload": PLAIN | {"cpu_attention": "off"},
    "offload, CPU attends": PLAIN | {"cpu_attention": "on"},
    "prompt lookup": ALL_GPU | {"speculation": "prompt_lookup"},
    "drafts": OFFLOAD | {"speculation": "resident"},
    "disk": ALL_GPU | {"kv_disk_path": ""},
    "disk and offload": PLAIN | {"kv_disk_path": ""},
    "disk, offload and a shadow": OFFLOAD | {"kv_disk_path": ""},  # its drafts are measured at the start for seconds
}
SLOW = ("disk, offload and a shadow",)
RECURRENT: dict[str, dict[str, Any]] = {
    "states": ALL_GPU,
    "states on disk": ALL_GPU | {"kv_disk_path": ""},
    "states and a draft head": ALL_GPU | {"speculation": "mtp"},
    "states, a draft head and offload": OFFLOAD | {"speculation": "mtp"},
}


def pools(llm: LLM) -> list[Any]:
    """Return weak references to the KV cache, what follows it, and its owners."""
    memory = llm.runner.memory
    owners = [memory, *memory.companions, llm.runner, llm.engine]
    caches = [*memory.cache] + ([] if memory.offload is None else [memory.offload.k_cache_cpu])
    return [weakref.ref(cache.untyped_storage()) for cache in caches] + [weakref.ref(owner) for owner in owners]


def assert_threads_end(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("nanovllm") or thread.name == "cpu-attention":
            thread.join(120)
            assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS])
def test_dropped_engine_releases_its_pool_and_its_threads(kind: str, tmp_path: Path) -> None:
    """The threads that stored and loaded blocks held the pool: 11 GiB of a GPU were lost with each such engine.

    A GPU's engine exempts its objects from the garbage collector, so counting references must be enough.
    """
    drop_and_check("demo", KINDS[kind], tmp_path)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"num_layers": 4, "max_position_embeddings": 2048, "with_mtp": True}
    return write_tiny_model(tmp_path_factory.mktemp("recurrent"), "qwen3_5", **sizes)


@pytest.mark.parametrize("kind", RECURRENT)
def test_dropped_engine_releases_its_states_and_its_draft_head(recurrent: Path, kind: str, tmp_path: Path) -> None:
    options = {"speculation": "off", "dtype": "float32"} | RECURRENT[kind]
    drop_and_check(str(recurrent), options, tmp_path, internals=Internals(always_guesses=True))


def drop_and_check(model: str, options: dict[str, Any], path: Path, internals: Internals = Internals()) -> None:
    before = set(threading.enumerate())
    if "kv_disk_path" in options:
        options = options | {"kv_disk_path": str(path)}
    llm = LLM(model, device="cpu", internals=internals, **options)
    llm.runner.freeze_objects()  # for good: unfrozen, all objects of torch would be in every later collection
    llm.generate([list(range(200)) * 3], SamplingParams(max_tokens=4), use_tqdm=False)
    held = pools(llm)
    del llm
    assert_threads_end(before)
    assert [each() for each in held] == [None] * len(held)
