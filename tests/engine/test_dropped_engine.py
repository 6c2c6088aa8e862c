"""An engine that is dropped without `close`: its memory and its threads go with it."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams

ALL_GPU = {"num_kvcache_blocks": 20}
OFFLOAD = {"enable_cpu_offload": True, "num_cpu_blocks": 20, "num_gpu_blocks": 4}
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


def pools(llm: LLM) -> list[Any]:
    """Return weak references to the KV cache and its owners."""
    memory = llm.runner.memory
    caches = [*memory.cache] + ([] if memory.offload is None else [memory.offload.k_cache_cpu])
    return [weakref.ref(cache.untyped_storage()) for cache in caches] + [weakref.ref(memory), weakref.ref(llm.engine)]


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
    options, before = KINDS[kind], set(threading.enumerate())
    if "kv_disk_path" in options:
        options = options | {"kv_disk_path": str(tmp_path)}
    llm = LLM("demo", device="cpu", **options)
    llm.runner.freeze_objects()
    try:
        llm.generate([list(range(200)) * 3], SamplingParams(max_tokens=4), use_tqdm=False)
        held = pools(llm)
        del llm
        assert_threads_end(before)
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.unfreeze()
