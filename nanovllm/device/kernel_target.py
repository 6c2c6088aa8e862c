"""KernelTarget: the properties of a GPU by which kernels and their configurations are chosen.

Everything that depends on the GPU model calls `target_of`. To use the choices for another GPU, a benchmark or a test
replaces this one function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class KernelTarget:
    capability: tuple[int, int]  # compute capability, major and minor
    shared_bytes: int  # shared memory that one program can use
    num_sms: int  # multiprocessors

    @property
    def has_dependent_launches(self) -> bool:
        """True if a kernel may start before its predecessor has ended (kernels/launch.py)."""
        return self.capability >= (9, 0)

    @property
    def has_shared_operands(self) -> bool:
        """True if the matrix units read their operands from shared memory (wgmma, tcgen05), which TMA fills fastest.

        On other GPUs operands pass through registers, and cp.async fills shared memory just as fast.
        """
        return self.capability[0] in (9, 10)


# CUDA Programming Guide, "Technical Specifications per Compute Capability"
_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
# A100, RTX 3090, RTX 4090, H100, B200, RTX 5090
_NUM_SMS = {(8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
KNOWN_TARGETS = {
    f"{major}.{minor}": KernelTarget((major, minor), kib * 1024, _NUM_SMS[major, minor])
    for (major, minor), kib in _SHARED_KIB.items()
}
INTERPRETER = KernelTarget((0, 0), 99 * 1024, 4)  # Triton's interpreter on a CPU


@cache
def target_of(device: torch.device) -> KernelTarget:
    """Return the target of a device. Call `kernel_target.target_of`, so that it can be replaced. Hot: every launch."""
    if device.type != "cuda":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)  # torch does not declare all of its fields
    capability = properties.major, properties.minor
    return KernelTarget(capability, properties.shared_memory_per_block_optin, properties.multi_processor_count)
