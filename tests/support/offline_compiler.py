"""Compiles Triton kernels for a GPU that need not be there: launches inside `compiling_for` compile and do not run.

The kernels are launched by their own host functions, so what is compiled is what would run: the same specialization,
tiles, warps and stages. The tensors may be small and on the CPU, because nothing reads them.
"""

import itertools
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

    def num_spills_in_loops(self) -> int:
        """Count the instructions in loops that load or store a spilled register.

        Follow the jumps: an instruction is in a loop if it can be reached from itself. Rarely taken branches stand at
        the end of the code and jump back, so a jump to a lower address need not close a loop.
        """
        if self.stack_bytes() == 0:
            return 0
        found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", self._cuobjdump("-sass"))
        assert found, "no instructions found"
        code = {int(address, 16): instruction for address, instruction in found}
        following = dict(itertools.pairwise(code))
        successors = {address: _successors(code[address], following.get(address)) for address in code}
        spills = [address for address in code if re.search(r"\b(LDL|STL)\b", code[address])]
        return sum(_reaches_itself(address, successors) for address in spills)

    def _cuobjdump(self, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def __str__(self) -> str:
        return f"{self.name} {self.constants}"


def _successors(instruction: str, following: int | None) -> list[int]:
    """Addresses of the instructions that may run after one of SASS, such as `@!P0 BRA 0x40` or `BRA.U UP1, 0x40`."""
    found = re.search(r"^(?:@\S+ +)?([A-Z0-9]+)", instruction)
    assert found is not None, f"cannot read {instruction!r}"
    name, target = found[1], re.search(r"\b0x([0-9a-f]+) *$", instruction)
    successors = []
    if name in ("BRA", "CALL"):
        assert target is not None, f"no target in {instruction!r}"
        successors.append(int(target[1], 16))
    is_conditional = "@" in instruction or "," in instruction
    if following is not None and (is_conditional or name not in ("BRA", "EXIT", "RET")):
        successors.append(following)
    return successors


def _reaches_itself(address: int, successors: dict[int, list[int]]) -> bool:
    reached, ahead = set(), list(successors[address])
    while ahead:
        if (current := ahead.pop()) not in reached:
            reached.add(current)
            ahead += successors.get(current, [])
    return address in reached


class _OfflineDriver:
    """The part of a driver that compiling asks for. The device's number only tells targets apart."""

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
