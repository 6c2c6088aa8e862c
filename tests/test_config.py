"""Config and the shapes that follow from it. What else a start refuses: tests/engine/test_engine.py."""

import dataclasses
import math
from typing import Any

import pytest

from nanovllm.config import DEFAULT_GUESSES, MAX_GUESSES, Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES, MAX_VERIFYING_ROWS

OFFLOAD = {"enable_cpu_offload": True}
EXPERTS = {"enable_expert_offload": True}
NAN, INF, HUGE = math.nan, math.inf, 10**400
BAD_DEVICES = ("cuda:abc", "cuda:-1", "cuda:", "cuda:1.5", "cuda:100", "cuda:01", "cuda: 1", "cuda:²", "CPU", "")


def test_defaults_are_those_of_the_specification() -> None:
    assert dataclasses.asdict(Config(model="m")) == {
        "model": "m",
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 512,
        "max_model_len": None,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "kvcache_block_size": None,
        "num_kvcache_blocks": -1,
        "kv_disk_path": None,
        "kv_disk_gb": None,
        "enable_cpu_offload": False,
        "num_gpu_blocks": None,
        "num_cpu_blocks": None,
        "cpu_memory_gb": None,
        "cpu_attention": "auto",
        "cpu_attention_threads": None,
        "enable_expert_offload": False,
        "num_gpu_expert_layers": None,
        "gpu_expert_memory_gb": None,
        "chunked_prefill": True,
        "max_step_ms": None,
        "speculation": None,
        "num_speculative_tokens": None,
        "shadow_bits": None,
        "shadow_memory_gb": None,
        "enable_prefix_caching": True,
        "attn_backend": "auto",
        "device": "auto",
        "dtype": "auto",
        "load_format": "auto",
        "fit": False,
        "quantization": None,
        "quantize_head": None,
        "embedding_on_cpu": "auto",
        "hf_overrides": None,
        "generation_config": "auto",
        "skip_tokenizer_init": False,
        "seed": 0,
    }


def test_block_size() -> None:
    for options, block_size in (
        ({}, 256),
        (OFFLOAD, 256),  # regression: 4096, which left room for 20 short sequences
        (OFFLOAD | {"num_gpu_blocks": 8}, 4096),
        (OFFLOAD | {"num_cpu_blocks": 8}, 256),
        (OFFLOAD | {"kvcache_block_size": 768}, 768),
        (OFFLOAD | {"kvcache_block_size": 256, "num_gpu_blocks": 8}, 256),
    ):
        assert Config(model="m", **options).block_size == block_size, options  # type: ignore[arg-type]


def test_config_is_frozen_and_keyword_only() -> None:
    config = Config(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("m")  # type: ignore[misc]


def test_integers_pass_for_floats() -> None:
    config = Config(model="m", gpu_memory_utilization=1, enable_cpu_offload=True, cpu_memory_gb=4)
    assert (config.gpu_memory_utilization, config.cpu_memory_gb) == (1, 4)


def qwen3_06b(block_size: int) -> KVCacheSpec:
    return KVCacheSpec(num_layers=28, block_size=block_size, num_kv_heads=8, head_dim=128, itemsize=2)


def test_block_bytes_of_qwen3_06b_at_256_tokens_are_28_mib() -> None:
    assert qwen3_06b(256).block_bytes == 28 * 2**20
    assert qwen3_06b(256).layer_block_bytes == 2**20


def test_staging_holds_a_few_groups_of_one_layer() -> None:
    for block_size, group_blocks in ((256, 32), (4096, 2), (5120, 1), (16384, 1)):
        spec = qwen3_06b(block_size)
        assert spec.staging_group_blocks == group_blocks
        assert group_blocks * block_size <= max(spec.staging.group_tokens, block_size)
        assert spec.staging_bytes == spec.staging.num_groups * group_blocks * spec.layer_block_bytes


def test_value_out_of_range_is_refused_with_the_limit() -> None:
    """Regression: an invalid device string of torch, OverflowError, and for model='' the current directory."""
    at_most_int32 = "=2147483648 must be [12] or more, at most 2147483647"
    is_bad_device = "' is unknown; choose auto, cpu, cuda or cuda:N, where N is 0 to 99"
    bad: list[tuple[dict[str, Any], str]] = [
        ({"model": ""}, r"model='' must be a directory \('\.' for the current one\), a GGUF file, a hub name"),
        *(({"device": device}, f"device='{device}{is_bad_device}") for device in BAD_DEVICES),
        *(
            ({name: 2**31}, name + at_most_int32)
            for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "kvcache_block_size")
        ),
        *((OFFLOAD | {name: 2**31}, name + at_most_int32) for name in ("num_gpu_blocks", "num_cpu_blocks")),
        ({"num_kvcache_blocks": 10**30}, "num_kvcache_blocks=10{30} must be at most 2147483647"),
        ({"num_kvcache_blocks": -2}, "num_kvcache_blocks=-2 must be 1 or more, or -1"),
        *((OFFLOAD | {"cpu_memory_gb": gb}, "cpu_memory_gb=.* at most 1073741824") for gb in (0, NAN, INF, HUGE)),
        *(({"gpu_memory_utilization": share}, "utilization=.* at most 1") for share in (0, 1.5, NAN, INF, HUGE)),
        *(({name: 0}, f"{name}=0 must be 1 or more") for name in ("max_model_len", "max_num_seqs")),
        *(({name: 0}, f"{name}=0 must be 1 or more") for name in ("kvcache_block_size", "num_kvcache_blocks")),
        *(({"tensor_parallel_size": n}, f"tensor_parallel_size={n} must be between 1 and 8") for n in (0, 9)),
        *(({"num_speculative_tokens": n}, f"speculative_tokens={n} must be between 1 and 63") for n in (0, -1, 64)),
        *(({"speculation": "shadow", "shadow_bits": n}, f"shadow_bits={n} must be between 3 and 4") for n in (2, 5)),
        ({"speculation": "shadow", "shadow_memory_gb": 0.0}, "shadow_memory_gb=0.0 must be above 0"),
        ({"speculation": "auto", "shadow_bits": 4}, "shadow_bits applies only to speculation='shadow' and"),
        (OFFLOAD | {"speculation": "resident", "shadow_memory_gb": 2.0}, "shadow_memory_gb applies only to"),
        *((OFFLOAD | {"num_gpu_blocks": n}, f"num_gpu_blocks={n} must be 2 or more") for n in (1, -3)),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1 must be 1 or more"),
        ({"kvcache_block_size": 300}, "kvcache_block_size=300 must be a multiple of 256; try 512"),
        *(({"max_step_ms": value}, "max_step_ms=.* must be between 1 and 3600000") for value in (0.5, NAN, HUGE)),
        ({"seed": 2**63}, "seed=9223372036854775808 must be between"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809 must be between"),
    ]
    for options, message in bad:
        with pytest.raises(ConfigError, match=message):
            Config(**({"model": "m"} | options))


def test_value_of_a_wrong_type_or_that_contradicts_others_is_refused_with_the_remedy() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        *(({"max_num_seqs": value}, f"max_num_seqs={value!r} must be an integer") for value in ("4", True)),
        ({"chunked_prefill": 1}, "chunked_prefill=1 must be True or False"),
        ({"hf_overrides": "{}"}, "hf_overrides='{}' must be a dict or None"),
        ({"device": "tpu"}, "device='tpu' is unknown; choose auto, cpu, cuda"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; choose one of auto, float32"),
        ({"load_format": "pickle"}, "load_format='pickle' is unknown; choose one of"),
        ({"attn_backend": "magic"}, "attn_backend='magic' is unknown; choose one of auto, flash"),
        ({"speculation": "resident"}, "speculation='resident' drafts .* use 'prompt_lookup' or 'auto'"),
        ({"num_gpu_blocks": 4}, "num_gpu_blocks applies only to CPU offload; add enable_cpu_offload=True"),
        (OFFLOAD | {"num_kvcache_blocks": 4}, "applies only without CPU offload; .*use num_gpu_blocks"),
        (OFFLOAD | {"cpu_memory_gb": 1.0, "num_cpu_blocks": 4}, "both set the size of the CPU pool; give one of them"),
        (
            {"num_gpu_expert_layers": 4},
            "num_gpu_expert_layers applies only to experts .* add enable_expert_offload=True",
        ),
        ({"enable_expert_offload": None, "gpu_expert_memory_gb": 4}, "gpu_expert_memory_gb applies only to experts"),
        (
            EXPERTS | {"num_gpu_expert_layers": 4, "gpu_expert_memory_gb": 1},
            "both limit the experts on the GPU; give one",
        ),
        (EXPERTS | {"num_gpu_expert_layers": -1}, "num_gpu_expert_layers=-1 must be 0 or more"),
        ({"enable_expert_offload": "auto"}, "enable_expert_offload='auto' must be True or False or None"),
        ({"cpu_attention_threads": 4}, "=True or enable_expert_offload=True"),
        (
            OFFLOAD | {"cpu_attention_threads": 4, "cpu_attention": "off"},
            "no effect with cpu_attention='off' unless exp",
        ),
    ]
    for options, message in bad:
        with pytest.raises(ConfigError, match=message):
            Config(**({"model": "m"} | options))


def test_threads_are_for_attention_or_experts() -> None:
    for options in (OFFLOAD, EXPERTS, OFFLOAD | EXPERTS | {"cpu_attention": "off"}):
        assert Config(model="m", cpu_attention_threads=4, **options).cpu_attention_threads == 4  # type: ignore[arg-type]


def test_device_that_may_exist_is_kept() -> None:
    for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:7", "cuda:10"):
        assert Config(model="m", device=device).device == device


def test_a_sequence_with_all_its_guesses_fits_a_step() -> None:
    """By default also the decode kernel."""
    assert 1 + MAX_GUESSES == MAX_VERIFYING_ROWS and 1 + DEFAULT_GUESSES == MAX_DECODE_QUERIES
    for name, most, with_offload in (
        (None, 0, MAX_GUESSES),
        ("off", 0, 0),
        ("prompt_lookup", DEFAULT_GUESSES, DEFAULT_GUESSES),
        ("mtp", DEFAULT_GUESSES, DEFAULT_GUESSES),
        ("auto", DEFAULT_GUESSES, MAX_GUESSES),
        ("shadow", MAX_GUESSES, MAX_GUESSES),
    ):
        assert Config(model="m", speculation=name).max_guesses == most
        assert Config(model="m", speculation=name, **OFFLOAD).max_guesses == with_offload
