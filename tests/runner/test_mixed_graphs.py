"""MixedGraphs without a GPU: what a graph would hold is launched at each replay, on the same static inputs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checked_engine import CheckedLLM, Reference, cache_options
from cpu_runner import HostlessTorch, graph_buffers
from offload_workload import BLOCK, prompts_of

from nanovllm.attention.base import PagedBatch, PartialAttention
from nanovllm.plan.step_limits import MAX_GRAPH_CHUNKS, MixedSize
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.cuda_graphs import MixedGraphs
from nanovllm.runner.step_runner import GraphSet
from nanovllm.sampling_params import SamplingParams

PROMPTS = prompts_of(1, 17, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 5 * BLOCK + 1)
MAX_ROWS = 40


class DeviceLensBackend(HostlessTorch):
    """Takes queries from the middle of a buffer, as a kernel in a graph does. Rows of no sequence get garbage."""

    def attend(
        self,
        q_THD: torch.Tensor,
        k_NPKD: torch.Tensor,
        v_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        assert batch.host is None and batch.causal
        own = slice(int(batch.cu_seqlens_q[0]), int(batch.cu_seqlens_q[-1]))
        out = PartialAttention(torch.full_like(q_THD, 7.0), torch.full((q_THD.shape[1], len(q_THD)), 7.0))
        if own.stop > own.start:
            batch = replace(batch, cu_seqlens_q=batch.cu_seqlens_q - own.start)
            part = super().attend(q_THD[own], k_NPKD, v_NPKD, batch, scale, sinks_H)
            out.out_THD[own], out.lse_HT[:, own] = part
        return out


class MixedLLM(CheckedLLM):
    """An engine on a CPU whose steps with short chunks are replayed. `used`: their sizes."""

    def __init__(self, reference: Reference, **options: Any) -> None:
        super().__init__(reference, **options)
        runner: Any = self.runner
        buffers = graph_buffers(runner, MAX_ROWS)
        self.mixed = MixedGraphs(buffers, runner.memory, runner.model.config.hidden_size)
        sizes = self.mixed.sizes
        self.mixed._graphs = {size: [SimpleNamespace(replay=lambda size=size: self._run_size(size))] for size in sizes}
        self.used: list[MixedSize] = []
        graphs: Any = SimpleNamespace(
            find=lambda *args: None, mixed=self.mixed, buffers=buffers, kinds=[], reset=lambda: None
        )
        graphs.find_mixed = lambda plan: GraphSet.find_mixed(graphs, plan)
        graphs.share = lambda sampled_ids: GraphSet.share(graphs, sampled_ids)
        runner.steps.graphs = graphs

    @torch.inference_mode()
    def _run_size(self, size: MixedSize) -> None:
        runner: Any = self.runner
        self.used.append(size)
        self.mixed._hidden.fill_(torch.nan)
        own, runner.memory.backend = runner.memory.backend, DeviceLensBackend()
        self.mixed.launch_kernels(runner.model, size)
        runner.memory.backend = own


def num_chunk_tokens(plan: StepPlan) -> int:
    return sum(step.num_tokens for step in plan.sequences if step.num_tokens > 1)


@pytest.mark.parametrize("num_gpu_blocks", [None, 24, 3], ids=["all-GPU", "resident", "streamed"])
def test_replayed_steps_give_the_logits_of_transformers(reference: Reference, num_gpu_blocks: int | None) -> None:
    """Steps that stream keys do not come here; short prompts do, also there."""
    with MixedLLM(reference, **cache_options(num_gpu_blocks)) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=6)
        llm.answer_and_check(prompts_of(5, 9), max_tokens=3)
        with_chunks = [plan for plan in llm.plans if not plan.is_decode]
        assert llm.used and (
            num_gpu_blocks == 3 or len(llm.used) == sum(num_chunk_tokens(plan) <= 1024 for plan in with_chunks)
        )
        llm.assert_nothing_left()


def test_answers_run_beside_chunks_of_other_prompts(reference: Reference) -> None:
    """Their tokens are those of the step before, which the host may not know when the step is launched."""
    with MixedLLM(reference, **cache_options(None)) as llm:
        ids = [llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=12)) for prompt in PROMPTS[:3]]
        llm.step()
        ids += [llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=3)) for prompt in PROMPTS[3:]]
        finished = llm.finish_all()
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            llm.check(request_id, prompt, finished[request_id])
        beside = [p for p in llm.plans if not p.is_decode and p.sequences[0].num_tokens == 1]
        assert beside and len(llm.used) >= 2


def test_size_fits_tokens_rows_and_chunks(reference: Reference) -> None:
    with MixedLLM(reference, **cache_options(None)) as llm:
        find = llm.mixed.find_size

        def plan(num_rows: int, *chunks: int) -> Any:
            lens = [1] * num_rows + list(chunks)
            return SimpleNamespace(sequences=[SimpleNamespace(num_tokens=n) for n in lens], num_tokens=sum(lens))

        assert find(plan(0, 3)) == (4, 64)
        assert find(plan(4, 64)) == (4, 64)
        assert find(plan(5, 64)) == (32, 64)
        assert find(plan(4, 65)) == (4, 128)
        assert find(plan(33, 2)) == (40, 64)
        assert find(plan(40, 1024)) == (40, 1024)
        assert find(plan(41, 2)) is None
        assert find(plan(0, 1025)) is None
        assert find(plan(0, *[5] * MAX_GRAPH_CHUNKS)) == (4, 64)
        assert find(plan(0, *[5] * (MAX_GRAPH_CHUNKS + 1))) is None
        assert find(plan(2, 5, 1)) == (4, 64), "a single token behind a chunk is a chunk"


def test_rows_of_padding_store_nothing(reference: Reference) -> None:
    """After a longer step has left its cells in the buffer."""
    with MixedLLM(reference, **cache_options(None)) as llm:
        llm.answer_and_check(prompts_of(200), max_tokens=2)
        before = [cache.clone() for cache in llm.runner.memory.cache]
        llm.plans.clear()
        llm.answer_and_check(prompts_of(20), max_tokens=1)
        assert llm.used[-1] == (4, 64)
        written = {block for plan in llm.plans for step in plan.sequences for block in step.block_table}
        for old, new in zip(before, llm.runner.memory.cache, strict=True):
            for block in set(range(new.shape[1])) - written:
                assert torch.equal(old[:, block].nan_to_num(), new[:, block].nan_to_num())
