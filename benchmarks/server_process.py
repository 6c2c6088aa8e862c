"""A server to measure or check, a model for it, and its engine without a server; server and engine are processes."""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanovllm.checkpoint.files import presets

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
READY_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 60.0
POLL_S = 0.1
STDERR = 2  # the file descriptor


class ServerError(Exception):
    """A server, or an engine without one, did not start, or ended."""


# -- a server ----------------------------------------------------------------------------------------------------


class ServerProcess:
    """A server that is started with a command on a free port, and stopped with SIGTERM as a supervisor would.

        with ServerProcess("nanovllm serve --model demo --port {port}") as server: ...

    What the server prints goes to stderr, because the last line of stdout is the benchmark's result.
    """

    def __init__(self, command: str) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
        if self.words[0] == "nanovllm":  # run the command of this checkout, with the same Python
            self.words[:1] = [sys.executable, "-m", "nanovllm"]
        if shutil.which(self.words[0]) is None:
            raise ServerError(f"there is no program {self.words[0]!r} to start a server with")
        self._start_s = time.perf_counter()
        self._process = subprocess.Popen(self.words, stdout=STDERR, start_new_session=True)
        self.pid = self._process.pid

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.stop(STOP_TIMEOUT_S if kind is None else 0.0)

    def wait_until_ready(self) -> float:
        """Wait until /health answers 200. Returns the seconds since the start."""
        while get(self.url + "/health") is None:
            if (status := self._process.poll()) is not None:
                raise ServerError(f"the server ended with status {status} before it was ready")
            if time.perf_counter() - self._start_s > READY_TIMEOUT_S:
                raise ServerError(f"/health did not answer within {READY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        return time.perf_counter() - self._start_s

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End the server with SIGTERM, and if it does not end, with SIGKILL. Returns its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        return int(self._process.returncode)


def get(url: str, api_key: str | None = None) -> Any:
    """Get the JSON at `url`, or an empty object for other content, or None without an answer of status 200."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:  # straight to the server, without a proxy
        with build_opener(ProxyHandler({})).open(Request(url, headers=headers), timeout=10) as response:
            content = response.read()
    except (URLError, OSError):  # an HTTPError is a URLError
        return None
    try:
        return json.loads(content)
    except ValueError:
        return {}


# -- a model for it ----------------------------------------------------------------------------------------------

NUM_TRAINED_TOKENS = 16_000
MAX_POSITIONS = 2**20  # so that the server's max_model_len alone limits a context
END_TOKEN = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}<|assistant|>\n"
)


def write_model(preset: str, directory: Path) -> None:
    """Write a preset's config and a tokenizer as large as its vocabulary, but no weights (load_format dummy).

    A preset has no tokenizer, and a machine without a network gets none from the hub. This tokenizer is trained on
    Python's standard library, so that text costs a server as much as with a real tokenizer.
    """
    config = json.loads(presets()[preset].read_text()) | {"max_position_embeddings": MAX_POSITIONS}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    library = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    make_tokenizer(config["vocab_size"], NUM_TRAINED_TOKENS, library).save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def make_tokenizer(vocab_size: int, num_trained_tokens: int, sources: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer on files, with exactly `vocab_size` tokens, the last of which ends a text.

    Token ids beyond the trained ids are made-up words, so every token of a model with random weights has text.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    num_trained_tokens = min(num_trained_tokens, vocab_size - 1)
    trainer = trainers.BpeTrainer(vocab_size=num_trained_tokens, initial_alphabet=alphabet, show_progress=False)
    trained.train(sources, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    made_up = (word for word in _made_up_words() if word not in vocab)
    while len(vocab) < vocab_size - 1:
        vocab[next(made_up)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge) for merge in model["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True, normalized=False)])
    assert tokenizer.get_vocab_size() == vocab_size, f"{tokenizer.get_vocab_size()} tokens instead of {vocab_size}"
    return tokenizer


def _made_up_words() -> Iterator[str]:
    """Words with a space before them, in byte-level form: Ġaa, Ġab, ..."""
    for length in count(2):
        yield from ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=length))


# -- its engine without a server ---------------------------------------------------------------------------------


class EngineProcess:
    """The engine of a server's command in a separate process: LLM.generate instead of HTTP."""

    def __init__(self, command: Sequence[str]) -> None:
        words = [sys.executable, "-m", "benchmarks.server_process", *command]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()  # the end of its stdin ends the process

    def run(self, requests: Sequence[Json]) -> float:
        """Return the seconds of these requests together. Each has `prompt_token_ids`, `max_tokens` and
        `temperature`.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended, and so has its stdout
            print(json.dumps(requests), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(f"the engine's process ended with status {self._process.wait()}")
        return float(line)


def serve_engine(command: list[str]) -> None:
    """The other end of EngineProcess: each line of stdin is a list of requests, each line of stdout has its seconds."""
    from nanovllm import LLM, SamplingParams
    from nanovllm.entrypoints.cli.flags import add_engine_flags, add_model_flag, engine_options

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(STDERR, sys.stdout.fileno())  # other output must not mix with the answers
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_model_flag(parser)
    add_engine_flags(parser)
    args, _ = parser.parse_known_args(command)  # the server's options are ignored
    with LLM(args.model, **engine_options(args)) as llm:
        for requests in map(json.loads, sys.stdin):
            prompts = [request.pop("prompt_token_ids") for request in requests]
            params = [SamplingParams(ignore_eos=True, **request) for request in requests]
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            print(time.perf_counter() - start_s, file=answers, flush=True)


if __name__ == "__main__":
    serve_engine(sys.argv[1:])
