"""`nanovllm serve` and `nanovllm batch` before an engine or Ray is asked for anything: options and refusals."""

import argparse
import sys
from pathlib import Path

import pytest

from nanovllm.cli import main as cli
from nanovllm.cli.flags import add_engine_flags, add_model_flag
from nanovllm.cli.main import MAX_STEP_MS, serving_options

BATCH = ("batch", "--model", "demo", "--input", "x.jsonl", "--output", "out")


def test_serve_steps_are_bounded_unless_the_flags_say_otherwise() -> None:
    for flags, max_step_ms in (([], MAX_STEP_MS), (["--max-step-ms", "50"], 50.0), (["--no-chunked-prefill"], None)):
        parser = argparse.ArgumentParser()
        add_model_flag(parser)
        add_engine_flags(parser)
        options = serving_options(parser.parse_args(["--model", "demo", "--device", "cpu", *flags]))
        assert options.get("max_step_ms") == max_step_ms and options["device"] == "cpu"


def test_batch_bad_flag_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, message in (
        ("--num-engines", "0", "--num-engines=0 must be between"),
        ("--top-p", "9", "--top-p=9.0 must be"),
        ("--ray-address", "ray://head:10001", "--ray-address='ray://head:10001' must be host:port"),
        ("--num-gpu-blocks", "8", "--num-gpu-blocks applies only to CPU offload"),
    ):
        assert cli.main([*BATCH, flag, value]) == 2
        assert message in capsys.readouterr().err


def test_batch_without_ray_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(BATCH) == 2
    assert "nanovllm batch needs ray; run: pip install 'nanovllm[ray]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
