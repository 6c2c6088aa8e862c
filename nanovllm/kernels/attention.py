"""The attention kernels. Import this module lazily: a machine without triton runs the torch backend.

Every function also runs on CPU tensors when TRITON_INTERPRET=1 is set before triton is imported.
"""

from nanovllm.kernels.configs import DecodeConfig, PrefillConfig
from nanovllm.kernels.decode import paged_decode, plan_num_splits
from nanovllm.kernels.merge import merge_into
from nanovllm.kernels.prefill import paged_prefill

__all__ = ["DecodeConfig", "PrefillConfig", "merge_into", "paged_decode", "paged_prefill", "plan_num_splits"]
