"""Starts the server under test, waits until it is ready, and stops it as a supervisor would."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
STDERR = 2  # the file descriptor


class ServerError(Exception):
    """The server did not start, or ended."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ServerProcess:
    """A server that is started with a command and stopped with SIGTERM.

        with ServerProcess("nanovllm serve --model demo --port {port}", "http://127.0.0.1:8000") as server: ...

    "{port}" in the command is replaced by the port of the base URL. What the server prints goes to stderr, because the
    last line of stdout is the benchmark's result.
    """

    def __init__(self, command: str, base_url: str, port: int) -> None:
        words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
        if words[0] == "nanovllm":  # of this checkout, and with the same Python
            words[:1] = [sys.executable, "-m", "nanovllm"]
        if shutil.which(words[0]) is None:
            raise ServerError(f"--start: there is no program {words[0]!r}")
        self.words = words
        self._base_url = base_url
        self._start_s = time.perf_counter()
        self._process = subprocess.Popen(words, stdout=STDERR, start_new_session=True)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.stop(STOP_TIMEOUT_S if kind is None else 0.0)

    def wait_until_ready(self) -> float:
        """Wait until /health answers 200. Returns the seconds since the start."""
        while True:
            if (status := self._process.poll()) is not None:
                raise ServerError(f"the server ended with status {status} before it was ready")
            if get(self._base_url, "/health") is not None:
                return time.perf_counter() - self._start_s
            if time.perf_counter() - self._start_s > READY_TIMEOUT_S:
                raise ServerError(f"/health did not answer within {READY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End the server with SIGTERM, or if that does not help with SIGKILL. Returns its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                if timeout_s:
                    print(f"the server did not end within {timeout_s:.0f} s of SIGTERM", file=sys.stderr)
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        return int(self._process.returncode)


def server_url(base_url: str) -> str:
    """The base URL without the "/v1" that clients of the API write at its end."""
    return base_url.rstrip("/").removesuffix("/v1")


def get(base_url: str, path: str, api_key: str | None = None) -> bytes | None:
    """The body of an answer with status 200; None for any other, or if nobody answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = build_opener(ProxyHandler({}))  # straight to the server, as the load goes
    try:
        with opener.open(Request(base_url + path, headers=headers), timeout=10) as response:
            return bytes(response.read())
    except (URLError, OSError):  # an HTTPError is a URLError
        return None


def served_model(base_url: str, api_key: str | None) -> str:
    """The only model, or the first one, that the server offers."""
    models = get(base_url, "/v1/models", api_key)
    if models is None:
        raise ServerError(f"{base_url}/v1/models did not answer; is the server running, and the API key right?")
    return str(json.loads(models)["data"][0]["id"])


def server_version(base_url: str, api_key: str | None = None) -> Any:
    """What /version says; None if the server has no such page."""
    answer = get(base_url, "/version", api_key)
    try:
        return None if answer is None else json.loads(answer).get("version")
    except (ValueError, AttributeError):
        return None
