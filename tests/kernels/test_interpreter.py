"""Runs the tests of Triton's kernels in its interpreter, on the CPU. On a GPU the same tests run compiled.

TRITON_INTERPRET must be set before triton is imported, so each interpreted run is a process of its own.
"""

import os
import subprocess
import sys

import pytest
from interpreter import INTERPRETED, needs_triton
from tiers import RUNS_ALL

FILES = [
    "kernels/test_triton_kernels.py",
    "kernels/test_decode_queries.py",
    "kernels/test_windows.py",
    "kernels/test_window_rows.py",
    "kernels/test_small_linear.py",
    "kernels/test_packed_linear.py",
    "kernels/test_gguf_kernels.py",
    "kernels/test_biased_experts.py",
    "kernels/test_vocabulary_kernels.py",
    "kernels/test_shadow_kernels.py",
    "kernels/test_delta_net.py",
    "kernels/test_edit_kernels.py",
    "kernels/test_peer_sum.py",
    "kernels/test_expert_exchange.py",
    "kernels/test_staged_experts.py",
    "capabilities/cpu_experts/test_staging.py",
    "layers/test_sampler_filters.py",
    "layers/test_sampler_noise.py",
]
pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETED, reason="already running in the interpreter")]


def run_in_interpreter(files: list[str], *options: str) -> None:
    """Run the tests that have "cpu" among their parameters. Raises AssertionError with pytest's output if one fails."""
    tests = os.path.dirname(os.path.dirname(__file__))
    options = ("-k", "cpu", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *options)
    command = [sys.executable, "-m", "pytest", "-q", *(os.path.join(tests, file) for file in files), *options]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(RUNS_ALL, reason="the next test runs all cases")
def test_interpreter_runs_a_case_of_every_kernel() -> None:
    run_in_interpreter(FILES, "--one-case")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(3))
def test_interpreter_runs_all_cases(part: int) -> None:
    run_in_interpreter(FILES[part::3], "-m", "slow or not slow")
