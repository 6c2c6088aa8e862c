"""A service with replicas in a process of its own, in a Ray cluster of two nodes on this machine."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from waiting import LIMIT_S, wait_until

PACKAGE_ROOT = Path(__file__).parents[2]
NODE = {"object_store_memory": 100_000_000, "include_dashboard": False}
ENGINE = ["--device", "cpu", "--max-model-len", "8192", "--num-kvcache-blocks", "128"]


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a cluster with one CPU on each node. What it has started is gone in the end."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="svc", dir="/tmp")  # the paths of sockets must be short
    previous = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_TMPDIR")}
    os.environ |= {"PYTHONPATH": str(PACKAGE_ROOT), "RAY_TMPDIR": folder}  # for workers: this package
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, **NODE)
        cluster.add_node(num_cpus=1, **NODE)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        for node in (*cluster.worker_nodes, cluster.head_node):
            cluster.remove_node(node, allow_graceful=False)  # gracefully, it waits a minute for a head that has gone
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: "is served at" in self.log.read_text(), "the service is not ready")
        found = re.search(r"is served at (http://\S+)/v1", self.log.read_text())
        assert found is not None
        self.url = found[1]

    def wait_for(self, condition: Callable[[], bool], problem: str) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, f"the end of this: {problem}")
        assert self.process.poll() is None, f"the service has ended: {self.log.read_text()}"

    def samples(self, name: str) -> dict[str, float]:
        """The metric's value for each replica; "" for one without this label. Of several samples, the sum."""
        values: dict[str, float] = {}
        for labels, value in re.findall(rf"^nanovllm:{name}{{(.*)}} (.*)$", self.get("/metrics").text, re.MULTILINE):
            replica = re.search(r'replica="(\w+)"', labels)
            key = replica[1] if replica else ""
            values[key] = values.get(key, 0) + float(value)
        return values

    def replicas(self) -> set[str]:
        return set(self.samples("engine_is_running"))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT_S)

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        response = self.post(prompt, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def post(self, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0} | fields
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S)

    def stream(self, prompt: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion. It must end with [DONE]."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True} | fields
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=LIMIT_S) as response:
            assert response.status_code == 200
            last = ""
            for line in response.iter_lines():
                if line.startswith("data: "):
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        yield json.loads(last)
            assert last == "[DONE]"


@contextmanager
def service_process(
    log: Path, *flags: str, program: tuple[str, ...] = ("-m", "nanovllm"), environment: dict[str, str] | None = None
) -> Iterator[Service]:
    """`nanovllm serve` with the built-in model. Its process is gone in the end.

    program: what is run instead. environment: variables besides those of this process.
    """
    command = [sys.executable, *program, "serve", "--model", "demo", "--port", "0", *ENGINE, *flags]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    service = Service(process, log)
    try:
        service.wait_until_ready()
        yield service
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
