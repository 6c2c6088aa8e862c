"""How long a step took, by the clock of the GPU."""

import time

import pytest
import torch
from virtual_clock import VirtualClock

from nanovllm.runner.step_result import StepResult


@pytest.mark.gpu
def test_seconds_are_those_of_the_gpu_whenever_the_host_looks() -> None:
    """Regression: a step counted until the host noticed its end, and the launch of the next one held that up."""
    tokens = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(1000)
    start_s = time.perf_counter()
    first = StepResult(tokens)
    torch.cuda._sleep(10**7)  # cycles, some milliseconds
    second = StepResult(tokens, end_before=first.end)
    torch.cuda.synchronize()
    most_s = time.perf_counter() - start_s
    time.sleep(0.5)  # as if the next launch took so long
    third = StepResult(tokens, end_before=second.end)
    assert third.token_ids() == [0]
    assert first.seconds() is None
    seconds = second.seconds()
    waited = third.seconds()  # the GPU has waited for this one
    assert seconds is not None and waited is not None and 1e-3 < seconds < most_s + 0.01 and waited > 0.49


def test_seconds_on_a_cpu_are_those_between_the_ends_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tokens = VirtualClock(monkeypatch), torch.zeros(1, dtype=torch.int64)
    first = StepResult(tokens)
    clock.pass_time(0.25)
    second = StepResult(tokens, end_before=first.end)
    clock.pass_time(8)
    assert first.seconds() is None and second.seconds() == 0.25


@pytest.mark.gpu
@pytest.mark.alone  # it compares times, and processes that share a GPU take turns
def test_tokens_do_not_wait_for_blocks_that_are_copied_out() -> None:
    """Regression: both used the copy engine, so with offload a step took longer by the time of its copies."""
    source = torch.zeros(64, 2**24, dtype=torch.uint8, device="cuda")
    target = torch.zeros(64, 2**24, dtype=torch.uint8, pin_memory=True)
    tokens = torch.arange(5, device="cuda")
    copies = torch.cuda.Stream()

    def was_first() -> bool:
        """Return True if the tokens arrived before the copies, by the clock of the GPU."""
        torch.cuda.synchronize()
        with torch.cuda.stream(copies):
            for row in range(len(source)):
                target[row].copy_(source[row], non_blocking=True)
        copied, arrived = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        copied.record(copies)
        result = StepResult(tokens)
        arrived.record()
        assert result.token_ids() == [0, 1, 2, 3, 4]
        torch.cuda.synchronize()
        return arrived.elapsed_time(copied) > 0

    assert any(was_first() for _ in range(10)), "even where the host was not late"
