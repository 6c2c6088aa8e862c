"""The shape and size of the KV cache. Plain data, read by the managers, the planner and the runner."""

from dataclasses import dataclass

from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config


@dataclass(frozen=True)
class StagingSizes:
    """Sizes of the groups in which the keys of one layer are streamed."""

    group_tokens: int = 8192  # keys of one streamed partial attention, in whole blocks; at least one block
    num_groups: int = 3  # one is attended while the next ones are being filled


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Shape of the KV cache of one rank."""

    num_layers: int
    block_size: int  # tokens
    num_kv_heads: int  # on this rank
    head_dim: int
    itemsize: int  # bytes per element
    staging: StagingSizes = StagingSizes()

    @property
    def layer_block_bytes(self) -> int:
        """K and V of one block in one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers: 2 x layers x block_size x kv_heads x head_dim x itemsize."""
        return self.num_layers * self.layer_block_bytes

    @property
    def staging_group_blocks(self) -> int:
        """Number of blocks that are streamed and attended to together."""
        return max(1, self.staging.group_tokens // self.block_size)

    @property
    def staging_bytes(self) -> int:
        """Size of the staging groups. They hold blocks of a single layer, and all layers share them."""
        return self.staging.num_groups * self.staging_group_blocks * self.layer_block_bytes


@dataclass(frozen=True)
class KVCacheSizes:
    """Blocks on the GPU and, with offload, in CPU memory, as measured at start-up or set by the user."""

    num_gpu_blocks: int
    num_cpu_blocks: int = 0  # 0 without offload


def dtype_name(config: Config, model: ModelConfig) -> str:
    """The dtype of weights, activations and KV: "float32", "bfloat16" or "float16"."""
    return model.torch_dtype if config.dtype == "auto" else config.dtype


def kv_cache_spec(
    config: Config, model: ModelConfig, tp_size: int, staging: StagingSizes = StagingSizes()
) -> KVCacheSpec:
    """Shape of the KV cache on each of `tp_size` ranks."""
    return KVCacheSpec(
        num_layers=model.num_layers,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads // tp_size,
        head_dim=model.head_dim,
        itemsize=4 if dtype_name(config, model) == "float32" else 2,
        staging=staging,
    )
