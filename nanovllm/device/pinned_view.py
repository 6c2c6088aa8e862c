"""Pinned memory as a CUDA tensor, for kernels that read or write a few rows of it across the link.

A copy of the same rows would wait for its turn: the GPU's copy engine finishes the large copies that were enqueued on
other streams before it, 0.2 ms each.
"""

from typing import Any

import torch


class _CudaArray:
    """Bytes that torch takes for an array on the GPU: pinned memory has the same address there."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned  # the tensor made from this object keeps it alive
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (pinned.nbytes,),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }


def pinned_view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The memory of a contiguous pinned tensor as a tensor on the GPU. The two must be synchronized as if it were one
    tensor that two streams use.
    """
    assert pinned.is_contiguous() and pinned.is_pinned(), "the GPU can only reach contiguous pinned memory"
    view = torch.as_tensor(_CudaArray(pinned), device=device)
    assert view.data_ptr() == pinned.data_ptr(), "torch has copied pinned memory instead of viewing it"
    return view.view(pinned.dtype).view(pinned.shape)
