"""Each coding agent ends a session on a server with Qwen3.5's chat template: it reads a file, and says what is in it.

The settings are the ones in docs/agents.md. `make clients` installs the agents; their versions are in package.json.
"""

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from agent_process import DEAD_PROXY, NOTE, AgentPlace
from conftest import CONTEXT, KEY

MODULES = Path(__file__).parent / "node_modules"
REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]  # three sessions of a slow agent at most
from_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
# The package of these two that suits every machine has several times the size
for_x64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="package.json has this agent for x86-64 only")


class Agent(NamedTuple):
    """A command that runs an agent, which takes the message as its last argument. `tool` reads a file."""

    command: list[str | Path]
    env: dict[str, str]
    tool: str
    arguments: tuple[str, ...]  # a name and a value, in turn
    proxy: str | None = DEAD_PROXY


def codex(url: str, place: AgentPlace) -> Agent:
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
base_url = "{url}/v1"
env_key = "NANOVLLM_API_KEY"
wire_api = "responses"
"""
    place.write_settings(".codex/config.toml", settings)
    # The sandbox needs rights that a container may not have
    command = [MODULES / ".bin/codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    return Agent(command, {"NANOVLLM_API_KEY": KEY}, "exec_command", ("cmd", "cat note.txt"))


def claude_code(url: str, place: AgentPlace) -> Agent:
    env = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "m",
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": "m" for name in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    program = MODULES / "@anthropic-ai/claude-code/cli-wrapper.cjs"  # bin/claude.exe is for the script of the package
    command = ["node", program, "--allowedTools", "Read", "--print"]
    return Agent(command, env, "Read", ("file_path", str(place.note)))


def opencode(url: str, place: AgentPlace) -> Agent:
    """opencode asks for 32,000 tokens, even with a smaller context."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {"m": {"name": "m"}},
    }
    settings = {"autoupdate": False, "share": "disabled", "provider": {"nanovllm": provider}}
    place.write_settings(".config/opencode/opencode.json", json.dumps(settings))
    command = [MODULES / "opencode-linux-x64-baseline/bin/opencode", "run", "--model", "nanovllm/m"]
    return Agent(command, {"OPENCODE_DISABLE_MODELS_FETCH": "1"}, "read", ("filePath", str(place.note)))


def pi(url: str, place: AgentPlace) -> Agent:
    model = {"id": "m", "contextWindow": CONTEXT, "maxTokens": 8192, "reasoning": True}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": KEY, "models": [model]}
    place.write_settings(".pi/agent/models.json", json.dumps({"providers": {"nanovllm": provider}}))
    command = [MODULES / ".bin/pi", "--print", "--provider", "nanovllm", "--model", "m"]
    return Agent(command, {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}, "read", ("path", str(place.note)))


def cline(url: str, place: AgentPlace) -> Agent:
    """Its tool takes a list of objects, which the model writes as JSON."""
    name = "openai-compatible"
    chosen = {"provider": name, "apiKey": KEY, "model": "m", "baseUrl": f"{url}/v1"}
    known = {name: {"settings": chosen, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}}
    settings = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": known}
    place.write_settings(".cline/data/settings/providers.json", json.dumps(settings))
    env = {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}
    files = json.dumps([{"path": str(place.note)}])
    return Agent([MODULES / "@cline/cli-linux-x64/bin/cline"], env, "read_files", ("files", files))


def qwen_code(url: str, place: AgentPlace) -> Agent:
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "openai"}},
    }
    place.write_settings(".qwen/settings.json", json.dumps(settings))
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "m"}
    command: list[str | Path] = [MODULES / ".bin/qwen"]
    # With a proxy it would send the server's requests there, too
    return Agent(command, env, "read_file", ("file_path", str(place.note)), proxy=None)


def continue_cli(url: str, place: AgentPlace) -> Agent:
    settings = f"""
name: local
version: 1.0.0
schema: v1
models:
  - name: m
    provider: openai
    model: m
    apiBase: {url}/v1
    apiKey: {KEY}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""
    command = [MODULES / ".bin/cn", "--print", "--config", place.write_settings("config.yaml", settings)]
    env = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_METRICS_ENABLED": "0"}
    return Agent(command, env, "Read", ("filepath", str(place.note)))


AGENTS = [
    codex,
    claude_code,
    pytest.param(opencode, marks=for_x64),
    pi,
    pytest.param(cline, marks=for_x64),
    qwen_code,
    continue_cli,
]


def ask(tool: str, *arguments: str) -> str:
    """Return a message that makes the model call this tool."""
    return f"Read the note. <<call {'|'.join((tool, *arguments))}>>"


def assert_answered(printed: str) -> None:
    """The model's answer quotes the result of the tool."""
    _, found, answer = printed.rpartition("It says: ")
    assert found and NOTE.strip() in answer, printed


@from_npm
@pytest.mark.parametrize("agent", AGENTS)
def test_agent_reads_a_file(scripted_url: str, place: AgentPlace, agent: Callable[[str, AgentPlace], Agent]) -> None:
    """System messages after the first, tools of other types and too many tokens were refused."""
    command, env, tool, arguments, proxy = agent(scripted_url, place)
    assert_answered(place.run([*command, ask(tool, *arguments)], env, proxy))


@from_npm
@pytest.mark.parametrize(
    ("agent", "options"),
    [(codex, ["resume", "--last"]), (pi, ["--continue"]), pytest.param(opencode, ["--continue"], marks=for_x64)],
)
def test_agent_continues_a_session(
    scripted_url: str, place: AgentPlace, agent: Callable[[str, AgentPlace], Agent], options: list[str]
) -> None:
    """The reasoning, the calls and the answers of the first session come back, as the agent stores them."""
    command, env, tool, arguments, proxy = agent(scripted_url, place)
    place.run([*command, "Hello."], env, proxy)
    place.run([*command, *options, ask(tool, *arguments)], env, proxy)
    place.note.write_text("The word is medlar.")
    assert "The word is medlar." in place.run([*command, *options, ask(tool, *arguments)], env, proxy)


@from_npm
def test_codex_calls_a_tool_of_a_namespace(scripted_url: str, place: AgentPlace) -> None:
    """The server refused namespaces, and a call must come back with its own."""
    command, env, *_ = codex(scripted_url, place)
    printed = place.run([*command, ask("multi_agent_v1__close_agent", "target", "somebody")], env)
    assert "It says: " in printed and "unsupported call" not in printed


@from_npm
@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (codex, "ran out of room in the model's context window"),
        (claude_code, "Prompt is too long"),
        pytest.param(cline, "context window exceeded", marks=for_x64),
        (continue_cli, "Context length exceeded"),
    ],
)
def test_agent_knows_that_the_prompt_is_too_long(
    scripted_url: str, place: AgentPlace, agent: Callable[[str, AgentPlace], Agent], words: str
) -> None:
    """Agents compact their history if they recognize the error."""
    command, env, _, _, proxy = agent(scripted_url, place)
    _, printed, errors = place.run_any([*command, "word1 qz " * 11_000], env, proxy)
    assert words in printed + errors


def aider(model: str) -> list[str | Path]:
    options = "--analytics-disable --no-check-update --no-show-release-notes --no-show-model-warnings --no-git"
    return [REPOSITORY / ".venv-aider/bin/aider", "--model", f"openai/{model}", *options.split(), "--yes-always"]


def test_aider_edits_a_file(scripted_url: str, place: AgentPlace) -> None:
    """It has no tools: the model writes the whole file, between lines of ```."""
    env = {"OPENAI_API_BASE": f"{scripted_url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [*aider("m"), "--edit-format", "whole"]
    answer = "I change it.\n\nnote.txt\n```\nThe word is quince.\n```"
    printed = place.run([*command, "note.txt", "--message", f"Change the word. <<then {answer}>>"], env)
    assert "Applied edit to note.txt" in printed
    assert place.note.read_text() == "The word is quince.\n"


def test_llm_with_functions_and_a_schema(scripted_url: str, place: AgentPlace) -> None:
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
    assert_answered(place.run([*command, "--functions", functions, ask("read_note", "path", str(place.note))], env))
    answer = '{"word": "kumquat", "number": 4711}'
    formed = place.run([*command, "--schema", "word, number int", f"What does it say? <<then {answer}>>"], env)
    assert json.loads(formed) == json.loads(answer)
