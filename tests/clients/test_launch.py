"""`nanovllm launch` with the real agents: each reads a file in a session on a server that launch has started."""

import shutil
import sys
from pathlib import Path

import pytest
from agent_process import AgentPlace
from conftest import CONTEXT, KEY
from test_agents import MODULES, REPOSITORY, ask, assert_answered, for_x64, from_npm

from nanovllm.entrypoints.cli.launch import AGENTS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]
# Where each program is, the arguments for a session without a terminal, and the call that reads the note
SESSIONS = {
    "claude": ("@anthropic-ai/claude-code/cli-wrapper.cjs", "--allowedTools Read --print", "Read|file_path|{note}"),
    "codex": (
        "@openai/codex/bin/codex.js",
        "exec --skip-git-repo-check --sandbox danger-full-access",
        "exec_command|cmd|cat {note}",
    ),
    "opencode": ("opencode-linux-x64-baseline/bin/opencode", "run", "read|filePath|{note}"),
}


@from_npm
@pytest.mark.parametrize(
    "agent", [*(name for name in AGENTS if name != "opencode"), pytest.param("opencode", marks=for_x64)]
)
def test_agent_reads_a_file_in_a_session_that_launch_has_started(
    agent: str, scripted_model: Path, place: AgentPlace
) -> None:
    program, arguments, call = SESSIONS[agent]
    programs = place.home / "bin"
    programs.mkdir()
    installed, node = MODULES / program, "" if agent == "opencode" else f"{shutil.which('node')} "
    (programs / agent).write_text(f'#!/bin/sh\nexec {node}{installed} "$@"\n')
    (programs / agent).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "NANOVLLM_API_KEY": KEY}
    env |= {"OPENCODE_DISABLE_MODELS_FETCH": "1"}
    server = ["--device", "cpu", "--max-model-len", str(CONTEXT), "--num-kvcache-blocks", "512"]
    launch: list[str | Path] = [sys.executable, "-m", "nanovllm", "launch", agent, scripted_model, *server]
    message = ask(*call.format(note=place.note).split("|"))
    assert_answered(place.run([*launch, "--", *arguments.split(), message], env))
