"""Options that are chosen: they work, are fast, change nothing that the user has given, and say why."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.capacity.fit import ChosenOptions, choose, fit_remedy
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.make_plan import make_plan
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.engine.setup import prepare

GIB = 2**30


def chosen(
    model: str, gpu: str = "RTX 4070", host_gib: int = 64, *, least_context: int = 0, **given: Any
) -> ChosenOptions:
    given = {"fit": None, **given}
    machine = Machine.gpu(host_gib * GIB, find_gpu(gpu))
    stored = config_without_weights(model)
    return choose(Config(model=model, **given), given, stored, machine, least_context=least_context)


def test_choice_reaches_95_percent_of_what_options_reach() -> None:
    """A plan without options had 0.52 of the rate of the best options."""
    plan = chosen("qwen2.5-7b-1m", quantization="int4", max_model_len=131_072).plan
    best = Config(
        model="qwen2.5-7b-1m",
        quantization="int4",
        max_model_len=131_072,
        enable_cpu_offload=True,
        gpu_memory_utilization=0.95,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
    )
    assert plan is not None
    rate = make_plan(best, plan.model, plan.machine).expected_decode_tok_per_s
    assert rate and plan.expected_decode_tok_per_s and plan.expected_decode_tok_per_s >= 0.95 * rate


def test_choice_is_the_defaults_where_everything_fits() -> None:
    choice = chosen("qwen3-0.6b", "H200")
    assert choice.config == Config(model="qwen3-0.6b", fit=None)
    assert choice.text.startswith("chose the defaults, because the GPU has room for the model and the KV of 40,960 ")


def test_choice_takes_smaller_steps_before_offload_and_offload_before_a_refusal() -> None:
    smaller = chosen("qwen3-8b", quantization="int4", max_model_len=32_768)
    assert not smaller.config.enable_cpu_offload and smaller.config.max_num_batched_tokens == 2048
    larger = chosen("qwen2.5-7b-1m", quantization="int4", max_model_len=131_072)
    assert larger.config.enable_cpu_offload and larger.config.max_model_len == 131_072
    assert "of 131,072 tokens" in larger.text and "faster: max_model_len=65536" in larger.text
    nothing = chosen("qwen2.5-7b-1m", max_model_len=131_072)  # 16 bits do not fit
    assert nothing.plan is None and nothing.config.gpu_memory_utilization == 0.95


def test_choice_never_changes_what_is_given() -> None:
    given = {"max_num_seqs": 512, "gpu_memory_utilization": 0.9, "max_num_batched_tokens": 16384}
    given |= {"enable_cpu_offload": False, "max_model_len": 65_536, "quantize_head": "int8", "quantization": "int4"}
    for fit in (None, True):
        choice = chosen("qwen2.5-7b-1m", fit=fit, **given)
        assert choice.config == Config(model="qwen2.5-7b-1m", fit=fit, **given)
    blocks = {"num_kvcache_blocks": 100, "max_model_len": 25_600}  # only without offload
    choice = chosen("qwen2.5-7b-1m", quantization="int4", **blocks)
    assert not choice.config.enable_cpu_offload and choice.config.num_kvcache_blocks == 100


def test_choice_of_a_context_is_the_longest_that_is_fast() -> None:
    choice = chosen("qwen2.5-7b-1m", "RTX 4090")
    assert choice.config.max_model_len == 262_144 and choice.config.quantization is None
    assert "a longer context takes over half of the CPU memory or decodes at less than 10 tok/s" in choice.text
    assert "quantization=int6 (" in choice.text  # as a hint
    for least, context in ((100_000, 262_144), (300_000, 300_000)):
        choice = chosen("qwen2.5-7b-1m", "RTX 4090", least_context=least)
        assert choice.plan is not None and choice.plan.context == context
    assert chosen("qwen3-0.6b", "RTX 4090").config.max_model_len is None  # the model's own


def test_choice_of_a_format_has_the_most_bits_that_fit_or_is_the_fastest() -> None:
    for context, format in ((32_768, "fp8"), (131_072, "int4")):
        choice = chosen("qwen2.5-7b-1m", fit=True, max_model_len=context)
        assert choice.config.quantization == format and choice.model.quantization is not None
        assert f"quantization={format}" in choice.text
    assert chosen("qwen3-8b", "H200", fit=True).config.quantization is None


def test_refusal_names_fit_if_it_chooses_a_format_that_fits() -> None:
    """Regression: only int4 was named, although formats of more bits fit."""

    def remedy(name: str, **options: Any) -> str:
        config, stored = Config(model=name, **options), config_without_weights(name)
        return fit_remedy(config, options, stored, Machine.gpu(64 * GIB, find_gpu("RTX 4070")))

    for fit in ({}, {"fit": None}):
        options = {"max_model_len": 32_768, **fit}
        assert remedy("qwen2.5-7b-1m", **options) == ", or use fit=True, which chooses quantization=fp8"
    assert remedy("qwen2.5-7b-1m", fit=True) == remedy("qwen2.5-7b-1m", fit=False) == ""
    assert remedy("qwen2.5-7b-1m", quantization="int8") == remedy("qwen3.5-27b") == remedy("qwen3-0.6b") == ""


@pytest.mark.slow
def test_choice_puts_experts_into_cpu_memory() -> None:
    choice = chosen("qwen3-30b-a3b", quantization="int4", max_model_len=32_768)
    assert choice.plan is not None and choice.plan.model.has_cpu_experts and not choice.config.enable_cpu_offload
    assert "of 48 layers" in choice.text


def test_choice_on_a_cpu_and_beyond_the_rope_changes_nothing(tmp_path: Path) -> None:
    stored = config_without_weights("qwen3-8b")
    for fit, machine, length in (
        (True, Machine.cpu(64 * GIB), None),
        (None, Machine.gpu(64 * GIB), 50_000),
        (False, Machine.gpu(GIB, find_gpu("RTX 4060")), None),
    ):
        config = Config(model="qwen3-8b", fit=fit, max_model_len=length)
        assert choose(config, (), stored, machine) == ChosenOptions(config=config, model=stored)


def test_llm_with_fit_chooses_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_model(tmp_path)
    with LLM(model, device="cpu", fit=True) as llm:
        assert llm.config == Config(model=str(model), device="cpu", fit=True)
    monkeypatch.setattr("nanovllm.engine.setup.find_machine", lambda config: Machine.gpu(64 * GIB))
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert prepare(model, {"device": "cpu", "fit": True}).config.fit
    assert any(record.message.startswith("chose the defaults") for record in caplog.records)
