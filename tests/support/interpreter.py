"""Runs tests of Triton kernels: in the interpreter on the CPU (kernels/test_interpreter.py), or on a GPU."""

import functools
import importlib.util
import os
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
on_device = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])


def patch_language_once() -> None:
    """Let the interpreter replace the functions of triton.language once for each kernel and each function that kernels
    call. It does so in every call, which took half of the time of these tests.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def patch_once(fn: Any) -> Any:
        patch(fn)
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_once


if INTERPRETED and HAS_TRITON:
    patch_language_once()
