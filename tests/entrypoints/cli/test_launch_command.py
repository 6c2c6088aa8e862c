"""`nanovllm launch` with agents that are scripts. tests/clients/test_launch.py has real ones."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from waiting import LIMIT_S, wait_until

from nanovllm.entrypoints.cli.launch import AGENTS, Server
from nanovllm.entrypoints.cli.main import _parser, main
from nanovllm.models.retrieval_model import build_retrieval_model

SERVER = Server("http://127.0.0.1:8000", "KEY", "m", 32768)


class Models(BaseHTTPRequestHandler):
    """A server that has one model, for the key "secret"."""

    def do_GET(self) -> None:
        is_known = self.path == "/v1/models" and self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m", "max_model_len": 40960}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one in PATH, apart from the system's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def add_agent(programs: Path, name: str, script: str) -> None:
    program = programs / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_settings_are_those_of_the_guide() -> None:
    """docs/agents.md has the same settings, for those who start agents themselves."""
    guide = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    starts = {name: agent.start(SERVER) for name, agent in AGENTS.items()}
    for name, value in starts["claude"].variables.items():
        assert re.search(rf"{name}\b", guide), name
        assert value in guide
    for setting in starts["codex"].arguments[1::2]:
        name, _, value = setting.partition("=")
        assert f"{name.rpartition('.')[2]} = {value}" in guide
    config = json.loads(starts["opencode"].variables["OPENCODE_CONFIG_CONTENT"])
    limit = json.dumps(config["provider"]["nanovllm"]["models"]["m"]["limit"])
    assert f'"limit": {limit}' in guide
    assert config["model"] == "nanovllm/m" and f"`opencode run --model {config['model']}`" in guide
    for agent in AGENTS.values():
        assert agent.package.rpartition("@")[2] in guide


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_that_is_not_installed_has_its_settings_printed(
    agent: str, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", agent, "qwen3-8b", "--max-model-len", "40k", "--", "a b"]) == 1
    printed = capsys.readouterr()
    assert f"npm install -g {AGENTS[agent].package}" in printed.err
    first, *exports, last = printed.out.splitlines()
    assert first == "nanovllm serve --model qwen3-8b --served-model-name qwen3-8b --max-model-len 40000"
    assert exports and all(line.startswith("export ") for line in exports) and "40000" in printed.out
    assert shlex.split(last)[0] == agent and shlex.split(last)[-1] == "a b"


def test_agent_gets_the_settings_of_a_server_that_runs(
    url: str, programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NANOVLLM_API_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "example.org")
    add_agent(programs, "claude", f'env > {tmp_path}/env; echo "$@" > {tmp_path}/arguments; exit 7')
    assert main(["launch", "claude", "--url", f"{url}/v1/", "--", "--print", "hi"]) == 7
    assert (tmp_path / "arguments").read_text() == "--print hi\n"
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert variables["ANTHROPIC_BASE_URL"] == url and variables["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert variables["ANTHROPIC_MODEL"] == "m" and variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40960"
    assert variables["NO_PROXY"] == "example.org,127.0.0.1"


def test_printed_server_has_the_flags_that_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    flags = '--hf-overrides {"a":1} --dtype float32 --no-enable-prefix-caching --num-gpu-blocks 8 --enable-cpu-offload'
    flags += " --embedding-on-cpu true --gpu-memory-utilization 0.5 --allowed-origins http://a http://b --drain-s 2"
    assert main(["launch", "codex", "demo", "--print", *flags.split()]) == 0
    _, *printed = shlex.split(capsys.readouterr().out.splitlines()[0])
    given = vars(_parser().parse_args(["serve", "--model", "demo", *flags.split()]))
    args = vars(_parser().parse_args(printed))
    assert args == given | {"served_model_name": ["demo"], "max_model_len": args["max_model_len"]}


def test_key_comes_from_the_file_of_keys(
    url: str, programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("# ours\nsecret\nother\n")
    add_agent(programs, "claude", f"echo $ANTHROPIC_AUTH_TOKEN > {tmp_path}/token")
    assert main(["launch", "claude", "--url", url, "--api-key-file", str(tmp_path / "keys")]) == 0
    assert (tmp_path / "token").read_text() == "secret\n"


def test_printed_settings_hold_no_secret(
    url: str, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOVLLM_API_KEY", "secret")
    assert main(["launch", "codex", "--url", url, "--print"]) == 0
    printed = capsys.readouterr().out
    assert "export NANOVLLM_API_KEY=KEY" in printed and "secret" not in printed


def test_bad_input_says_why(url: str, programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_agent(programs, "codex", "exit 0")
    cases = [
        (["vim", "demo"], "choose one of claude, codex, opencode"),
        (["codex"], "give MODEL or --url"),
        (["codex", "demo", "--url", url], "not both"),
        (["codex", "--url", "127.0.0.1:8000"], "must begin with http"),
        (["codex", "--url", url], "NANOVLLM_API_KEY if it has a key"),  # status 401
        (["codex", "--url", "http://127.0.0.1:9"], "does not tell its model"),
    ]
    for arguments, words in cases:
        assert main(["launch", *arguments]) == 2
        assert words in capsys.readouterr().err, arguments


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("signum", [None, signal.SIGTERM, signal.SIGKILL])
def test_server_ends_with_the_agent_or_with_launch(
    signum: signal.Signals | None, programs: Path, tmp_path: Path
) -> None:
    """The agent leaves its process group alone: Ctrl-C at the agent must not end the server."""
    model, server, done = build_retrieval_model(tmp_path / "model"), tmp_path / "server", tmp_path / "done"
    script = f"pgrep -P $PPID -f multiprocessing-fork > {server}.new; mv {server}.new {server}"
    add_agent(programs, "codex", f"{script}; while [ ! -e {done} ]; do sleep 0.1; done; exit 3")
    command = [sys.executable, "-m", "nanovllm", "launch", "codex", str(model), "--device", "cpu"]
    launch = subprocess.Popen([*command, "--max-model-len", "2048"], start_new_session=True)
    try:
        wait_until(lambda: server.exists() or launch.poll() is not None, "the agent")
        pid = int(server.read_text().split()[0])
        assert is_alive(pid) and os.getsid(pid) != os.getsid(launch.pid)
        if signum is None:
            done.touch()
            assert launch.wait(LIMIT_S) == 3
        else:
            launch.send_signal(signum)
            launch.wait(LIMIT_S)
        wait_until(lambda: not is_alive(pid), "the server to end")
    finally:
        done.touch()
        with suppress(ProcessLookupError):
            os.killpg(launch.pid, signal.SIGKILL)
        launch.wait()


@pytest.mark.slow
def test_server_that_does_not_start_shows_the_end_of_its_log(
    programs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add_agent(programs, "codex", "exit 0")
    model = build_retrieval_model(tmp_path / "model")
    command = [sys.executable, "-m", "nanovllm", "launch", "codex", str(model), "--device", "cpu"]
    assert subprocess.run([*command, "--max-model-len", "9999999"], check=False).returncode == 2
    error = capfd.readouterr().err
    assert "the server has ended" in error and "--max-model-len=9999999" in error
