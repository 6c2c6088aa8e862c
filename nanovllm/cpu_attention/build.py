"""The variants of the compiled kernels: which this processor can run, and compiling source/attention.cpp for each.

`python -m nanovllm.cpu_attention.build` puts the libraries beside this file. Installing the package does the same
(hatch_build.py). Builds run where nothing else is installed, so this imports the standard library only. All variants
are for x86-64. On other processors, without AVX2, or without a compiler the engine uses torch's kernel.
"""

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "source"
MAIN_SOURCE = SOURCES / "attention.cpp"  # includes the others
FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
CPUINFO = Path("/proc/cpuinfo")
BUILD_COMMAND = "python -m nanovllm.cpu_attention.build"


class InstructionSet(NamedTuple):
    name: str
    compile_flags: tuple[str, ...]
    cpu_flags: frozenset[str]  # as /proc/cpuinfo spells them

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
)


def missing_flags(variant: InstructionSet, cpu: set[str]) -> list[str]:
    """The instructions that the variant needs and a processor with the flags `cpu` lacks."""
    return sorted(variant.cpu_flags - cpu)


def source_hash(folder: Path = SOURCES) -> int:
    """FNV-1a, 64 bits, of all sources in the order of their names. A library says what it was built from."""
    value = 0xCBF29CE484222325
    for byte in b"".join(source.read_bytes() for source in sorted(folder.iterdir())):
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def cpu_flags() -> set[str]:
    """The instructions of this processor. Empty where Linux does not list them under `flags`."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def find_compiler() -> list[str] | None:
    """$CXX, which may hold options, or the first compiler on the path."""
    if command := shlex.split(os.environ.get("CXX", "")):
        return command if shutil.which(command[0]) else None
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


def compile_variant(compiler: list[str], variant: InstructionSet, folder: Path = FOLDER) -> str | None:
    """Build one library. Returns None, or what went wrong, in which case no library is left."""
    library = variant.library(folder)
    unfinished = library.with_name(f"{library.name}.{os.getpid()}")
    command = [*compiler, *FLAGS, *variant.compile_flags, f"-DSOURCE_HASH={source_hash():#x}ull", str(MAIN_SOURCE)]
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, errors="replace")
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        library.unlink(missing_ok=True)  # an older one would belong to another source
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        return errors[0].strip() if errors else f"exit status {done.returncode}"
    unfinished.replace(library)  # processes that use the old one keep it
    return None


def build(folder: Path = FOLDER) -> list[Path]:
    """Compile every variant, say what happened, and return the libraries."""
    if not is_x86():
        print(f"cpu attention: nothing to build for {platform.machine()}; torch's kernel will be used", flush=True)
        return []
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX") or ", ".join(COMPILERS)
        print(f"cpu attention: no C++ compiler ({wanted}); nothing built, torch's kernel will be used", flush=True)
        return []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(lambda variant: compile_variant(compiler, variant, folder), INSTRUCTION_SETS))
    for variant, problem in zip(INSTRUCTION_SETS, problems, strict=True):
        print(f"cpu attention: {variant.name} {f'skipped: {problem}' if problem else 'built'}", flush=True)
    return [variant.library(folder) for variant, problem in zip(INSTRUCTION_SETS, problems, strict=True) if not problem]


if __name__ == "__main__":
    build()
