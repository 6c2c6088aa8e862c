"""Runs tests of Triton kernels: in the interpreter on the CPU (kernels/test_interpreter.py), or on a GPU."""

import importlib.util
import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
on_device = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
