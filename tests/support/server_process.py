"""A server in a process of its own, for tests of its life: real signals, ports and exit statuses.

The processes come from multiprocessing's fork server, which has imported torch once. So each starts in a moment.
"""

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
from processes import states_of_session
from waiting import LIMIT_S, wait_until

ENGINE = {"device": "cpu", "num_kvcache_blocks": 600, "max_num_batched_tokens": 512}
PRELOADED = [  # a server's imports until it is ready; modules that do not exist are skipped
    *(
        "server_process",
        "nanovllm.entrypoints.server.lifecycle",
        "nanovllm.models.loader",
        "uvicorn.protocols.http.auto",
    ),
    *("torch._dynamo", "safetensors.torch", "transformers.models.auto.tokenization_auto"),
    "transformers.tokenization_utils_tokenizers",
]
_URL = re.compile(r"http://\S+(?=/v1\b)")


@dataclass
class ServerProcess:
    process: BaseProcess
    log: Path
    url: str = ""

    def wait_until_ready(self) -> None:
        """Until the log names the URL."""
        self.url = self.wait_for_log(_URL)[0]

    def wait_for_log(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            is_alive, text = self.process.exitcode is None, self.log.read_text()
            match = re.search(pattern, text)
            assert match or is_alive, text
            return match

        match = wait_until(found, f"{pattern} in the log")
        assert match is not None
        return match

    def send(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def wait(self) -> int:
        """The exit status. No other process of its session may be left."""
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None, "the server has not ended"
        wait_until(lambda: not running_processes_of(self.process.pid), "the session's processes to end")
        return self.process.exitcode

    def metric(self, name: str) -> float:
        rendered = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S).text
        return float(re.findall(rf"^nanovllm:{name}{{.*}} (.*)$", rendered, re.MULTILINE)[0])

    def wait_for_steps(self, num_steps: int) -> None:
        """Wait until so many steps have been launched from now on."""
        goal = self.metric("engine_steps_total") + num_steps
        wait_until(lambda: self.metric("engine_steps_total") >= goal, f"{num_steps} steps")

    def wait_for_metric(self, name: str, value: float) -> None:
        wait_until(lambda: self.metric(name) == value, f"{name} = {value}")


@contextmanager
def server_process(
    model: Path,
    log: Path,
    *,
    change: Callable[[Any], None] | None = None,
    waits: bool = True,
    options: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
) -> Iterator[ServerProcess]:
    """Start a server, and kill it in the end if it still runs.

    change: called with the AsyncLLM before it serves, to inject a fault. waits: until the server is ready.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log.touch()
    options = {"port": 0, "drain_s": LIMIT_S} | (options or {})
    args = (model, log, change, options, ENGINE if engine is None else engine)
    process = context.Process(target=_serve, args=args)
    process.start()
    server = ServerProcess(process, log)
    try:
        if waits:
            server.wait_until_ready()
        yield server
    finally:
        process.kill()
        process.join()
        for pid in running_processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)


def _serve(model: Path, log: Path, change: Any, options: dict[str, Any], engine_options: dict[str, Any]) -> None:
    """In the new process: what `nanovllm serve` does, with everything it prints in the log."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    from nanovllm import AsyncLLM
    from nanovllm.entrypoints.server.lifecycle import run_server
    from nanovllm.entrypoints.server.log_lines import set_up_log
    from nanovllm.entrypoints.server.options import ServerOptions, bind

    torch.set_num_threads(1)

    def load() -> AsyncLLM:
        print("loading", flush=True)
        engine = AsyncLLM(model, **engine_options)
        if change is not None:
            change(engine)
        return engine

    server_options = ServerOptions(**({"served_model_name": ("tiny",)} | options))
    set_up_log(server_options.log_level, server_options.log_format)
    with bind(server_options.host, server_options.port) as bound:
        sys.exit(run_server(load, server_options, bound))


def running_processes_of(session_id: int | None) -> list[int]:
    return [pid for pid, state in states_of_session(session_id).items() if state != "Z"]
