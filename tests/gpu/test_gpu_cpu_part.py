"""The CPU attends beside the link while CUDA graphs are replayed: exact for every split, and no edge is missing."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import OFFLOAD, Reference, greedy
from cpu_splits import ALL, RandomSplit, splitting
from gpu_llm import GpuLLM
from offload_workload import BLOCK, prompts_of
from tiny_models import write_tiny_model

from nanovllm.capabilities.cpu_attention.job import AttentionJob
from nanovllm.capabilities.cpu_attention.torch_kernel import TorchKernel
from nanovllm.engine.setup import Internals
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import CpuWorker, CudaCpuStream, CudaStream, CudaStreams, Event

pytestmark = pytest.mark.gpu

WITH_CPU = OFFLOAD | {"cpu_attention": "on", "num_gpu_blocks": 2}
SLOW_CYCLES = 2_000_000  # about 1 ms
PROMPTS = prompts_of(5 * BLOCK + 7, 3 * BLOCK + 50, 20, 4 * BLOCK)


@pytest.mark.parametrize("num_tokens", [0, 1, 63, BLOCK, BLOCK + 1, 3 * BLOCK, ALL])
def test_every_split_is_exact_in_graphs(reference: Reference, num_tokens: int) -> None:
    with GpuLLM(reference, internals=splitting(num_tokens), **WITH_CPU) as llm:
        llm.answer_and_check(PROMPTS[:1], max_tokens=12)
        llm.answer_and_check(PROMPTS, max_tokens=12)
        assert llm.num_replays["streamed"] > 20
        llm.assert_nothing_left()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_gpu_blocks", [2, 4])
def test_changing_splits_preemption_and_an_abort(reference: Reference, num_gpu_blocks: int, seed: int) -> None:
    internals = Internals(cpu_split=RandomSplit(generator=random.Random(seed)))
    with GpuLLM(reference, internals=internals, **WITH_CPU | {"num_gpu_blocks": num_gpu_blocks}) as llm:
        ids = [llm.add_request(prompt, greedy(40)) for prompt in PROMPTS]
        finished: dict[int, Any] = {}
        for num_step in range(1000):
            if llm.is_finished():
                break
            if num_step % 7 == 5:
                llm.preempt_next()
            if num_step == 30:
                llm.abort(ids[1])
            finished |= llm.step().finished
        for i in (0, 2, 3):
            llm.check(ids[i], PROMPTS[i], finished[ids[i]])
        assert any(plan.moves.cpu_spans for plan in llm.plans)
        llm.assert_nothing_left()


@pytest.mark.parametrize("cpu_attention", ["auto", "on"])
def test_measured_split_is_exact_and_reported(reference: Reference, cpu_attention: str) -> None:
    with GpuLLM(reference, **WITH_CPU | {"cpu_attention": cpu_attention}) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=12)
        stats = llm.stats()
        assert stats["cpu_attention_byte_per_s"] > 1e8 and "threads" in stats["cpu_attention"]
        assert llm.plan.link_and_cpu_decode_tok_per_s is None or llm.plan.machine.cpu_byte_per_s
        if cpu_attention == "on":
            assert stats["num_cpu_tokens"] > 0 and stats["cpu_load_byte_per_s"] > 0


def test_bf16_logits_are_as_good_as_plain_torch(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=64, hidden_size=128, max_position_embeddings=8192, dtype=torch.bfloat16)
    options = WITH_CPU | {"dtype": "bfloat16"}
    with GpuLLM(Reference(tmp_path), internals=splitting(700), **options) as llm:
        llm.assert_as_good_as_plain_torch(PROMPTS)


# -- edges: exact while the awaited side is slow, and wrong without the wait -----------------------------------------


class SlowKernel(TorchKernel):
    def attend(self, job: AttentionJob, layer: int) -> None:
        time.sleep(0.005)
        super().attend(job, layer)


class SlowQuery(CudaStream):
    """Compute takes its time before it puts the query into CPU memory. `drops`: it does not wait for the CPU."""

    drops = False

    def copy_by_kernel(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        super().copy_by_kernel(dst, src)

    def wait(self, event: Event) -> None:
        if not (self.drops and type(event).__name__ == "_Attended"):
            super().wait(event)


class ImpatientCpu(CudaCpuStream):
    """Does not wait for the query."""

    def wait(self, event: Event) -> None:
        pass


class SlowStreams(CudaStreams):
    """Streams whose awaited side is slow. `dropped`: the edge that is left out."""

    def __init__(self, device: torch.device, dropped: str) -> None:
        super().__init__(device)
        self.dropped = dropped
        self.compute = SlowQuery(None)
        self.compute.drops = dropped == "E12"

    def cpu(self, worker: CpuWorker) -> CudaCpuStream:
        stream = super().cpu(SlowKernel([0]))
        if self.dropped == "E11":
            stream.__class__ = ImpatientCpu
        return stream


def slow_llm(reference: Reference, dropped: str, enforce_eager: bool) -> GpuLLM:
    internals = splitting(
        3 * BLOCK,
        make_offload_engine=lambda spec, num_cpu_blocks, dtype, device: OffloadEngine(
            spec, num_cpu_blocks, dtype, device, SlowStreams(device, dropped)
        ),
    )
    return GpuLLM(reference, internals=internals, enforce_eager=enforce_eager, **WITH_CPU)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_exact_while_the_query_and_the_cpu_are_slow(reference: Reference, enforce_eager: bool) -> None:
    with slow_llm(reference, "", enforce_eager) as llm:
        llm.answer_and_check(PROMPTS[:2], max_tokens=6)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("dropped", ["E11", "E12"])
def test_edge_left_out_is_noticed(reference: Reference, dropped: str, enforce_eager: bool) -> None:
    with slow_llm(reference, dropped, enforce_eager) as llm, pytest.raises(AssertionError, match=r"wrongly|off"):
        llm.answer_and_check(PROMPTS[:2], max_tokens=6)
