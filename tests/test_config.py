"""Config and the shapes that follow from it. Bad values: test_engine.py, through LLM."""

import dataclasses

import pytest

from nanovllm.config import NUM_STAGING_GROUPS, STAGING_GROUP_TOKENS, Config, KVCacheSpec


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
        "enable_cpu_offload": False,
        "num_gpu_blocks": None,
        "num_cpu_blocks": None,
        "cpu_memory_gb": None,
        "chunked_prefill": True,
        "enable_prefix_caching": True,
        "attn_backend": "auto",
        "device": "auto",
        "dtype": "auto",
        "load_format": "auto",
        "hf_overrides": None,
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("options", "block_size"),
    [({}, 256), ({"enable_cpu_offload": True}, 4096), ({"enable_cpu_offload": True, "kvcache_block_size": 768}, 768)],
)
def test_block_size(options: dict[str, int], block_size: int) -> None:
    assert Config(model="m", **options).block_size == block_size  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("block_size", "group_blocks"), [(256, 32), (4096, 2), (5120, 1), (16384, 1)])
def test_staging_holds_a_few_groups_of_one_layer(block_size: int, group_blocks: int) -> None:
    spec = qwen3_06b(block_size)
    assert spec.staging_group_blocks == group_blocks
    assert group_blocks * block_size <= max(STAGING_GROUP_TOKENS, block_size)
    assert spec.staging_bytes == NUM_STAGING_GROUPS * group_blocks * spec.layer_block_bytes
