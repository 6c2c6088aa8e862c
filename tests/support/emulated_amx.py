"""The variant for AMX with the matrix unit emulated, for processors that have AVX-512 with bf16 and no such unit."""

import hashlib
from pathlib import Path

from nanovllm.capabilities.cpu_attention import build

_HEADER = Path(__file__).with_name("emulated_tiles.h")
_AVX512 = next(variant for variant in build.INSTRUCTION_SETS if variant.name == "avx512_bf16")

# The name of the library has a hash of the flags, so the flags have a hash of the header.
_HASH = f"-DHEADER={hashlib.sha256(_HEADER.read_bytes()).hexdigest()[:8]}"
EMULATED_AMX = build.InstructionSet(
    "emulated_amx", (*_AVX512.compile_flags, "-include", str(_HEADER), _HASH), _AVX512.cpu_flags
)
