"""Running the tests of Triton kernels twice: in Triton's interpreter on the CPU, and compiled on a GPU.

TRITON_INTERPRET must be set before triton is first imported, so the interpreted run is a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
on_device = pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])


def interpreter_run(test: Callable[[], None]) -> Callable[[], None]:
    """Marks a test that calls `run_in_interpreter`. It takes as long as all the tests of its file."""
    test = pytest.mark.skipif(INTERPRETED, reason="already running in the interpreter")(test)
    return pytest.mark.timeout(1200)(test)


def run_in_interpreter(path: str, *options: str) -> None:
    """Run pytest on a file with the interpreter switched on. Raises AssertionError with its output if a test fails."""
    options = ("-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *options)
    command = [sys.executable, "-m", "pytest", "-q", path, *options]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr
