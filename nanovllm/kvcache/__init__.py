"""The KV cache: this package decides, in integers and without torch; nanovllm/offload copies the tensors.

The three main classes can be imported from here: BlockManager, HybridKVCacheManager and OffloadEngine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.kvcache.block_manager import BlockManager
    from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
    from nanovllm.offload.offload_engine import OffloadEngine

__all__ = ["BlockManager", "HybridKVCacheManager", "OffloadEngine"]


def __getattr__(name: str) -> Any:
    """Import on demand, so that the decisions can be imported without torch."""
    if name == "OffloadEngine":
        from nanovllm.offload.offload_engine import OffloadEngine

        return OffloadEngine
    if name == "BlockManager":
        from nanovllm.kvcache.block_manager import BlockManager

        return BlockManager
    if name == "HybridKVCacheManager":
        from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager

        return HybridKVCacheManager
    raise AttributeError(f"module 'nanovllm.kvcache' has no attribute {name!r}")
