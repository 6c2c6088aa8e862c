"""Rows that a GPU hands to threads of the CPU: in Triton's interpreter, and on a GPU."""

import pytest
import torch
from cpu_experts_cases import Case
from interpreter import INTERPRETED, needs_triton, on_device

from nanovllm.capabilities.cpu_attention.job import CpuKernel
from nanovllm.capabilities.cpu_attention.kernels import KERNEL_NAMES, choose_kernel
from nanovllm.capabilities.cpu_experts.job import EXCHANGE_SIZE
from nanovllm.device.cuda import pinned_view
from nanovllm.errors import ConfigError

pytestmark = needs_triton
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16


def open_kernel(name: str) -> CpuKernel:
    try:
        return choose_kernel([0, 1], name)
    except ConfigError as error:
        pytest.skip(str(error))


@on_device
@pytest.mark.parametrize("name", KERNEL_NAMES[::-1])  # the first one runs everywhere
def test_the_cpu_computes_what_a_gpu_sends(name: str, device: str) -> None:
    """Layers in any order, one to all tokens, and rows of padding, whose experts are not read."""
    from nanovllm.kernels.expert_exchange import ExchangedRows, receive, send

    is_gpu, size = device == "cuda", 1056 if INTERPRETED else 2048
    case = Case("BF16", dtype=DTYPE, num_tokens=5, hidden_size=size, num_layers=2, absent=())
    job, exchange = case.job, torch.zeros(EXCHANGE_SIZE, dtype=torch.int32)
    x, experts, weights = (each.to(device) for each in (job.x.clone(), job.experts.long(), job.weights.clone()))
    expected = [case.expected(layer) for layer in range(2)]
    if is_gpu:
        for part in ("x", "experts", "weights", "out"):
            setattr(job, part, getattr(job, part).pin_memory())
        job = type(job)(job.store, x=job.x, experts=job.experts, weights=job.weights, out=job.out)
        exchange = exchange.pin_memory()

    def on_gpu(host: torch.Tensor) -> torch.Tensor:
        return pinned_view(host, torch.device(device)) if is_gpu else host

    shared = [on_gpu(each) for each in (job.x, job.experts, job.weights, job.out)]
    rows = ExchangedRows(*shared, on_gpu(exchange), torch.zeros(2, dtype=torch.int32, device=device))
    kernel = open_kernel(name)
    server = kernel.serve_experts(job, exchange)
    for layer, num_tokens, num_padding in ((1, 5, 0), (0, 1, 0), (0, 5, 2), (1, 2, 1)):
        for each in (job.x, job.out):
            each.fill_(torch.nan)
        cells = torch.tensor([0] * (num_tokens - num_padding) + [-1] * num_padding, device=device)
        own = slice(num_tokens)
        send(rows, layer, x[own], experts[own], weights[own], cells if num_padding else None)
        out = receive(rows, x[own]).cpu()
        torch.testing.assert_close(
            out[: len(out) - num_padding].double(), expected[layer][: len(out) - num_padding], rtol=0.02, atol=0.02
        )
        assert not out[num_tokens - num_padding :].any(), "no expert of a padding row is computed"
        assert (job.experts[num_tokens - num_padding : num_tokens] == -1).all()
    assert exchange[0] == 4
    server.close()
    kernel.close()


@pytest.mark.gpu
def test_graphs_of_layers_need_no_call_of_the_host() -> None:
    """Replays of a graph with many layers, without a wait between them, give what each layer alone gives."""
    from nanovllm.kernels.expert_exchange import ExchangedRows, receive, send

    case = Case("INT4", dtype=torch.bfloat16, num_tokens=4, hidden_size=2048, num_layers=3, absent=())
    job = case.job.of_rows(case.store, 4, case.num_chosen, torch.bfloat16, is_pinned=True)
    exchange = torch.zeros(EXCHANGE_SIZE, dtype=torch.int32).pin_memory()
    device = torch.device("cuda", torch.cuda.current_device())
    shared = [pinned_view(each, device) for each in (job.x, job.experts, job.weights, job.out, exchange)]
    rows = ExchangedRows(*shared, torch.zeros(2, dtype=torch.int32, device=device))
    x, experts, weights = case.job.x.to(device), case.job.experts.long().to(device), case.job.weights.to(device)
    kernel = choose_kernel([0, 1])
    server = kernel.serve_experts(job, exchange)

    def run() -> list[torch.Tensor]:
        outs = []
        for layer in (0, 1, 2) * 8:
            send(rows, layer, x, experts, weights)
            outs.append(receive(rows, x))
        return outs

    expected = [out.clone() for out in run()]
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        outs = run()
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, each) for out, each in zip(outs, expected, strict=True))
    torch.testing.assert_close(expected[1].double().cpu(), case.expected(1), rtol=0.05, atol=0.05)
    server.close()
    kernel.close()
