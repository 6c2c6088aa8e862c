"""KernelTarget: what a GPU offers, as far as kernels and their configurations are chosen by it.

Everything that depends on the GPU's model asks `target_of`, so a benchmark or a test that replaces this one function
gets the choices of another GPU on the one it has.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class KernelTarget:
    capability: tuple[int, int]  # compute capability, major and minor
    shared_bytes: int  # shared memory that one program may have

    @property
    def has_dependent_launches(self) -> bool:
        """Whether a kernel may start before its predecessor has ended (kernels/pdl.py)."""
        return self.capability >= (9, 0)

    @property
    def has_shared_operands(self) -> bool:
        """Whether the matrix units read their operands from shared memory (wgmma, tcgen05), which TMA fills best.

        Elsewhere operands pass through registers, and cp.async fills shared memory as well.
        """
        return self.capability[0] in (9, 10)


_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
KNOWN_TARGETS = {  # CUDA Programming Guide, "Technical Specifications per Compute Capability"
    f"{major}.{minor}": KernelTarget((major, minor), kib * 1024) for (major, minor), kib in _SHARED_KIB.items()
}
INTERPRETER = KernelTarget((0, 0), 99 * 1024)  # Triton's, on a CPU


@cache
def target_of(device: torch.device) -> KernelTarget:
    """Hot: every launch. Always call it as `kernel_target.target_of`, so that it can be replaced."""
    if device.type != "cuda":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)  # not all of its fields are declared
    return KernelTarget((properties.major, properties.minor), properties.shared_memory_per_block_optin)
