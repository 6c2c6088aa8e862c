"""Compile kernels in processes, concurrent with the engine, and prepare Triton in threads.

CompileServer forks a process for each kernel. Triton's compiler holds Python's GIL most of the time, so threads compile
hardly faster than one thread, and slow down the thread that finds the kernels. Processes do not. The compiled kernels
reach the engine through Triton's disk cache: once a worker has compiled a kernel, the engine's own call finds the
kernel there. If a worker fails, the engine's call compiles the kernel itself. So only time depends on the server.

The server imports Triton and the kernels, then forks a worker for each job. At that point the server has one thread
and never touches the GPU, so forking is safe. The server imports neither torch, which takes seconds on a machine that
has just started, nor the user's script. A job travels with a socket for its answer. A worker that dies closes its
socket, and a server that dies closes the sockets of all waiting jobs. When the engine closes its end of the server's
socket, or dies, the server ends its workers and itself.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

logger = logging.getLogger("nanovllm")

_MAX_JOB_BYTES = 2**17  # below what a socket's buffer holds
_MAX_ANSWER_BYTES = 2**12
_JOB_TIMEOUT_S = 60.0  # far more than a kernel takes; after a timeout the engine compiles the kernel itself
_END_TIMEOUT_S = 10.0
MIN_CORES = 4  # on two cores, importing Triton once more costs as much time as the GIL
_COMPILED = b"compiled"
_MAIN = """import sys
sys.path[:] = sys.argv[2:]
from nanovllm.kernels.compile_server import serve
serve(int(sys.argv[1]))"""


class CompileJob(NamedTuple):
    """A kernel to compile: the arguments of triton.compile, with the kernel by its name."""

    module: str
    kernel: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attrs: dict[Any, Any]
    target: Any
    options: dict[str, Any]
    cache_key: str  # names the kernel's entry in Triton's cache


class CompileServer:
    def __init__(self, marker: Path) -> None:
        """Start the process without waiting for it. `close` makes the file `marker` once everything is compiled.

        Raises OSError if the process cannot be started.
        """
        self._marker = marker
        self._hangs = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, str(theirs.fileno()), *sys.path],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is meant for the engine, which ends the server
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                )
            except BaseException:
                self._control.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, job: CompileJob) -> None:
        """Put the kernel into Triton's cache. Raises an exception of any kind if that fails. For any thread."""
        if self._hangs:
            raise TimeoutError("the compile server does not answer")
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._control, [pickle.dumps(job)], [theirs.fileno()])
            ours.settimeout(_JOB_TIMEOUT_S)
            try:
                answer = ours.recv(_MAX_ANSWER_BYTES)
            except TimeoutError:
                self._hangs = True  # later jobs need not wait either
                raise
        if answer != _COMPILED:
            raise RuntimeError(answer.decode(errors="replace") or "the process that compiled has ended")

    def close(self, is_complete: bool = False) -> None:
        """End the process and its compilations. `is_complete`: all is compiled, the next start needs no server."""
        with suppress(OSError):  # closing is not enough: a process that was forked meanwhile may also hold the socket
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        # Ends a server that is still importing; a running server ends when the socket is shut down
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if is_complete:
            with suppress(OSError):  # a cache that cannot be written
                self._marker.touch()


def start_compile_server(*setup: object, min_cores: int = MIN_CORES) -> CompileServer | None:
    """Start a server for the kernels of an engine that `setup` describes.

    Returns None if there is nothing to compile, if Triton's cache has all kernels of this setup, if there are too few
    cores, or if the process cannot be started.
    """
    if len(os.sched_getaffinity(0)) < min_cores:
        return None
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        marker = _marker(setup, Path(triton.origin))
        return None if marker.exists() else CompileServer(marker)
    except OSError as error:
        logger.debug("kernels are compiled in threads: %s", error)
        return None


def _marker(setup: object, triton: Path) -> Path:
    """Path of a file in Triton's cache that exists if a start with this setup and these sources compiled all kernels.

    Asking Triton's cache itself takes longer: its keys are hashes of every kernel and of all of Triton.
    """
    digest = hashlib.sha256(repr(setup).encode())
    for path in (triton, *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    directory = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    return Path(directory, f"nanovllm-{digest.hexdigest()}")


def hash_in_order(kernel: Any) -> None:
    """Make Triton's hash of a kernel, a part of its cache key, the same in every process.

    The hash includes the constants of the functions that the kernel calls only if they were hashed before it. So hash
    everything that the kernel's module imports and defines, in that order.
    """
    if getattr(kernel, "hash", "") is not None:  # hashed already, or a function of Triton's interpreter
        return
    for function in vars(sys.modules[kernel.__module__]).values():
        if isinstance(function, type(kernel)):
            if function.__module__ != kernel.__module__:
                hash_in_order(function)
            _ = function.cache_key


class TritonStart:
    """Does in threads, ahead of the first kernel, the work that Triton does once in every process.

    Triton hashes its own files, half a gigabyte, for the keys of its cache. Triton also compiles a C module that loads
    kernels, unless the cache has the module. Each takes half a second or more on a machine that has just started, and
    neither needs Python's GIL for most of that time.

    The work starts with the object. A kernel that is launched before `wait` has returned does the same work again.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
            return
        for task in (_hash_triton, _load_driver):
            self._threads.append(threading.Thread(target=_attempt, args=(task,), name=f"triton{task.__name__}"))
            self._threads[-1].start()

    def wait(self) -> None:
        while self._threads:
            self._threads.pop().join()


def _attempt(task: Callable[[], object]) -> None:
    try:
        task()
    except Exception as error:  # the first launch tries again and raises the error
        logger.debug("Triton is prepared at its first launch: %r", error)


def _hash_triton() -> None:
    from triton.runtime.cache import triton_key

    triton_key()  # Triton caches the result


def _load_driver() -> None:
    from triton.runtime import driver

    _ = driver.active.utils  # reading the first attribute makes Triton build the module


# -- in the server's process -------------------------------------------------------------------------------------------


def serve(control_fd: int) -> NoReturn:
    """Run the server's process: fork a worker for each job, until the other end of the socket is closed."""
    control = socket.socket(fileno=control_fd)
    _import_compiler()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MAX_JOB_BYTES, 1)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            _work(message, socket.socket(fileno=fds[0]))
        os.close(fds[0])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os.killpg(0, signal.SIGTERM)  # the workers and the assemblers that they run
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


class _LateTorch(ModuleType):
    """Stands for torch until one of its attributes is read, and then loads it.

    Modules of kernels import torch for the functions that launch kernels, which the server does not call. While they
    are imported, these modules read no attribute of torch.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get("torch") is self:
            del sys.modules["torch"]
        return getattr(importlib.import_module("torch"), name)


def _delay_torch() -> None:
    """Let imports of torch succeed without loading it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is not installed"
    sys.modules["torch"] = late = _LateTorch("torch")
    late.__spec__, late.__file__ = spec, spec.origin  # what code that looks through all modules reads


def _import_compiler() -> None:
    """Import and compute once what each worker would otherwise import and compute itself."""
    _delay_torch()
    from triton.runtime.cache import triton_key

    hashing = threading.Thread(target=triton_key)  # reads all files of Triton without the GIL; Triton caches the result
    hashing.start()
    modules = [info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}.")]
    for name in ("triton.compiler.code_generator", *modules):
        importlib.import_module(name)
    hashing.join()


def _work(message: bytes, connection: socket.socket) -> NoReturn:
    """Run a worker's process: compile one kernel and answer."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _compile(pickle.loads(message))
        answer = _COMPILED
    except BaseException as error:
        answer = repr(error).encode()[:_MAX_ANSWER_BYTES]
    with suppress(OSError):
        connection.sendall(answer)
    os._exit(0)


def _compile(job: CompileJob) -> None:
    import triton
    from triton.compiler import ASTSource
    from triton.runtime.cache import get_cache_manager

    kernel = getattr(importlib.import_module(job.module), job.kernel)
    hash_in_order(kernel)
    source = ASTSource(kernel, job.signature, job.constants, job.attrs)
    # The ranks of an engine need the same kernels at the same time. One compiles, the others find the result.
    with open(get_cache_manager(job.cache_key).lock_path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiled = triton.compile(source, target=job.target, options=job.options)
        with suppress(Exception):  # the engine builds a missing module itself
            _build_launcher(compiled)


def _build_launcher(compiled: Any) -> None:
    """Put the C module that launches the kernel into Triton's cache. From Triton 3.7 on there is none."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)  # as the engine will call it; needs no GPU
