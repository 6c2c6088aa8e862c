"""`nanovllm launch`: starts a server and a coding agent that uses it, and ends the server with the agent.

docs/agents.md has the same settings. Here they are environment variables and arguments, so that no file of the agent is
changed. The server's process has another session, so that Ctrl-C at the agent does not reach the server. The server
also ends if this process is killed.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.entrypoints.cli.flags import add_command, add_engine_flags, add_flags, as_flags, given_fields
from nanovllm.entrypoints.server.options import ServerOptions, bind, url_of
from nanovllm.errors import ConfigError
from nanovllm.models.demo_model import model_path
from nanovllm.utils.interrupt import ended_by_sigterm

KEY_VARIABLE = "NANOVLLM_API_KEY"
MIN_CONTEXT = 32_768  # the prompt and the tools of an agent have up to 20,000 tokens
LARGE_CONTEXT = 65_536  # from here on, Claude Code has room for its longest answer by default
MAX_ANSWER_TOKENS = 8192  # in a smaller context
POLL_S = 0.2
END_S = 10.0  # time in which the server ends after a signal
LOG_LINES = 15  # that are shown if the server does not start
EXAMPLE = """\
examples:
  nanovllm launch claude Qwen/Qwen3-8B --max-model-len 65536 --enable-cpu-offload
  nanovllm launch codex model.gguf -- exec "Find the bug in parser.py."
  nanovllm launch opencode --url http://127.0.0.1:8000

What follows -- goes to the agent. Exit status: the agent's; 1 if the agent is not installed or the server fails; 2 for
bad input.
"""


class Server(NamedTuple):
    """A server that an agent is to use. url: without /v1. context: the most tokens of a request."""

    url: str
    key: str
    model: str
    context: int


class Start(NamedTuple):
    """How an agent is started."""

    arguments: list[str]
    variables: dict[str, str]


class Agent(NamedTuple):
    package: str  # on npm, with the version that was tested
    start: Callable[[Server], Start]


def start_claude(server: Server) -> Start:
    variables = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.key, "ANTHROPIC_MODEL": server.model}
    variables |= {f"ANTHROPIC_DEFAULT_{name}_MODEL": server.model for name in ("OPUS", "SONNET", "HAIKU")}
    variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.context)
    if server.context < LARGE_CONTEXT:
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(MAX_ANSWER_TOKENS)
    return Start([], variables | {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})


def start_codex(server: Server) -> Start:
    provider = {"name": "nanovllm", "base_url": f"{server.url}/v1", "env_key": KEY_VARIABLE, "wire_api": "responses"}
    settings: dict[str, Any] = {"model": server.model, "model_provider": "nanovllm"}
    settings |= {"model_context_window": server.context, "web_search": "disabled"}
    settings |= {f"model_providers.nanovllm.{name}": value for name, value in provider.items()}
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Start(arguments, {KEY_VARIABLE: server.key})


def start_opencode(server: Server) -> Start:
    limit = {"context": server.context, "output": min(MAX_ANSWER_TOKENS, server.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    settings = {"model": f"nanovllm/{server.model}", "provider": {"nanovllm": provider}}
    return Start([], {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


AGENTS = {
    "claude": Agent("@anthropic-ai/claude-code@2.1.332", start_claude),
    "codex": Agent("@openai/codex@0.171.0", start_codex),
    "opencode": Agent("opencode-ai@1.18.33", start_opencode),
}


# -- the command -------------------------------------------------------------------------------------------------------


def add_launch_command(commands: Any, serve: Callable[[argparse.Namespace], int]) -> None:
    """serve: a function of a module that runs `nanovllm serve` with these arguments, in another process."""
    about = "start a server and a coding agent that uses it"
    parser = add_command(commands, "launch", about, run_launch, (Config, ServerOptions), EXAMPLE)
    parser.set_defaults(serve=serve)
    parser.takes_rest = True  # type: ignore[attr-defined]
    what = parser.add_argument_group("what to start")
    what.add_argument("agent", metavar="AGENT", help=f"one of {', '.join(AGENTS)}")
    what.add_argument("model", nargs="?", metavar="MODEL", help="as for nanovllm serve; or give --url")
    what.add_argument("--url", metavar="URL", help="use this server, instead of starting one")
    what.add_argument("--print", action="store_true", help="print the settings and the command, and start nothing")
    add_flags(parser, ServerOptions, without=("host", "port"))
    add_engine_flags(parser, without=("skip_tokenizer_init",))


def run_launch(args: argparse.Namespace) -> int:
    if args.agent not in AGENTS:
        raise ConfigError(f"the agent {args.agent!r} is not known; choose one of {', '.join(AGENTS)}")
    if (args.model is None) == (args.url is None):
        raise ConfigError("launch needs a model or a server; give MODEL or --url, and not both")
    agent, program = AGENTS[args.agent], shutil.which(args.agent)
    is_missing = program is None and not args.print
    if program is None or args.print:
        if is_missing:
            print(f"nanovllm: {args.agent} is not installed; run: npm install -g {agent.package}", file=sys.stderr)
        print(_settings_text(args, agent))
        return int(is_missing)
    key = _key(args)
    if args.url is not None:
        return _run_agent(program, agent, find_server(_base_url(args.url), key), args.rest)
    with ended_by_sigterm(), _server(args, key) as server:
        return _run_agent(program, agent, server, args.rest)


def _key(args: argparse.Namespace) -> str:
    """Return the key for the server, or a word that takes its place."""
    if (path := getattr(args, "api_key_file", None)) is not None:
        from nanovllm.entrypoints.server.gate import read_api_keys

        return read_api_keys(path, os.environ)[0]
    return os.environ.get(KEY_VARIABLE, "none")


def _settings_text(args: argparse.Namespace, agent: Agent) -> str:
    """Return the commands of a shell that start the server, if there is none, and the agent."""
    key = "none" if _key(args) == "none" else "KEY"
    if args.url is not None:
        server, lines = find_server(_base_url(args.url), _key(args))._replace(key=key), []
    else:
        options = given_fields(args, Config)
        model = config_without_weights(model_path(args.model), options.get("hf_overrides"))
        context = options.get("max_model_len") or model.max_model_len_limit
        server = Server("http://127.0.0.1:8000", key, _names(args)[0], context)
        serve = ("nanovllm", "serve", "--model", args.model, "--served-model-name", server.model)
        flags = as_flags(args, Config, ["max_model_len"]) + as_flags(args, ServerOptions, ["served_model_name"])
        lines = [shlex.join([*serve, "--max-model-len", str(context), *flags])]
    start = _start_of(agent, server)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in start.variables.items()]
    return "\n".join([*lines, shlex.join([args.agent, *start.arguments, *args.rest])])


def _start_of(agent: Agent, server: Server) -> Start:
    """Return how to start the agent, and warn on stderr if requests to the server are too short for it."""
    if server.context < MIN_CONTEXT:
        message = f"requests can have {server.context:,} tokens; coding agents need at least {MIN_CONTEXT:,}"
        print(f"nanovllm: {message}", file=sys.stderr)
    return agent.start(server)


def _run_agent(program: str, agent: Agent, server: Server, rest: Sequence[str]) -> int:
    """Run the agent in this terminal, and return its exit status."""
    start = _start_of(agent, server)
    environment = _without_proxy(os.environ, server.url) | start.variables
    previous = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the agent, which starts with the default
    try:
        return subprocess.run([program, *start.arguments, *rest], env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, previous)


def _without_proxy(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return the variables, with which agents ask the server itself even where there is a proxy."""
    hosts = [environment.get("NO_PROXY"), environment.get("no_proxy"), urlsplit(url).hostname]
    without = ",".join(dict.fromkeys(host for host in hosts if host))
    return {**environment, "NO_PROXY": without, "no_proxy": without}


# -- the server --------------------------------------------------------------------------------------------------------


def find_server(url: str, key: str) -> Server:
    """Ask a server for its model and context. Raises ConfigError if it does not answer."""
    try:
        (card, *_) = json.loads(_get(f"{url}/v1/models", key))["data"]
        context = card.get("max_request_tokens") or card["max_model_len"]
        return Server(url, key, str(card["id"]), int(context))
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f"start it with nanovllm serve, and set {KEY_VARIABLE} if it has a key"
        raise ConfigError(f"the server at {url} does not tell its model ({error}); {remedy}") from error


def _base_url(url: str) -> str:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--url={url} must begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def _get(url: str, key: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return bytes(response.read())


@contextmanager
def _server(args: argparse.Namespace, key: str) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it with the block."""
    with bind("127.0.0.1", 0) as bound:
        url = url_of(bound)
    args.port, args.served_model_name = urlsplit(url).port, _names(args)
    args.drain_s = getattr(args, "drain_s", 0.0)  # with the agent, its requests have ended
    descriptor, name = tempfile.mkstemp(prefix="nanovllm-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(args.serve, args, log))
    process.start()
    try:
        print(f"nanovllm: starting {args.model}; its log is {log}", file=sys.stderr)
        _wait_for(url, process, log)
        yield find_server(url, key)
    finally:
        _end(process)
    log.unlink()


def _names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names by which the model is served: those given, or the last part of MODEL."""
    return tuple(getattr(args, "served_model_name", ())) or (Path(args.model).resolve().name.removesuffix(".gguf"),)


def _wait_for(url: str, process: BaseProcess, log: Path) -> None:
    """Wait until the server answers. Raises ConfigError, with the end of the log, if it ends instead."""
    while True:
        if process.exitcode is not None:
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise ConfigError("\n".join([f"the server has ended; its log, {log}, ends with:", *lines]))
        with suppress(OSError):
            _get(f"{url}/health", "none")
            return
        time.sleep(POLL_S)


def _end(process: BaseProcess) -> None:
    for _ in range(2):  # a second signal ends a server at once
        process.terminate()
        process.join(END_S)
        if process.exitcode is not None:
            return
    process.kill()
    process.join()


def _serve(serve: Callable[[argparse.Namespace], int], args: argparse.Namespace, log: Path) -> None:
    """Run the server in this new process, which logs to a file and ends with its parent."""
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child"

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.exit(serve(args))
