"""Kernels compiled by other processes, for a GPU that need not be there. Whatever happens to those processes, every
kernel ends in Triton's cache, the same as without them.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from odd_kernels import Held, failing_kernel, tagged_kernel
from offline_compiler import compiling_for
from processes import states_of_session
from test_compile import launch_layers, launch_merge, launch_prefill, launch_sampler
from triton.backends.nvidia import driver as nvidia_driver
from triton.runtime import cache as triton_cache
from triton.runtime.driver import DriverConfig
from triton.runtime.jit import JITFunction
from waiting import wait_until

from nanovllm.device.kernel_target import KNOWN_TARGETS
from nanovllm.kernels import compile_server
from nanovllm.kernels.compile_server import CompileJob, CompileServer, TritonStart, start_compile_server
from nanovllm.kernels.launch import compiling_in, on_grid

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TARGET = KNOWN_TARGETS["9.0"]
BF16 = torch.bfloat16


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")

    def __repr__(self) -> str:
        return "unpicklable"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    forget_kernels()
    return tmp_path / "cache"


@pytest.fixture
def server(cache: Path) -> Iterator[CompileServer]:
    server = CompileServer(cache / "marker")
    yield server
    server.close()


def forget_kernels() -> None:
    """As in a new process: no kernel has been compiled, and none hashed."""
    for module in [module for name, module in sys.modules.items() if name.startswith("nanovllm.kernels.")]:
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.device_caches.clear()
                function.hash = None
    for kernel in (failing_kernel, tagged_kernel):
        kernel.device_caches.clear()


def compile_with(server: CompileServer | None, launch: Callable[[], object]) -> dict[str, bool]:
    """Compile what `launch` launches. Returns, by kernel, whether this process found all of its variants in the cache.

    The server's process may take its time: nothing here waits until it has imported what it needs.
    """
    found: dict[str, bool] = {}

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found[src.name] = found.get(src.name, True) and cache_hit

    with pytest.MonkeyPatch.context() as patch, compiling_for(TARGET), ThreadPoolExecutor(4) as threads:
        patch.setattr(triton.knobs.compilation, "listener", listener)
        with compiling_in(threads, server):
            launch()
    return found


def launch_some() -> None:
    launch_layers(1024, BF16)
    launch_merge(128, BF16, 16)


def launch_more() -> None:
    """With functions that several kernels call, and constants that these use."""
    launch_some()
    launch_sampler(5000, BF16)


def launch(kernel: Any, *args: Any) -> None:
    on_grid(kernel, (1,))(torch.zeros(16), *args)


def entries(cache: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in cache.glob("*/*.cubin")}


@pytest.mark.slow
def test_server_compiles_what_the_threads_would(
    server: CompileServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compile_with(server, launch_more)
    assert len(found) > 8 and all(found.values()), found
    server.close()
    assert not states_of_session(server.pid)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache) + "-2")
    forget_kernels()
    assert not any(compile_with(None, launch_more).values())
    assert entries(cache) == entries(Path(f"{cache}-2"))


@pytest.mark.slow
def test_server_compiles_without_torch(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the server was ready only after it had imported torch, 4 s after its start on a fresh machine."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise ImportError('torch is not for the server')")
    monkeypatch.syspath_prepend(tmp_path / "path")  # also the server's; this process has loaded torch already
    server = CompileServer(cache / "marker")

    def launch_all() -> None:
        launch_more()
        launch_prefill(128, BF16, 4096, causal=True, heads=(16, 8))

    found = compile_with(server, launch_all)
    server.close()
    assert len(found) > 9 and all(found.values()), found


PREPARED_SERVERS = {
    "torch is loaded once something reads its attributes": """
import inspect, sys
from nanovllm.kernels import compile_server
compile_server._import_compiler()
inspect.getmodule(compile(" ", "file", "exec"))  # looks at all modules
assert "torch._C" not in sys.modules
from nanovllm.kernels import sampler
import torch.nn
assert torch.float32 is sampler.torch.float32 is torch.nn.Linear(1, 1).weight.dtype
""",
    "it has one thread before it forks": """
import threading, time
import triton.runtime.cache
triton.runtime.cache.triton_key = lambda: time.sleep(3)
from nanovllm.kernels import compile_server
compile_server._import_compiler()
assert threading.active_count() == 1
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PREPARED_SERVERS)
def test_server_when_its_imports_are_done(name: str) -> None:
    subprocess.run([sys.executable, "-c", PREPARED_SERVERS[name]], check=True)


@pytest.mark.parametrize("fails", [False, True])
def test_launcher_is_built_after_compiling_if_kernels_have_their_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Triton 3.6 builds a C module for every signature. If that fails, the kernel is in the cache all the same."""

    class InThisProcess(CompileServer):
        def __init__(self) -> None: ...

        def compile(self, job: CompileJob) -> None:
            compile_server._compile(job)
            compiled.append(job.kernel)

    def launcher(src: Any, metadata: Any) -> None:
        built.append((src.fn.__name__, metadata.name))
        if fails:
            raise RuntimeError("no compiler")

    built: list[tuple[str, str]] = []
    compiled: list[str] = []
    monkeypatch.setattr(nvidia_driver, "make_launcher", None, raising=False)
    monkeypatch.setattr(nvidia_driver, "CudaLauncher", launcher)
    compile_with(InThisProcess(), lambda: launch(tagged_kernel, 2))
    assert len(entries(cache)) == 1 and compiled == ["tagged_kernel"]
    assert built == [("tagged_kernel", "tagged_kernel")]


def test_kernel_that_the_server_cannot_compile_is_compiled_here(cache: Path) -> None:
    """Whatever the reason: a worker that was killed is a RuntimeError, a server an OSError."""

    class Failing(CompileServer):
        def __init__(self) -> None: ...

        def compile(self, job: CompileJob) -> None:
            raise RuntimeError("the process that compiled has ended")

    assert compile_with(Failing(), lambda: launch(tagged_kernel, 2)) == {"tagged_kernel": False}
    assert len(entries(cache)) == 1


def test_cached_kernels_do_not_wait_for_the_server(server: CompileServer) -> None:
    compile_with(None, lambda: launch_merge(128, BF16, 16))
    forget_kernels()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert compile_with(server, lambda: launch_merge(128, BF16, 16)) == {"_merge_kernel": True}
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.slow
def test_kernel_that_two_ranks_need_is_compiled_once(server: CompileServer, cache: Path) -> None:
    class Recorder(CompileServer):
        def __init__(self) -> None:
            self.jobs: list[CompileJob] = []

        def compile(self, job: CompileJob) -> None:
            self.jobs.append(job)

    recorder = Recorder()
    compile_with(recorder, lambda: launch(tagged_kernel, 2))
    (job,) = recorder.jobs
    shutil.rmtree(cache)
    files: list[int] = []

    def compile_on(server: CompileServer) -> None:
        server.compile(job)
        files.extend(path.stat().st_ino for path in cache.glob("*/*.cubin"))

    other = CompileServer(cache / "marker")
    ranks = [threading.Thread(target=compile_on, args=(each,)) for each in (server, other)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    other.close()
    assert len(files) == 2 and files[0] == files[1], "written again"


@pytest.mark.slow
@pytest.mark.parametrize("imports", [True, False], ids=["while it imports", "while it compiles"])
def test_server_killed_kernels_are_compiled_here(server: CompileServer, imports: bool, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()

    def kill() -> None:
        if not imports:
            wait_until(lambda: len(states_of_session(server.pid)) > 1)
        os.killpg(server.pid, signal.SIGKILL)

    def launch_all() -> None:
        launch(tagged_kernel, Held(str(held)))
        launch_some()

    killer = threading.Thread(target=kill)
    killer.start()
    found = compile_with(server, launch_all)
    killer.join()
    assert len(found) > 5 and not all(found.values())


@pytest.mark.slow
def test_worker_killed_kernel_is_compiled_here(server: CompileServer, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()

    def kill() -> None:
        wait_until(lambda: len(states_of_session(server.pid)) > 1)
        with suppress(ProcessLookupError):  # it may have ended just now
            os.kill(max(set(states_of_session(server.pid)) - {server.pid}), signal.SIGKILL)
        held.unlink()

    def launch_several() -> None:
        launch_merge(128, BF16, 16)
        launch(tagged_kernel, Held(str(held)))
        for tag in range(4):
            launch(tagged_kernel, tag)

    killer = threading.Thread(target=kill)
    killer.start()
    found = compile_with(server, launch_several)
    killer.join()
    assert len(found) == 2 and any(found.values())


def test_server_that_ends_at_once_kernels_are_compiled_here(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = CompileServer(cache / "marker")
    assert compile_with(server, lambda: launch_merge(128, BF16, 16)) == {"_merge_kernel": False}
    server.close()


@pytest.mark.slow
def test_failing_and_odd_kernels_are_left_to_this_process(server: CompileServer) -> None:
    assert compile_with(server, lambda: launch(tagged_kernel, Unpicklable())) == {"tagged_kernel": False}
    with pytest.raises(triton.CompilationError, match="this kernel cannot be compiled"):
        compile_with(server, lambda: launch(failing_kernel))
    assert compile_with(server, lambda: launch(tagged_kernel, 1)) == {"tagged_kernel": True}


def test_start_compile_server_needs_one_only_for_a_new_setup(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    first = start_compile_server("a model", 1, min_cores=1)
    assert first is not None
    first.close(is_complete=False)
    second = start_compile_server("a model", 1, min_cores=1)
    assert second is not None
    second.close(is_complete=True)
    assert start_compile_server("a model", 1, min_cores=1) is None
    assert start_compile_server("another model", 1, min_cores=2**20) is None
    monkeypatch.setattr(sys, "executable", str(cache / "nothing"))
    assert start_compile_server("another model", 1, min_cores=1) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert start_compile_server("another model", 1, min_cores=1) is None


SCRIPT = """
import sys, time
from pathlib import Path
from nanovllm.kernels.compile_server import CompileServer
print("the script runs", flush=True)
server = CompileServer(Path("marker"))
print(server.pid, flush=True)
if len(sys.argv) > 1:
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("args", [[], ["waits"]], ids=["ends", "is killed"])
def test_server_ends_with_the_process_that_started_it(tmp_path: Path, args: list[str]) -> None:
    """That process does not close it. Its script runs once, and nobody writes to its output."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), *args], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "the script runs\n"
    pid = int(process.stdout.readline())
    if args:
        process.kill()
    assert process.stdout.read() == ""
    process.wait()
    wait_until(lambda: set(states_of_session(pid).values()) <= {"Z"})  # whoever adopts it may not wait for it


# -- what Triton does once in every process --------------------------------------------------------------------------


def test_files_are_hashed_and_the_driver_is_loaded_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_in: list[threading.Thread] = []

    class Driver:
        @property
        def utils(self) -> None:
            loaded_in.append(threading.current_thread())

    monkeypatch.setattr(DriverConfig, "active", Driver())
    triton_cache.triton_key.cache_clear()
    start = TritonStart()
    start.wait()
    assert triton_cache.triton_key.cache_info().currsize == 1
    assert len(loaded_in) == 1 and loaded_in[0] is not threading.current_thread() and not loaded_in[0].is_alive()
    start.wait()


def test_failure_is_left_to_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: DriverConfig) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(DriverConfig, "active", property(fail))
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    TritonStart().wait()
    assert not failed
