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


def reuse_types() -> None:
    """Let the interpreter compute the attributes of a type once, instead of for every value of the type.

    Triton changes no type after it was made, and already shares types between values.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    init_block, init_tensor, find_numpy_type = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        shareable = isinstance(shape, (list, tl.tuple)) and not element_ty.is_ptr()
        sizes = [size.value if type(size) is tl.constexpr else size for size in shape] if shareable else []
        if not sizes or any(type(size) is not int for size in sizes):
            init_block(self, element_ty, shape)
            return
        key = (element_ty.name, *sizes)
        if key in block_types:
            self.__dict__ = block_types[key]
        else:
            init_block(self, element_ty, shape)
            block_types[key] = self.__dict__

    def init_tensor_once(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get("attributes_of_tensors")
        if attributes is None:
            init_tensor(self, handle, type)
            type.attributes_of_tensors = {name: getattr(self, name) for name in ("shape", "numel", "dtype")}
        else:
            self.__dict__.update(attributes, handle=handle, type=type)

    def numpy_type(given: Any) -> Any:
        name = given.scalar.name
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(given)
        return numpy_types[name]

    tl.block_type.__init__, tl.tensor.__init__ = init_block_once, init_tensor_once  # type: ignore[method-assign]
    interpreter._get_np_dtype = numpy_type


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
    reuse_types()
    keep_subnormal_bf16()
