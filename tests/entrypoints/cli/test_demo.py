"""`nanovllm demo`: what it prints, and that its exit status is 0 only for the right answer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints import haystack
from nanovllm.entrypoints.cli import demo as command
from nanovllm.entrypoints.cli.main import main

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("cache_directory")
NUM_TOKENS = 2100  # eight blocks and a half
SMALL = ["demo", "--num-tokens", str(NUM_TOKENS), "--device", "cpu"]


def _last_line(text: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return figures


def test_demo_small_text_finds_the_passkey(cache_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--passkey", "q7m2x9kd"]) == 0
    text = capsys.readouterr().out
    figures = _last_line(text)
    assert figures["retrieved"] is True and figures["same_tokens"] is True
    assert figures["answer"] == "q7m2x9kd." and text.count("\nq7m2x9kd.\n") == 2
    assert figures["num_prompt_tokens"] == NUM_TOKENS
    assert figures["num_slots"] <= figures["num_blocks"] / 4
    assert figures["prefill_tok_per_s"] > 0 and figures["decode_tok_per_s"] > 0
    assert figures["num_hit_blocks"] > 0
    block_bytes = figures["slot_bytes"] // figures["num_slots"]
    # On a CPU all of them stay there, but for a step that streams blocks into the shadow
    num_streamed = figures["num_missed_blocks"] - figures["num_cpu_tokens"] // 256
    assert figures["num_cpu_tokens"] > 0 and 0 <= num_streamed <= figures["num_missed_blocks"] / 2
    assert figures["num_loaded_bytes"] == num_streamed * block_bytes
    assert figures["num_accepted_guesses"] <= figures["num_guesses"]
    assert figures["num_offloaded_bytes"] == NUM_TOKENS // 256 * block_bytes
    assert figures["cpu_pool_bytes"] == figures["num_blocks"] * block_bytes
    assert str(cache_directory) in text


def test_demo_bfloat16_and_another_seed_finds_the_passkey(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dtype", "bfloat16", "--seed", "5", "--depth", "0.9", "--num-gpu-blocks", "3"]
    assert main([*SMALL, *flags]) == 0
    figures = _last_line(capsys.readouterr().out)
    assert figures["num_slots"] == 3 and figures["passkey"] == command._draw_passkey(5) != command._draw_passkey(0)


def test_demo_passkey_not_planted_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    build = haystack.build_haystack
    monkeypatch.setattr(haystack, "build_haystack", lambda n, depth, passkey: build(n, depth, "another1"))
    assert main([*SMALL, "--passkey", "q7m2x9kd"]) == 1
    figures = _last_line(capsys.readouterr().out)
    assert figures["retrieved"] is False and figures["same_tokens"] is True
    assert figures["answer"].startswith("another1")


def test_demo_different_tokens_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(range(2))

    def answer(*args: Any) -> Any:
        output = stream(*args)
        output["token_ids"][-1] += next(answers)
        return output

    stream = command.stream_answer
    monkeypatch.setattr(command, "stream_answer", answer)
    assert main(SMALL) == 1
    figures = _last_line(capsys.readouterr().out)
    assert figures["retrieved"] is True and figures["same_tokens"] is False


def test_demo_bad_input_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, message in (
        ("--depth", "1.5", "depth=1.5"),
        ("--num-tokens", "10", "--num-tokens=10"),
        ("--num-gpu-blocks", "1", "--num-gpu-blocks=1 must be 2 or more"),
        ("--dtype", "float16", "dtype='float16'"),
        ("--passkey", "", "passkey=''"),
        ("--device", "tpu", "device='tpu'"),
    ):
        assert main([*SMALL, flag, value]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_gpu_finds_the_passkey(dtype: str) -> None:
    assert main(["demo", "--device", "cuda", "--dtype", dtype]) == 0


@pytest.mark.slow
def test_demo_of_40960_tokens_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", "demo", "--device", "cpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = _last_line(done.stdout)
    assert figures["num_prompt_tokens"] >= 40000 and figures["num_slots"] <= figures["num_blocks"] / 4
