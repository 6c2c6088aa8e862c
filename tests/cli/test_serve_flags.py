"""The engine options of `nanovllm serve`: those of the flags, with a bound on the time of a step."""

import argparse

import pytest

from nanovllm.cli.flags import add_engine_flags, add_model_flag
from nanovllm.cli.serve import MAX_STEP_MS, serving_options


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], MAX_STEP_MS),
        (["--max-step-ms", "50"], 50.0),
        (["--no-chunked-prefill"], None),
    ],
)
def test_steps_are_bounded_unless_the_flags_say_otherwise(flags: list[str], expected: float | None) -> None:
    parser = argparse.ArgumentParser()
    add_model_flag(parser)
    add_engine_flags(parser)
    options = serving_options(parser.parse_args(["--model", "demo", "--device", "cpu", *flags]))
    assert options.get("max_step_ms") == expected and options["device"] == "cpu"
