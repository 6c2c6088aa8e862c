"""Compiles source/attention.cpp once for each instruction set: `python -m nanovllm.cpu_attention.build`.

The libraries are put beside this file. Nothing else needs to be installed. Installing the package does the same
(hatch_build.py). Without a compiler, or where it knows no such instructions, the engine uses torch instead.
"""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanovllm.cpu_attention.instruction_sets import (
    FOLDER,
    INSTRUCTION_SETS,
    MAIN_SOURCE,
    InstructionSet,
    is_x86,
    source_hash,
)

FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")


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
    """Compile every variant for this kind of machine, say what happened, and return the libraries."""
    compiler = find_compiler()
    if compiler is None:
        wanted = os.environ.get("CXX") or ", ".join(COMPILERS)
        print(f"cpu attention: no C++ compiler ({wanted}); nothing built, torch's kernel will be used", flush=True)
        return []
    variants = [variant for variant in INSTRUCTION_SETS if is_x86() or not variant.is_x86]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(lambda variant: compile_variant(compiler, variant, folder), variants))
    for variant, problem in zip(variants, problems, strict=True):
        print(f"cpu attention: {variant.name} {f'skipped: {problem}' if problem else 'built'}", flush=True)
    return [variant.library(folder) for variant, problem in zip(variants, problems, strict=True) if not problem]


if __name__ == "__main__":
    build()
    sys.exit(0)
