"""Runs tests of Triton kernels: in the interpreter on the CPU (kernels/test_interpreter.py), or on a GPU."""

import functools
import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
on_device = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])


def spare_the_interpreter() -> None:
    """Leave out work of the interpreter that has no effect, and that takes two thirds of the time of these tests.

    In every call of a function, it replaces the functions of triton.language that it has already replaced. And for
    every integer, it computes if the result overflows, which it asserts in debug mode only.
    """
    from triton.runtime import interpreter

    patch, builder = interpreter._patch_lang, interpreter.interpreter_builder

    @functools.cache
    def patch_once(fn: Any) -> Any:
        patch(fn)
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_once
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def keep_subnormal_bf16() -> None:
    """Let the interpreter convert subnormal numbers between fp32 and bf16, which it takes for others."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_exactly(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (str(source), str(target)) == ("bf16", "fp32"):
            return given.view("uint16").astype("uint32") << 16
        if (str(source), str(target), rounding) == ("fp32", "bf16", None):  # truncates, as `convert` does
            return (given.view("uint32") >> 16).astype("uint16")
        return convert(given, source, target, rounding)

    interpreter._convert_float = convert_exactly


if INTERPRETED and HAS_TRITON:
    spare_the_interpreter()
    keep_subnormal_bf16()
