"""Compiles Triton kernels for a GPU that need not be there: launches inside `compiling_for` compile and do not run.

The kernels are launched by their own host functions, so what is compiled is what would run: the same specialization,
tiles, warps and stages. The tensors may be small and on the CPU, because nothing reads them.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KernelTarget


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel, as far as tests look at it."""

    name: str
    constants: dict[str, Any]
    kernel: Any  # triton's CompiledKernel

    @property
    def shared_bytes(self) -> int:
        return int(self.kernel.metadata.shared)

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])

    @property
    def num_tile_loads(self) -> int:
        """Loads of two-dimensional tiles that pass through registers."""
        return len(re.findall(r"tt\.load .*: tensor<\d+x\d+x!tt\.ptr<", str(self.kernel.asm["ttgir"])))

    def stack_bytes(self) -> int:
        """Local memory of a thread: registers that were spilled."""
        usage = self._cuobjdump("-res-usage")
        found = re.search(r"STACK:(\d+)", usage)
        assert found is not None, f"no resource usage in {usage!r}"
        return int(found.group(1))

    def spills_in_loops(self) -> bool:
        """Whether a loop loads or stores local memory."""
        found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", self._cuobjdump("-sass"))
        assert found, "no instructions found"
        code = [(int(address, 16), instruction) for address, instruction in found]
        jumps = [(address, re.search(r"\bU?BRA\b.*\b0x([0-9a-f]+)", instruction)) for address, instruction in code]
        loops = [(int(jump[1], 16), address) for address, jump in jumps if jump is not None]
        spills = [address for address, instruction in code if re.search(r"\b(LDL|STL)\b", instruction)]
        return any(first <= address < last for first, last in loops for address in spills)

    def _cuobjdump(self, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def __str__(self) -> str:
        return f"{self.name} {self.constants}"


class _OfflineDriver:
    """As much of a driver as compiling asks for. The device's number only tells targets apart."""

    def __init__(self, target: KernelTarget) -> None:
        major, minor = target.capability
        self._arch = 10 * major + minor

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


@contextmanager
def compiling_for(target: KernelTarget) -> Iterator[list[Compiled]]:
    """A list to which every launch in here adds what it compiled."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        constants = {name: value for name, value in options.items() if isinstance(value, int)}
        compiled.append(Compiled(self.fn.__name__, constants, kernel))
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", _OfflineDriver(target))
        patch.setattr(triton.knobs.runtime, "override_arch", None)
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(kernel_target, "target_of", lambda device: target)
        yield compiled
