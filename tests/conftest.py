"""Skips tests marked `gpu` or `multi_gpu` where the GPUs are missing. Collection itself asks for no device.

`--kernel-target 8.9` runs the GPU tests with the kernels that an RTX 40 would run (benchmarks/forced_target.py).
"""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from checked_engine import Reference

# A shell starts background jobs (`make test &`) with SIGINT ignored, and their children inherit that. The tests of
# Ctrl-C need Python's own handler, which the processes they start do not inherit: those begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are collected
# httpx and openai load 140 certificates for each client, which takes 25 ms. No test speaks TLS
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull
for name in ("sklearn", "scipy"):  # where they are installed, transformers imports them, for 2 s and no use here
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: tiny models gain nothing from more threads


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    from tiny_engines import write_model_with_text

    return write_model_with_text(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for 2**17 tokens: an answer of 10**5 tokens ends before no test that has to end it, however
    long the test's thread is delayed.
    """
    from tiny_engines import write_model_with_text

    return write_model_with_text(tmp_path_factory.mktemp("long_model"), max_tokens=2**17)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> "Reference":
    """A tiny model and its right answers. All tests share what transformers has computed."""
    from checked_engine import Reference
    from tiny_models import write_tiny_model

    return Reference(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> "Reference":
    """The same for a tiny model with recurrent layers."""
    from checked_engine import Reference
    from tiny_models import write_tiny_model

    directory = tmp_path_factory.mktemp("hybrid")
    return Reference(write_tiny_model(directory, "qwen3_5", num_layers=4, max_position_embeddings=8192))


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> "Reference":
    """The same for a tiny model with a layer that attends to a window, which divides neither blocks nor pages."""
    from checked_engine import Reference
    from tiny_models import write_tiny_model

    sizes = {"num_layers": 3, "max_position_embeddings": 8192, "gemma": {"sliding_window": 100}}
    return Reference(write_tiny_model(tmp_path_factory.mktemp("windowed"), "gemma3", **sizes))


@pytest.fixture(scope="session", params=["hybrid", pytest.param("windowed", marks=pytest.mark.slow)])
def stateful(request: pytest.FixtureRequest) -> "Reference":
    """Each of the two models whose sequences have states."""
    reference: Reference = request.getfixturevalue(request.param)
    return reference


@pytest.fixture
def patient_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up no load from disk because a thread of it was delayed."""
    from functools import partialmethod

    from nanovllm.capabilities.disk import tier, worker

    monkeypatch.setattr(tier, "STALL_S", 600.0)
    monkeypatch.setattr(worker, "MEASURE_S", 120.0)
    monkeypatch.setattr(worker.DiskWorker, "close", partialmethod(worker.DiskWorker.close, timeout_s=120.0))


@pytest.fixture(scope="session")
def smollm2_tokenizer(pytestconfig: pytest.Config) -> Path:
    """The tokenizer of SmolLM2-135M-Instruct as transformers exports it from a GGUF file. Do not write there."""
    from smollm2 import cached_tokenizer

    return cached_tokenizer(pytestconfig.cache.mkdir("smollm2"))  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def smollm2(smollm2_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, a real model, with its tokenizer. For tests marked `slow`. Do not write there."""
    from smollm2 import write_model

    return write_model(tmp_path_factory.mktemp("smollm2"), smollm2_tokenizer)


@pytest.fixture(scope="session")
def gemma3(pytestconfig: pytest.Config) -> Path:
    """The GGUF file of Gemma 3 270M in Q4_K_M, a real model with windows. For tests marked `slow`."""
    from gemma3 import gguf_file

    return gguf_file(pytestconfig.cache.mkdir("gemma3"))  # type: ignore[union-attr]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernel-target", help="compute capability whose kernels run, such as 8.9; default: the GPU's own"
    )

    parser.addoption("--one-case", action="store_true", help="run only the first case of every test with parameters")


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" not in config.getoption("-m"):
        os.environ["NANOVLLM_TEST_TIER"] = "all"  # see tests/support/tiers.py
    if config.getoption("--kernel-target"):
        from benchmarks.forced_target import force_target

        force_target(config.getoption("--kernel-target"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run on a borrowed GPU may be cut off before its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})", flush=True)


def pytest_collection_finish() -> None:
    """Let collections leave out the objects of modules and tests, which would take 0.3 s each."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


def num_gpus_needed(item: pytest.Item) -> int:
    """`multi_gpu(n)` asks for n GPUs, `multi_gpu` for two, `gpu` for one."""
    needed = [marker.args[0] if marker.args else 2 for marker in item.iter_markers("multi_gpu")]
    return max(needed, default=1 if "gpu" in item.keywords else 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--one-case"):
        items[:] = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
    marked = {item: num_gpus for item in items if (num_gpus := num_gpus_needed(item))}
    if not marked:
        return
    import torch

    available = torch.cuda.device_count()
    if available == 0:  # thousands, which would take seconds to skip
        config.hook.pytest_deselected(items=list(marked))
        items[:] = [item for item in items if item not in marked]
        return
    for item, num_gpus in marked.items():
        if available < num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {num_gpus} CUDA GPU(s), found {available}"))
