"""Phases: seconds by phase."""

import pytest
from virtual_clock import VirtualClock

from nanovllm.runner.model_runner import Phases


def test_phases_add_up_in_order_and_count_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(monkeypatch)
    phases = Phases()
    for _ in range(2):
        with phases("one"):
            clock.pass_time(0.25)
    with pytest.raises(ZeroDivisionError), phases("two"):
        clock.pass_time(0.125)
        _ = 1 / 0
    assert list(phases.seconds.items()) == [("one", 0.5), ("two", 0.125)]
    phases.seconds = {"one": 1.25, "two": 0.0}
    assert str(phases) == "one 1.2 s, two 0.0 s"
