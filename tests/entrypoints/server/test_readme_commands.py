"""The README's commands for the server do what it says, with the built-in model."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from http_server import http_server

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


def test_third_command_starts_the_server() -> None:
    commands = [line.split("#")[0].strip() for line in block_of("", "make demo").splitlines()]
    assert commands[2] == ".venv/bin/nanovllm serve demo"


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
