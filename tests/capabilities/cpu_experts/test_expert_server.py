"""Jobs of experts that wait for the GPU, among jobs of attention."""

import time

import pytest
import torch
from cpu_attention_cases import Case as AttentionCase
from cpu_attention_cases import mixed_rows
from cpu_experts_cases import Case
from waiting import wait_until

from nanovllm.capabilities.cpu_attention.torch_kernel import TorchKernel


def new_flags() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32)


def wait_for(flags: torch.Tensor, number: int) -> None:
    wait_until(lambda: int(flags[1]) >= number)


def test_server_reads_the_route_when_it_has_arrived(open_kernel) -> None:
    """The GPU writes the chosen experts after the job has been submitted."""
    kernel, flags, case = open_kernel(), new_flags(), Case("Q4_K", dtype=torch.bfloat16)
    server = kernel.serve(flags)
    experts = case.job.experts.clone()
    case.job.experts.fill_(-1)
    server.submit(case.job, 0, 1)
    time.sleep(0.01)
    assert flags.tolist() == [0, 0] and case.job.out.isnan().all()
    case.job.experts.copy_(experts)
    flags[0] = 1
    wait_for(flags, 1)
    case.check()
    server.close()


def test_server_runs_two_queued_jobs_in_order(open_kernel) -> None:
    """The second layer's job is queued while the first waits. Both use the same buffers and scratch."""
    flags, case = new_flags(), Case("INT4", num_layers=2)
    server = open_kernel(3).serve(flags)
    for number in (1, 2):
        server.submit(case.job, number - 1, number)
    for number in (1, 2):
        case.forget()
        flags[0] = number
        wait_for(flags, number)
        case.check(number - 1)
    server.close()


def test_server_alternates_between_attention_and_experts(open_kernel) -> None:
    """As in the layers of a mixture whose keys are not all on the GPU."""
    flags, experts, attention = new_flags(), Case("Q8_0", num_layers=2), AttentionCase(mixed_rows(2), torch.bfloat16)
    server = open_kernel().serve(flags)
    for number in range(1, 41, 2):
        layer = number // 2 % 2
        attention.forget()
        experts.forget()
        server.submit(attention.job, layer, number)
        server.submit(experts.job, layer, number + 1)
        flags[0] = number
        wait_for(flags, number)
        attention.check(layer)
        flags[0] = number + 1
        wait_for(flags, number + 1)
        experts.check(layer)
    server.close()


def test_server_closed_drops_experts_that_wait(open_kernel) -> None:
    flags, case = new_flags(), Case("Q4_0")
    server = open_kernel().serve(flags)
    server.submit(case.job, 0, 1)
    server.close()
    assert case.job.out.isnan().all() and int(flags[1]) > 1000


def test_torch_server_job_that_raises_spoils_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    flags, case, kernel = new_flags(), Case("Q4_0"), TorchKernel([0])
    server = kernel.serve(flags)
    case.job.out.zero_()
    monkeypatch.setattr(case.store.layers[0].gate, "values", lambda place: 1 / 0)
    server.submit(case.job, 0, 1)
    flags[0] = 1
    wait_for(flags, 1)
    assert case.job.out.isnan().all()
    with pytest.raises(ZeroDivisionError):
        server.close()
    kernel.close()


def test_layer_that_does_not_exist_is_refused(open_kernel) -> None:
    kernel, case = open_kernel(), Case("Q4_0")
    for layer in (-1, 1):
        with pytest.raises(AssertionError, match=f"layer {layer} of 1"):
            kernel.attend(case.job, layer)
