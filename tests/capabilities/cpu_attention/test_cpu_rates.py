"""The rates of the link and the CPU that start-up measures while both are busy, whichever of the two is slower."""

import threading
from pathlib import Path

import pytest
import torch
from checked_engine import OFFLOAD
from cpu_splits import splitting
from tiny_models import write_tiny_model
from virtual_clock import VirtualClock

from nanovllm import LLM, SamplingParams
from nanovllm.capabilities.cpu_attention import rates as cpu_rates
from nanovllm.capabilities.cpu_attention.job import AttentionJob
from nanovllm.capabilities.cpu_attention.queue import CpuAttention
from nanovllm.capabilities.cpu_attention.rates import measure_split, measure_together, with_rates
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import ImmediateStreams
from nanovllm.plan.kv_spec import KVCacheSpec

LINK_BYTE_PER_S = 5e9


class TimedStreams(ImmediateStreams):
    """A link with a fixed rate: `synchronize` takes as long as all copies would have taken."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.h2d = self  # type: ignore[assignment]
        self.num_bytes = 0

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.num_bytes += src.nbytes

    def synchronize(self) -> None:
        self.clock.pass_time(self.num_bytes / LINK_BYTE_PER_S)
        self.num_bytes = 0


class TimedKernel:
    """A CPU with a fixed rate while the link is busy, when another thread calls it. Otherwise it is 20 times as fast,
    so that jobs outlast the copies.
    """

    name, num_threads = "timed", 1

    def __init__(self, byte_per_s: float, clock: VirtualClock) -> None:
        self.byte_per_s, self.clock = byte_per_s, clock

    def attend(self, job: AttentionJob, layer: int) -> None:
        num_tokens = sum(span.num_tokens for row in job.rows for span in row.spans)
        is_alone = threading.current_thread() is threading.main_thread()
        rate = self.byte_per_s * (20 if is_alone else 1)
        self.clock.pass_time(num_tokens * job.k_cache[0, 0, 0].nbytes * 2 / rate)


@pytest.mark.parametrize("cpu_byte_per_s", [2e8, 1e9, 2e10])
def test_rates_are_right_whichever_side_is_slow(cpu_byte_per_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a CPU job that outlasted the copies made the link look as slow, and auto slower than off."""
    clock = VirtualClock(monkeypatch)
    spec = KVCacheSpec(num_layers=2, block_size=4096, num_kv_heads=2, head_dim=64, itemsize=4)
    offload = OffloadEngine(spec, 16, torch.float32, torch.device("cpu"), TimedStreams(clock))
    offload.allocate_slots(2)
    offload.link_byte_per_s = LINK_BYTE_PER_S
    kernel = TimedKernel(cpu_byte_per_s, clock)
    cpu = CpuAttention(kernel, offload, num_heads=4, max_rows=64, is_pinned=False)  # type: ignore[arg-type]
    num_meetings = 0

    def meet() -> None:
        nonlocal num_meetings
        num_meetings += 1

    link_byte_per_s, rates = measure_together(offload, cpu, meet)
    assert link_byte_per_s == pytest.approx(LINK_BYTE_PER_S)
    assert [rate.num_queries for rate in rates] == list(cpu_rates.NUM_QUERIES) and num_meetings == len(rates)
    assert all(rate.byte_per_s == pytest.approx(cpu_byte_per_s) for rate in rates)
    offload.close()


def test_measured_split_is_one_that_an_engine_can_use(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=2048)
    options = OFFLOAD | {"cpu_attention": "on", "num_gpu_blocks": 2, "device": "cpu"}
    with LLM(str(tmp_path), internals=splitting(300), **options) as llm:
        runner, offload = llm.runner, llm.runner.offload
        offload.link_byte_per_s = LINK_BYTE_PER_S
        without_link = runner.apply(measure_split)
        assert without_link.link_byte_per_s is None
        split = with_rates(without_link, runner, offload, runner.memory.cpu)
        assert split.link_byte_per_s and split.link_byte_per_s > 0 and split.idle_s > 0
        assert [rate.num_queries for rate in split.cpu_rates] == list(cpu_rates.NUM_QUERIES)
        assert all(rate.byte_per_s > 0 for rate in split.cpu_rates)
        assert split.token_bytes == 2 * 2 * 16 * 4 and split.is_forced
        prompt = list(range(3, 300)) * 4
        output = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        assert len(output["token_ids"]) == 4  # what was measured has left nothing behind
