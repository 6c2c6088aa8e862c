"""The benchmarks that users run, with tiny sizes and no GPU: each ends with a line of JSON whose keys have units."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_model import load_model, run_logits
from http_server import http_server

import bench
import bench_offload
import bench_serve
from benchmarks import gguf_shapes, real_model, small_gpu
from benchmarks.common import Ceilings
from nanovllm import LLM, AsyncLLM
from nanovllm.checkpoint.read_config import config_without_weights, load_config

CEILINGS = Ceilings("a laptop", 1e12, 1e11, 1e10)
UNIT = re.compile(
    r"(^num_\w+|^peak_\w+|_(tok_per_s|byte_per_s|request_per_s|s|ms|bytes|tokens|blocks|share|ratio\w*))$"
)


def last_line(capsys: pytest.CaptureFixture[str], args: argparse.Namespace) -> dict[str, Any]:
    """The result of a benchmark whose measured figures, unlike its options, have units in their keys."""
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for key, value in result.items():
        if isinstance(value, float) and not hasattr(args, key):
            assert UNIT.search(re.sub("_(min|max)$", "", key)), key
    return result


@pytest.fixture
def run_main(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """A function that runs a benchmark's `main` on a CPU, and returns its last line."""

    def run_main(module: Any, *options: str) -> dict[str, Any]:
        monkeypatch.setattr(module, "measure_ceilings", lambda: CEILINGS, raising=False)
        monkeypatch.setattr(module, "LLM", lambda model, **options: LLM(model, device="cpu", **options))
        for name in ("reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)
        argv = ["--model", str(model), "--max-model-len", "2048", "--load-format", "auto", "--runs", "1", *options]
        monkeypatch.setattr(sys, "argv", ["bench", *argv])
        module.main()
        return last_line(capsys, argparse.Namespace(model=0, runs=0, memory_gb=0))

    return run_main


def test_bench_small(run_main: Any) -> None:
    for options in (("--long",), ("--batch", "2", "--context", "100")):
        result = run_main(bench, *options)
        rates = {key: value for key, value in result.items() if key.endswith("decode_tok_per_s")}
        assert rates and all(value > 0 for value in rates.values())


def test_bench_offload_small(run_main: Any) -> None:
    sizes = ("--num-gpu-blocks", "3", "--block-size", "256", "--decode-tokens", "8", "--compare", "")
    result = run_main(bench_offload, *sizes)
    assert result["offload_prefill_tok_per_s"] > 0 and result["num_missing_blocks"] == 7 - (3 - 1)


def test_small_gpu_small(run_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=16 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a laptop's")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 16 * 2**30))
    result = run_main(small_gpu, "--memory-gb", "4")
    for key in ("prefill_tok_per_s", "decode_tok_per_s", "second_question_ttft_ratio"):
        assert result[key] > 0
    assert not result["chosen_enable_cpu_offload"] and result["held_gpu_bytes"] == 15 * 2**30


def test_bench_serve_small(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine, path = AsyncLLM(model, device="cpu", num_kvcache_blocks=16), tmp_path / "result.json"
    sizes = "--runs 2 --num-requests 6 --min-tokens 3 --max-tokens 8 --concurrency 2".split()
    with http_server(engine) as url:
        argv = ["bench_serve.py", "--base-url", url, *sizes, "--api-key", "secret", "--json", str(path)]
        monkeypatch.setattr(sys, "argv", argv)
        assert bench_serve.main() == 0
        result = last_line(capsys, bench_serve.parse())
    engine.close()
    assert json.loads(path.read_text()) == result and "secret" not in path.read_text()
    assert (result["num_requests"], result["num_errors"]) == (12, 0)
    assert result["output_tok_per_s_min"] <= result["output_tok_per_s"] <= result["output_tok_per_s_max"]


def test_gguf_shapes_have_a_header_that_can_be_read_and_blocks_that_can_be_loaded(tmp_path: Path) -> None:
    preset = config_without_weights("qwen3-0.6b")
    sizes = {"num_layers": 8, "layer_kinds": ("attention",) * 8, "vocab_size": 320, "hidden_size": 256}
    sizes |= {"intermediate_size": 256, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128}
    config = replace(preset, **sizes)  # type: ignore[arg-type]
    for with_data in (False, True):
        gguf_shapes.write(path := tmp_path / "x.gguf", config, with_data=with_data)
        found, _ = load_config(str(path))
        assert found.quantization is not None and sorted(found.gguf_types) == ["Q4_K", "Q6_K"]
        assert replace(found, quantization=None, gguf_types=(), eos_token_ids=config.eos_token_ids) == config
        for load_format in ("dummy", "auto") if with_data else ("dummy",):
            logits = run_logits(load_model(path, load_format=load_format), [1, 2, 3])
            assert logits.isfinite().all() and logits.std() > 0


def test_real_model_compares_auto_with_the_best_other_drafter() -> None:
    rates = {"off": 10.0, "resident": 30.0, "shadow, 4 bits": 40.0, "auto": 38.0}
    rows = [{"drafter": name, "task": "code", "temperature": 0.7, "tok_per_s": rate} for name, rate in rates.items()]
    rows.append({"drafter": "off", "task": "prose", "temperature": 0.7, "tok_per_s": 99.0})
    (share,) = real_model.shares_of_best(rows)
    assert share == {"task": "code", "temperature": 0.7, "best": "shadow, 4 bits", "auto_of_best": 0.95}
