"""`nanovllm list`, `pull` and `ps`. tests/checkpoint/test_hub.py downloads with `pull`."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from gguf_files import write_gguf
from private_cache import use_private_cache
from tiny_models import write_tiny_model

from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.entrypoints.cli.main import main
from nanovllm.entrypoints.cli.models import what_runs
from nanovllm.entrypoints.server.notes import noted, read_notes

COMMIT = "0" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(folder))
    return folder


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Model -> the rest of its line."""
    assert main(["list", str(folder)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_list_has_the_models_of_the_hubs_cache_and_of_a_folder(
    hub_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = hub_cache / "models--acme--tiny" / "snapshots"
    source = write_tiny_model(tmp_path / "source")
    shutil.copytree(source, snapshots / COMMIT)
    plan_only = hub_cache / "models--acme--planned" / "snapshots" / COMMIT
    plan_only.mkdir(parents=True)
    (plan_only / "config.json").write_bytes((snapshots / COMMIT / "config.json").read_bytes())
    for repository in ("tiny", "planned"):
        refs = hub_cache / f"models--acme--{repository}" / "refs"
        refs.mkdir()
        (refs / "main").write_text(COMMIT)
        (refs.parent / "blobs").mkdir()
    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(folder / "a.gguf", source)
    shutil.copytree(source, folder / "checkpoint")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("not a model")
    found = listed(folder, capsys)
    runs = "128 tokens on the CPU" if not os.path.exists("/dev/nvidia0") else "128 tokens on the GPU"
    in_folder = [str(folder / name) for name in ("a.gguf", "checkpoint", "broken.gguf")]
    assert set(found) == {"acme/tiny", "acme/planned", *in_folder}
    for name in ("acme/tiny", str(folder / "a.gguf"), str(folder / "checkpoint")):
        assert "KiB" in found[name] and f" 128 {runs}" in found[name], found
    assert "no safetensors file" in found["acme/planned"] and "tokens" not in found["acme/planned"]
    assert "tokens" not in found[str(folder / "broken.gguf")]


def test_list_without_models_says_how_to_get_one(
    hub_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["list", str(tmp_path / "empty")]) == 0
    assert "nanovllm pull" in capsys.readouterr().out
    assert main(["list", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_what_runs_takes_the_models_format_if_it_fits() -> None:
    def runs(preset: str, gpu_gb: int = 12) -> str:
        machine = replace(Machine.gpu(64 * 2**30, find_gpu("RTX 4070")), gpu_bytes=gpu_gb * 2**30)
        return what_runs(machine, preset, config_without_weights(preset), "bfloat16")

    assert runs("qwen3-0.6b").startswith("40,960 tokens on the GPU, <= ")
    quantized = runs("qwen3-8b")
    assert quantized.startswith("40,960 tokens") and " and --quantization int4, <= " in quantized
    assert runs("llama-3.1-8b", 4).startswith("no; ")


def test_pull_of_something_that_is_not_on_the_hub_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("demo", "qwen3-8b", str(tmp_path), "word"):
        assert main(["pull", name]) == 2
        assert "such as owner/name" in capsys.readouterr().err


# -- ps ----------------------------------------------------------------------------------------------------------------


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_ps_asks_each_server_for_its_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_private_cache(monkeypatch, tmp_path)
    assert main(["ps"]) == 0 and "no servers" in capsys.readouterr().out
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with noted(url, ("m", "alias")):
            for status, health in ((200, "ready"), (503, "status 503")):
                Health.status = status
                assert main(["ps"]) == 0
                _, line = capsys.readouterr().out.splitlines()
                assert line.split()[:4] == [str(os.getpid()), url, "m,", "alias"] and line.endswith(health)
            server.shutdown()
            thread.join()
            server.server_close()
            assert main(["ps"]) == 0 and "does not answer" in capsys.readouterr().out
    assert not read_notes()


def test_note_of_a_killed_server_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_private_cache(monkeypatch, tmp_path)
    script = "import os\nfrom nanovllm.entrypoints.server.notes import noted\nwith noted('u', ['m']): os._exit(1)"
    subprocess.run([sys.executable, "-c", script], check=False)
    folder = tmp_path / "nanovllm" / "servers"
    assert len(list(folder.iterdir())) == 1
    (folder / f"{os.getpid()}.json").write_text("{")  # written in part
    assert not read_notes() and len(list(folder.iterdir())) == 1


def test_server_that_cannot_write_its_note_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with noted("u", ["m"]):
        assert not read_notes()
