"""The variants of the compiled kernels: which variants this processor can run, and how to compile source/attention.cpp.

A library is compiled on first use (kernels.py) and cached in the user's cache folder, under a name that contains a hash
of the sources and the flags. `python -m nanovllm.capabilities.cpu_attention.build` compiles all variants, for instance
for a container image. The command may run where no other package is installed, so this module imports the standard
library only. All variants are for x86-64. On other processors, without AVX2, or without a compiler, the engine uses
TorchKernel.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from nanovllm.utils import user_cache

SOURCES = Path(__file__).parent / "source"
EXPERT_SOURCES = Path(__file__).parents[1] / "cpu_experts" / "source"
MAIN_SOURCE = SOURCES / "attention.cpp"  # includes all other sources
FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
CPUINFO = Path("/proc/cpuinfo")
BUILD_COMMAND = "python -m nanovllm.capabilities.cpu_attention.build"

logger = logging.getLogger("nanovllm")


class InstructionSet(NamedTuple):
    name: str
    compile_flags: tuple[str, ...]
    cpu_flags: frozenset[str]  # as /proc/cpuinfo spells them


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
    """List the instructions that the variant needs and that a processor with the flags `cpu` lacks."""
    return sorted(variant.cpu_flags - cpu)


def library_path(variant: InstructionSet) -> Path:
    """Return the path of the variant's library in the user's cache. The name has a hash of the sources and flags."""
    key = hashlib.sha256(" ".join((*FLAGS, *variant.compile_flags)).encode())
    for source in (*sorted(SOURCES.iterdir()), *sorted(EXPERT_SOURCES.iterdir())):
        key.update(source.read_bytes())
    return user_cache() / f"attention_{variant.name}_{key.hexdigest()[:16]}.so"


def cpu_flags() -> set[str]:
    """Return the instruction sets of this processor, or an empty set if Linux does not list them under `flags`."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def find_compiler() -> list[str] | None:
    """Return $CXX, which may contain options, or the first compiler on the path."""
    if command := shlex.split(os.environ.get("CXX", "")):
        return command if shutil.which(command[0]) else None
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


def compile_variant(variant: InstructionSet) -> str | None:
    """Compile one library into the cache. Returns the error and its remedy, or None if there is no error."""
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX") or ", ".join(COMPILERS)
        return f"there is no C++ compiler ({wanted}); install one, such as the package g++, or name one in CXX"
    library = library_path(variant)
    logger.info("attention on the CPU: compiling %s, once", library)
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            unfinished = Path(folder) / library.name
            command = [*compiler, *FLAGS, *variant.compile_flags, str(MAIN_SOURCE), "-o", str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode == 0:
                unfinished.replace(library)  # atomic: no process sees an unfinished library
                return None
    except OSError as error:
        return f"{variant.name} cannot be compiled: {error}; set XDG_CACHE_HOME to a folder that can be written"
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    problem = errors[0].strip() if errors else f"exit status {done.returncode}"
    return f"{variant.name} does not compile: {problem}; GCC 12 and newer compile it"


def main() -> int:
    """Compile every variant and print the results. Returns 1 if no variant can be compiled."""
    if not is_x86():
        print(f"cpu attention: nothing to build for {platform.machine()}; the torch kernel will be used")
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(compile_variant, INSTRUCTION_SETS))
    for variant, problem in zip(INSTRUCTION_SETS, problems, strict=True):
        print(f"cpu attention: {problem or library_path(variant)}")
    return int(all(problems))


if __name__ == "__main__":
    sys.exit(main())
