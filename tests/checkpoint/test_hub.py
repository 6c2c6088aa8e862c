"""The files fetched for a hub name, from a small server that speaks enough of the hub's protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf_files import add_tiny_vocabulary, write_gguf
from model_files import edit_json
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
        content, wanted = files[name].read_bytes(), self.headers.get("Range")
        if wanted is not None:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
        if with_content:
            self.server.fetched.append(name if wanted is None else f"{name} {wanted}")
        self._send(200 if wanted is None else 206, content, with_content)

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


@contextmanager
def serve(repository: Path, *, with_tokenizer: bool = True) -> Iterator[Hub]:
    with Hub(write_tiny_tokenizer(repository) if with_tokenizer else repository) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def nanovllm(hub: Hub, cache: Path, *args: str, name: str = NAME, **settings: str) -> str:
    """The command line in a process of its own: huggingface_hub reads its settings when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_DOWNLOAD_TIMEOUT": "240", "HF_HUB_ETAG_TIMEOUT": "240"}  # no file may be asked for twice
    model = ["--model", name] if args[0] not in ("pull", "list") else [name] * (args[0] == "pull")
    command = [sys.executable, "-m", "nanovllm", args[0], *model, *args[1:]]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


FLAGS = "--prompt abc --device cpu --max-tokens 3 --num-kvcache-blocks 4 --temperature 0".split()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve(write_tiny_model(tmp_path / "repository", sharded=True)) as hub:
        yield hub


@pytest.mark.slow
def test_hub_name_plan_fetches_no_weights_and_generate_the_rest_once(hub: Hub, tmp_path: Path) -> None:
    """B1: `plan`, which loads nothing, downloaded all weights. Its snapshot, which lacks the weights, must not pass
    for the whole model, whose files are links to blobs.
    """
    cache = tmp_path / "cache"
    planned = nanovllm(hub, cache, "plan", "--context", "100", "--host-memory-gb", "8")
    assert "plan for 1 x 100 tokens of acme/tiny" in planned
    assert sorted(hub.fetched) == ["config.json", "model.safetensors.index.json"]
    answer = nanovllm(hub, cache, "generate", *FLAGS)
    assert len(hub.fetched) == len(set(hub.fetched)) and "tokenizer.json" in hub.fetched
    weights = list(cache.rglob("snapshots/*/*.safetensors"))
    assert len(weights) > 1 and all(file.is_symlink() for file in weights)
    hub.fetched.clear()
    assert nanovllm(hub, cache, "generate", *FLAGS, HF_HUB_OFFLINE="1") == answer and not hub.fetched


@pytest.mark.slow
def test_pull_fetches_what_generate_needs_offline_and_list_names_it(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = Path(nanovllm(hub, cache, "pull").strip())
    assert path.name == COMMIT and "tokenizer.json" in hub.fetched and list(path.glob("*.safetensors"))
    hub.fetched.clear()
    assert NAME in nanovllm(hub, cache, "list", str(tmp_path), HF_HUB_OFFLINE="1")
    assert nanovllm(hub, cache, "generate", *FLAGS, HF_HUB_OFFLINE="1") and not hub.fetched


@pytest.mark.slow
def test_hub_name_a_head_that_only_config_json_has_is_not_used(tmp_path: Path) -> None:
    """Regression: the first start with "auto" failed where save_pretrained had left the head out of a single file."""
    repository = write_tiny_model(tmp_path / "repository", "qwen3_5", num_layers=4)
    edit_json(repository / "config.json", mtp_num_hidden_layers=1)
    with serve(repository) as hub:
        flags = "--context 100 --speculation auto --enable-cpu-offload --num-gpu-blocks 4 --host-memory-gb 8".split()
        planned = nanovllm(hub, tmp_path / "cache", "plan", *flags)
        assert "draft head" not in planned and hub.fetched == ["config.json", "model.safetensors bytes=0-100000"]
        answer = nanovllm(hub, tmp_path / "cache", "generate", *FLAGS, "--speculation", "auto")
        assert nanovllm(hub, tmp_path / "cache", "generate", *FLAGS) == answer


@pytest.mark.slow
def test_gguf_on_the_hub_plan_reads_the_header_and_generate_fetches_one_file(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", hidden_size=256)
    repository = tmp_path / "repository"
    repository.mkdir()
    for kind in ("Q8_0", "Q4_0"):
        write_gguf(repository / f"tiny-{kind}.gguf", directory, types=[kind], num_files=2, metadata=add_tiny_vocabulary)
    (repository / "README.md").write_text("A model")
    cache, names = tmp_path / "cache", [f"tiny-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    with serve(repository, with_tokenizer=False) as hub:
        flags = "--context 100 --host-memory-gb 8".split()
        planned = nanovllm(hub, cache, "plan", *flags, name=f"{NAME}:Q8_0")
        assert "plan for 1 x 100 tokens" in planned
        assert hub.fetched and all(each.split()[0] in names and " bytes=0-" in each for each in hub.fetched)
        hub.fetched.clear()
        answer = nanovllm(hub, cache, "generate", *FLAGS, name=f"{NAME}:Q8_0")
        assert sorted(hub.fetched) == names
        hub.fetched.clear()
        for offline in ("0", "1"):
            for name in (f"{NAME}:q8_0", f"{NAME}/{names[0]}"):
                assert nanovllm(hub, cache, "generate", *FLAGS, name=name, HF_HUB_OFFLINE=offline) == answer
        assert nanovllm(hub, cache, "plan", *flags, name=f"{NAME}:Q8_0") == planned and not hub.fetched
