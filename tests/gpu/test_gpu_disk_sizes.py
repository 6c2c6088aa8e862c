"""KV on disk at the sizes of real models, each case in a separate process, and so with a separate allocator.

A pool that fits into one of the pieces of 20 MiB from which torch maps expandable segments says nothing about others.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from disk_restart import Result

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SCRIPT = Path(__file__).parents[1] / "support" / "disk_restart.py"
PROMPT_TOKENS, HIT = 6000, 5888
FP32 = {"device": "cuda", "dtype": "float32", "enforce_eager": True, "max_model_len": 8192, "max_num_seqs": 4}
BF16 = FP32 | {"dtype": "bfloat16"}
OFFLOAD = {"enable_cpu_offload": True, "cpu_attention": "off"}
SMALL_SLOTS = OFFLOAD | {"kvcache_block_size": 256, "num_cpu_blocks": 40, "num_gpu_blocks": 30}
LARGE_SLOTS = OFFLOAD | {"kvcache_block_size": 4096, "num_cpu_blocks": 4, "num_gpu_blocks": 3}
NARROW = {"hf_overrides": {"hidden_size": 512, "intermediate_size": 512}}  # the sizes of KV and states stay


def pools(options: dict[str, Any], *sizes: int) -> list[dict[str, Any]]:
    return [options | {"num_kvcache_blocks": size} for size in sizes]


# model, engines, PYTORCH_CUDA_ALLOC_CONF; None: what an engine chooses by itself, which are expandable segments, too
CASES: dict[str, tuple[str, list[dict[str, Any]], str | None]] = {
    "30 and 100 blocks": ("qwen3-0.6b", pools(FP32, 30, 100, 30), None),
    "400 blocks": ("qwen3-0.6b", pools(BF16, 400, 400), None),
    "with graphs": ("qwen3-0.6b", pools(FP32 | {"enforce_eager": False}, 30, 100), None),
    "expandable": ("qwen3-0.6b", pools(FP32, 30, 100, 30), "expandable_segments:True"),
    "not expandable": ("qwen3-0.6b", pools(FP32, 30, 100, 30), "expandable_segments:False"),
    "offload, small slots": ("qwen3-0.6b", [FP32 | SMALL_SLOTS, FP32 | SMALL_SLOTS], None),
    "offload, large slots": ("qwen3-0.6b", [FP32 | LARGE_SLOTS, FP32 | LARGE_SLOTS], None),
    "offload, graphs": ("qwen3-0.6b", [FP32 | SMALL_SLOTS | {"enforce_eager": False}] * 2, None),
    "recurrent": ("qwen3.5-9b", pools(FP32 | NARROW, 30, 100), None),
    "recurrent, offload": ("qwen3.5-9b", [FP32 | SMALL_SLOTS | NARROW] * 2, None),
}


def run(model: str, engines: list[dict[str, Any]], allocator: str | None, path: Path) -> list[Result]:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if allocator is not None:
        environment[names[0]] = allocator
    given = {"model": model, "path": str(path), "prompt_tokens": PROMPT_TOKENS, "engines": engines}
    ran = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(given)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [Result(*result) for result in json.loads(ran.stdout.splitlines()[-1])]


@pytest.mark.parametrize("case", CASES)
def test_restarted_engine_of_real_size_loads_what_was_stored(case: str, tmp_path: Path) -> None:
    """Every store and every load of a pool on the GPU failed: the driver refused to copy 28 rows of 512 KiB at once."""
    results = run(*CASES[case], tmp_path)
    for i, result in enumerate(results):
        assert (result.num_failures, result.num_misses) == (0, 0), f"engine {i}: {result.num_failures} failures"
        assert result.num_stored_bytes > 0, f"engine {i} stored nothing"
    if CASES[case][0] == "qwen3-0.6b" and "enable_cpu_offload" not in CASES[case][1][0]:
        itemsize = 4 if CASES[case][1][0]["dtype"] == "float32" else 2
        assert results[0].num_stored_bytes == HIT * 2 * 28 * 8 * 128 * itemsize, "23 extents of 256 tokens"
    # With offload, the tokens of a block that is not full may be on the GPU only, and are not stored
    hit = PROMPT_TOKENS // 4096 * 4096 if case == "offload, large slots" else HIT
    for i, (before, after) in enumerate(pairwise(results)):
        computed, loaded = before.answers[-1], after.answers[0]
        token_ids, logprobs, num_cached_tokens, sums = loaded
        assert (computed[2], num_cached_tokens) == (0, hit), f"engine {i + 1} found {num_cached_tokens} tokens"
        assert sums == computed[3], f"engine {i + 1} has other K and V than engine {i} computed"
        if "float32" in str(CASES[case][1][i]["dtype"]):
            assert token_ids == computed[0]
            assert logprobs == pytest.approx(computed[1], abs=1e-3)
