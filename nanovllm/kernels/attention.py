"""The attention kernels. Import this module lazily: a machine without triton runs the torch backend.

Every function also runs on CPU tensors when TRITON_INTERPRET=1 is set before triton is imported.
"""

from nanovllm.kernels.configs import DecodeConfig, PrefillConfig
from nanovllm.kernels.decode import paged_decode, tile_rows
from nanovllm.kernels.merge import merge_into
from nanovllm.kernels.prefill import launch_prefill_variants, paged_prefill
from nanovllm.kernels.prefill_splits import max_split_bytes, plan_prefill_splits
from nanovllm.kernels.splits import launch_merge_variants, plan_num_splits

__all__ = [
    "DecodeConfig",
    "PrefillConfig",
    "launch_merge_variants",
    "launch_prefill_variants",
    "max_split_bytes",
    "merge_into",
    "paged_decode",
    "paged_prefill",
    "plan_num_splits",
    "plan_prefill_splits",
    "tile_rows",
]
