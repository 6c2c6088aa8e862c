"""The files fetched for a hub name, from a small server that speaks enough of the hub's protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny_models import write_tiny_model, write_tiny_tokenizer

ROOT = Path(__file__).parents[2]
NAME, COMMIT = "acme/tiny", "0" * 40


class Hub(ThreadingHTTPServer):
    """One repository. `fetched`: names of the files whose content was asked for, in order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.fetched: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, with_content: bool) -> None:
        path = self.path.split("?")[0]
        files = {file.name: file for file in self.server.directory.iterdir()}
        if path.startswith(f"/api/models/{NAME}"):
            listing = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            tree = [{"type": "file", "path": name, "size": os.path.getsize(files[name]), "oid": name} for name in files]
            self._send(200, json.dumps(tree if "/tree/" in path else listing).encode(), with_content)
            return
        name = path.rsplit("/", 1)[-1]
        if not path.startswith(f"/{NAME}/resolve/") or name not in files:
            self._send(404, b"", with_content)
            return
        if with_content:
            self.server.fetched.append(name)
        self._send(200, files[name].read_bytes(), with_content)

    def _send(self, status: int, content: bytes, with_content: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    directory = write_tiny_tokenizer(write_tiny_model(tmp_path / "repository"))
    with Hub(directory) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def nanovllm(hub: Hub, cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: huggingface_hub reads its settings when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([sys.executable, "-m", "nanovllm", *args], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_plan_of_a_hub_name_fetches_config_json_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    """B1: `plan`, which loads nothing, downloaded all weights."""
    done = nanovllm(hub, tmp_path / "cache", "plan", "--model", NAME, "--context", "100", "--host-memory-gb", "8")
    assert done.returncode == 0, done.stderr
    assert "plan for 1 x 100 tokens of acme/tiny" in done.stdout
    assert hub.fetched == ["config.json"]


@pytest.mark.slow
def test_generate_of_a_hub_name_fetches_the_weights_also_after_a_plan(hub: Hub, tmp_path: Path) -> None:
    """The plan leaves a snapshot that holds config.json alone; it must not pass for the whole model."""
    cache = tmp_path / "cache"
    assert nanovllm(hub, cache, "plan", "--model", NAME, "--host-memory-gb", "8").returncode == 0
    flags = ["--prompt", "abc", "--device", "cpu", "--max-tokens", "3", "--num-kvcache-blocks", "4"]
    done = nanovllm(hub, cache, "generate", "--model", NAME, *flags)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in hub.fetched and hub.fetched.count("config.json") == 1
