"""Each coding agent ends a session on a server with Qwen3.5's chat template: it reads a file, and says what is in it.

The settings are those of docs/agents.md. `make clients` installs the agents; their versions are in package.json.
"""

import json
import platform
import shutil
from pathlib import Path

import pytest
from agent_process import NOTE, AgentPlace
from conftest import CONTEXT, KEY

MODULES = Path(__file__).parent / "node_modules"
REPOSITORY = Path(__file__).parents[2]
AIDER = REPOSITORY / ".venv-aider" / "bin" / "aider"

pytestmark = pytest.mark.clients
from_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
# The package of these two that suits every machine has several times the size
for_x64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="package.json has this agent for x86-64 only")


@pytest.fixture
def place(tmp_path: Path) -> AgentPlace:
    return AgentPlace(tmp_path)


def ask(tool: str, *arguments: object) -> str:
    """Return a message that makes the model call this tool. `arguments`: names and values, in turn."""
    return f"Read the note. <<call {'|'.join(map(str, (tool, *arguments)))}>>"


def assert_answered(printed: str) -> None:
    """The model's answer quotes the result of the tool."""
    _, found, answer = printed.rpartition("It says: ")
    assert found and NOTE.strip() in answer, printed


@from_npm
def test_codex(scripted_url: str, place: AgentPlace) -> None:
    settings = f"""
model = "m"
model_provider = "nanovllm"
model_context_window = {CONTEXT}
web_search = "disabled"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.nanovllm]
name = "nanovllm"
base_url = "{scripted_url}/v1"
env_key = "NANOVLLM_API_KEY"
wire_api = "responses"
"""
    place.write_settings(".codex/config.toml", settings)
    # The sandbox needs rights that a container may not have
    command = [MODULES / ".bin/codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    printed = place.run([*command, ask("exec_command", "cmd", "cat note.txt")], {"NANOVLLM_API_KEY": KEY})
    assert_answered(printed)


@from_npm
def test_claude_code(scripted_url: str, place: AgentPlace) -> None:
    env = {
        "ANTHROPIC_BASE_URL": scripted_url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": "m" for name in ("OPUS", "SONNET", "HAIKU")},
        "ANTHROPIC_MODEL": "m",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = ["node", MODULES / "@anthropic-ai/claude-code/cli-wrapper.cjs", "--allowedTools", "Read", "--print"]
    assert_answered(place.run([*command, ask("Read", "file_path", place.note)], env))


@from_npm
@for_x64
def test_opencode(scripted_url: str, place: AgentPlace) -> None:
    """It asks for 32,000 tokens, whatever the context is."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{scripted_url}/v1", "apiKey": KEY},
        "models": {"m": {"name": "m"}},
    }
    settings = {"autoupdate": False, "share": "disabled", "provider": {"nanovllm": provider}}
    place.write_settings(".config/opencode/opencode.json", json.dumps(settings))
    command = [MODULES / "opencode-linux-x64-baseline/bin/opencode", "run", "--model", "nanovllm/m"]
    env = {"OPENCODE_DISABLE_MODELS_FETCH": "1"}
    assert_answered(place.run([*command, ask("read", "filePath", place.note)], env))


@from_npm
def test_pi(scripted_url: str, place: AgentPlace) -> None:
    model = {"id": "m", "contextWindow": CONTEXT, "maxTokens": 4096, "reasoning": True}
    provider = {"baseUrl": f"{scripted_url}/v1", "api": "openai-completions", "apiKey": KEY, "models": [model]}
    place.write_settings(".pi/agent/models.json", json.dumps({"providers": {"nanovllm": provider}}))
    command = [MODULES / ".bin/pi", "--print", "--provider", "nanovllm", "--model", "m"]
    env = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
    assert_answered(place.run([*command, ask("read", "path", place.note)], env))


@from_npm
@for_x64
def test_cline(scripted_url: str, place: AgentPlace) -> None:
    """Its tool takes a list of objects, which the model writes as JSON."""
    name = "openai-compatible"
    chosen = {"provider": name, "apiKey": KEY, "model": "m", "baseUrl": f"{scripted_url}/v1"}
    known = {name: {"settings": chosen, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}}
    settings = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": known}
    place.write_settings(".cline/data/settings/providers.json", json.dumps(settings))
    files = json.dumps([{"path": str(place.note)}])
    command = [MODULES / "@cline/cli-linux-x64/bin/cline", ask("read_files", "files", files)]
    assert_answered(place.run(command, {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}))


@from_npm
def test_qwen_code(scripted_url: str, place: AgentPlace) -> None:
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    place.write_settings(".qwen/settings.json", json.dumps(settings))
    env = {"OPENAI_BASE_URL": f"{scripted_url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "m"}
    command = [MODULES / ".bin/qwen", "--approval-mode", "default"]
    # It would send the requests to the server through the proxy, too
    assert_answered(place.run([*command, ask("read_file", "file_path", place.note)], env, proxy=None))


@from_npm
def test_continue(scripted_url: str, place: AgentPlace) -> None:
    settings = f"""
name: local
version: 1.0.0
schema: v1
models:
  - name: m
    provider: openai
    model: m
    apiBase: {scripted_url}/v1
    apiKey: {KEY}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""
    path = place.write_settings("config.yaml", settings)
    command = [MODULES / ".bin/cn", "--print", "--config", path]
    env = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_METRICS_ENABLED": "0"}
    assert_answered(place.run([*command, ask("Read", "filepath", place.note)], env))


def test_aider(scripted_url: str, place: AgentPlace) -> None:
    """It has no tools: the model writes the whole file, between lines of ```."""
    env = {"OPENAI_API_BASE": f"{scripted_url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    options = "--analytics-disable --no-check-update --no-show-release-notes --no-show-model-warnings --no-git"
    command = [AIDER, "--model", "openai/m", *options.split(), "--yes-always", "--edit-format", "whole"]
    answer = "I change it.\n\nnote.txt\n```\nThe word is quince.\n```"
    printed = place.run([*command, "note.txt", "--message", f"Change the word. <<then {answer}>>"], env)
    assert "Applied edit to note.txt" in printed
    assert place.note.read_text() == "The word is quince.\n"


def test_llm(scripted_url: str, place: AgentPlace) -> None:
    settings = f"""
- model_id: m
  model_name: m
  api_base: {scripted_url}/v1
  api_key_name: nanovllm
  supports_tools: true
  supports_schema: true
"""
    place.write_settings("llm/extra-openai-models.yaml", settings)
    place.write_settings("llm/keys.json", json.dumps({"nanovllm": KEY}))
    functions = place.directory / "functions.py"
    functions.write_text('def read_note(path: str) -> str:\n    "Read a note."\n    return open(path).read()\n')
    env = {"LLM_USER_PATH": str(place.home / "llm"), "LLM_LOAD_PLUGINS": ""}
    command = [REPOSITORY / ".venv/bin/llm", "prompt", "--model", "m"]
    assert_answered(place.run([*command, "--functions", functions, ask("read_note", "path", place.note)], env))
    answer = '{"word": "kumquat", "number": 4711}'
    formed = place.run([*command, "--schema", "word, number int", f"What does it say? <<then {answer}>>"], env)
    assert json.loads(formed) == json.loads(answer)
