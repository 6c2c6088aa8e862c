"""The variant for AMX with the matrix unit emulated, for processors that have AVX-512 with bf16 and no such unit."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from nanovllm.capabilities.cpu_attention import build
from nanovllm.capabilities.cpu_attention.job import CpuKernel
from nanovllm.capabilities.cpu_attention.kernels import CompiledKernel, choose_kernel
from nanovllm.errors import ConfigError

_HEADER = Path(__file__).with_name("emulated_tiles.h")
_AMX, _AVX512 = (next(it for it in build.INSTRUCTION_SETS if it.name == name) for name in ("amx", "avx512_bf16"))

# The name of the library has a hash of the flags, so the flags have a hash of the header.
_HASH = f"-DHEADER={hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:8]}"
EMULATED_AMX = build.InstructionSet(
    "emulated_amx", (*_AVX512.compile_flags, "-include", str(_HEADER), _HASH), _AVX512.cpu_flags
)


def open_kernel_named(name: str, cpus: Sequence[int], *, is_pinned: bool = True) -> CpuKernel:
    """Open one of KERNEL_NAMES or EMULATED_AMX. Raises ConfigError if it cannot run here, or need not be emulated."""
    if name != EMULATED_AMX.name:
        return choose_kernel(cpus, name, is_pinned=is_pinned)
    cpu = build.cpu_flags()
    if build.missing_flags(EMULATED_AMX, cpu) or not build.missing_flags(_AMX, cpu):
        raise ConfigError("this processor lacks AVX-512 with bf16, or has AMX")
    return CompiledKernel(EMULATED_AMX, cpus, is_pinned)
