"""Layers of experts that begin when the GPU has written what they need, beside jobs of attention."""

import threading
import time

import pytest
import torch
from cpu_attention_cases import Case as AttentionCase
from cpu_attention_cases import mixed_rows
from cpu_experts_cases import Case
from waiting import LIMIT_S, wait_until

from nanovllm.capabilities.cpu_attention.torch_kernel import TorchKernel
from nanovllm.capabilities.cpu_experts.job import ARRIVED, DONE, EXCHANGE_SIZE, LAYER, NUM_TOKENS


class Gpu:
    """Does what the GPU's kernels do."""

    def __init__(self) -> None:
        self.exchange = torch.zeros(EXCHANGE_SIZE, dtype=torch.int32)

    def begin(self, layer: int, num_tokens: int) -> None:
        self.exchange[LAYER], self.exchange[NUM_TOKENS] = layer, num_tokens
        self.exchange[ARRIVED] += 1

    def wait(self) -> None:
        wait_until(lambda: int(self.exchange[DONE]) == int(self.exchange[ARRIVED]))


def test_server_reads_the_route_when_it_has_arrived(open_kernel) -> None:
    kernel, gpu, case = open_kernel(), Gpu(), Case("Q4_K", dtype=torch.bfloat16)
    server = kernel.serve_experts(case.job, gpu.exchange)
    experts = case.job.experts.clone()
    case.job.experts.fill_(-1)
    time.sleep(0.01)
    assert gpu.exchange[DONE] == 0 and case.job.out.isnan().all()
    case.job.experts.copy_(experts)
    gpu.begin(0, case.num_tokens)
    gpu.wait()
    case.check()
    server.close()


def test_server_computes_the_layer_and_the_tokens_that_the_gpu_names(open_kernel) -> None:
    gpu, case = Gpu(), Case("INT4", num_layers=2, num_tokens=5)
    server = open_kernel(3).serve_experts(case.job, gpu.exchange)
    for layer, num_tokens in ((1, 5), (0, 2), (1, 1)):
        case.forget()
        gpu.begin(layer, num_tokens)
        gpu.wait()
        assert case.job.out[num_tokens:].isnan().all()
        case.job.out[num_tokens:] = case.expected(layer)[num_tokens:]
        case.check(layer)
    server.close()


def test_threads_alternate_between_attention_and_experts(open_kernel) -> None:
    """As in the layers of a mixture whose keys are not all on the GPU."""
    gpu, flags = Gpu(), torch.zeros(2, dtype=torch.int32)
    experts, attention = Case("Q8_0", num_layers=2), AttentionCase(mixed_rows(2), torch.bfloat16)
    kernel = open_kernel()
    servers = kernel.serve(flags), kernel.serve_experts(experts.job, gpu.exchange)
    for number in range(1, 21):
        layer = number % 2
        attention.forget()
        experts.forget()
        servers[0].submit(attention.job, layer, number)
        flags[0] = number
        wait_until(lambda number=number: int(flags[1]) >= number)
        attention.check(layer)
        gpu.begin(layer, experts.num_tokens)
        gpu.wait()
        experts.check(layer)
    for server in servers:
        server.close()


def test_closing_releases_whoever_waits(open_kernel) -> None:
    gpu, case = Gpu(), Case("Q4_0")
    server = open_kernel().serve_experts(case.job, gpu.exchange)
    server.close()
    assert int(gpu.exchange[DONE]) > 1000


def test_torch_layer_that_raises_spoils_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, case, kernel = Gpu(), Case("Q4_0"), TorchKernel([0])
    server = kernel.serve_experts(case.job, gpu.exchange)
    case.job.out.zero_()
    monkeypatch.setattr(case.store.layers[0].gate, "values", lambda place: 1 / 0)
    gpu.begin(0, case.num_tokens)
    gpu.wait()
    assert case.job.out.isnan().all()
    with pytest.raises(ZeroDivisionError):
        server.close()
    kernel.close()


def test_torch_computes_a_layer_that_arrives_during_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a step that was cut short left a layer nobody waited for. The layer that came next was taken for
    done when that one was.
    """
    gpu, case, kernel = Gpu(), Case("Q4_0", num_layers=2), TorchKernel([0])
    server = kernel.serve_experts(case.job, gpu.exchange)
    run, has_begun, may_go_on = case.job.run_in_torch, threading.Event(), threading.Event()

    def slow(layer: int) -> None:
        has_begun.set()
        assert may_go_on.wait(LIMIT_S)
        run(layer)

    monkeypatch.setattr(case.job, "run_in_torch", slow)
    gpu.begin(0, case.num_tokens)
    assert has_begun.wait(LIMIT_S)
    gpu.begin(1, case.num_tokens)
    may_go_on.set()
    gpu.wait()
    case.check(1)
    server.close()
    kernel.close()


def test_layer_that_does_not_exist_is_refused(open_kernel) -> None:
    kernel, case = open_kernel(), Case("Q4_0")
    for layer in (-1, 1):
        with pytest.raises(AssertionError, match=f"layer {layer} of 1"):
            kernel.compute_experts(case.job, layer)
