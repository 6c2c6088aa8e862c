"""The variants of the compiled kernel: how each is compiled, and which of them this processor can run.

Standard library only: builds run where nothing else is installed.
"""

import platform
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "source"
MAIN_SOURCE = SOURCES / "attention.cpp"  # includes the others
CPUINFO = Path("/proc/cpuinfo")
BUILD_COMMAND = "python -m nanovllm.cpu_attention.build"


class InstructionSet(NamedTuple):
    name: str
    compile_flags: tuple[str, ...]
    cpu_flags: frozenset[str]  # as /proc/cpuinfo spells them
    is_x86: bool = True

    def library(self, folder: Path = FOLDER) -> Path:
        return folder / f"_attention_{self.name}.so"


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", *_AVX2)
_AVX2_CPU = frozenset("avx avx2 fma f16c".split())
_AVX512_CPU = _AVX2_CPU | frozenset("avx512f avx512bw avx512vl avx512dq avx512_bf16".split())

INSTRUCTION_SETS = (  # best first
    InstructionSet("amx", (*_AVX512, "-mamx-tile", "-mamx-bf16"), _AVX512_CPU | {"amx_tile", "amx_bf16"}),
    InstructionSet("avx512_bf16", _AVX512, _AVX512_CPU),
    InstructionSet("avx2", _AVX2, _AVX2_CPU),
    InstructionSet("portable", (), frozenset(), is_x86=False),
)


def source_hash(folder: Path = SOURCES) -> int:
    """FNV-1a, 64 bits, of all sources in the order of their names. A library says what it was built from."""
    value = 0xCBF29CE484222325
    for byte in b"".join(source.read_bytes() for source in sorted(folder.iterdir())):
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """The instructions of this processor. Empty where Linux does not list them under `flags`."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def why_not_runnable(variant: InstructionSet, flags: Collection[str]) -> str | None:
    """Why this processor cannot run the variant, built or not."""
    if variant.is_x86 and not is_x86():
        return f"{variant.name} is for x86-64, and this is {platform.machine()}"
    if missing := sorted(variant.cpu_flags.difference(flags)):
        return f"this processor lacks {', '.join(missing)}"
    return None


def why_unavailable(variant: InstructionSet, flags: Collection[str], folder: Path = FOLDER) -> str | None:
    """Why this variant cannot be loaded. Judged without loading it: a missing instruction would end the process."""
    if reason := why_not_runnable(variant, flags):
        return reason
    if not variant.library(folder).exists():
        return f"{variant.library(folder).name} has not been built; run {BUILD_COMMAND}"
    return None


def loadable(flags: Collection[str] | None = None, folder: Path = FOLDER) -> list[InstructionSet]:
    """The variants that this processor can run, best first."""
    flags = cpu_flags() if flags is None else flags
    return [variant for variant in INSTRUCTION_SETS if why_unavailable(variant, flags, folder) is None]
