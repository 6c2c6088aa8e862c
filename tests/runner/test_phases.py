"""Phases: seconds by phase."""

import time

import pytest

from nanovllm.runner.model_runner import Phases


def test_phases_add_up_in_order_and_count_what_was_raised() -> None:
    phases = Phases()
    for _ in range(2):
        with phases("one"):
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), phases("two"):
        _ = 1 / 0
    assert list(phases.seconds) == ["one", "two"]
    assert phases.seconds["one"] >= 0.04 and phases.seconds["two"] < 0.02
    phases.seconds = {"one": 1.25, "two": 0.0}
    assert str(phases) == "one 1.2 s, two 0.0 s"
