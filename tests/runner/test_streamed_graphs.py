"""StreamedDecodeGraphs on a model that is one attention, so that its result can be compared with the exact one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from cpu_runner import HostlessTorch
from paged_cases import PagedCase, make_paged
from rounding import MAX_ROUNDINGS, MEAN_VALUE, PART_COUNTS, num_roundings

from nanovllm.attention.base import AttentionBackend, StepAttention
from nanovllm.attention.selection import choose_backend
from nanovllm.capabilities.cpu_attention.kernels import choose_kernel
from nanovllm.capabilities.cpu_attention.queue import CpuAttention
from nanovllm.errors import ConfigError
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.offload.streams import ImmediateStreams
from nanovllm.plan.kv_spec import KVCacheSpec, StagingSizes
from nanovllm.plan.step_plan import CpuSpan, KVMoves, SamplingRow, SequenceStep, StepPlan, StreamedGroup
from nanovllm.runner.graph_inputs import GraphBuffers
from nanovllm.runner.inputs import build_inputs
from nanovllm.runner.kv_memory import OffloadMemory, cpu_rows, make_offload_engine
from nanovllm.runner.seams import CpuPart, NoCpuPart
from nanovllm.runner.streamed_graphs import StreamedDecodeGraphs

BLOCK, SCALE = 256, 0.1
PAGED_LENS = (BLOCK, BLOCK - 3)  # tokens in the last block of each sequence
NUM_SEQS = len(PAGED_LENS)
STAGING = StagingSizes(group_tokens=BLOCK, num_groups=3)


class OneAttention:
    """In place of a model: one layer, whose queries are given and whose result is kept."""

    needs_rope_lens = False

    def __init__(self, q_BHD: torch.Tensor) -> None:
        self.q_BHD, self.out_BHD = q_BHD, torch.zeros_like(q_BHD)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, rope_lens: None
    ) -> torch.Tensor:
        num_seqs = len(token_ids)
        attention.cells(0)
        out_BHD = attention.attend(0, self.q_BHD[:num_seqs])
        self.out_BHD[:num_seqs].copy_(out_BHD)
        return out_BHD.flatten(1)

    def skipping_inner_layers(self) -> AbstractContextManager[None]:
        return nullcontext()

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(hidden[:, : out.shape[1]])


def make_plan(num_groups: int, num_cpu_tokens: int = 0, num_guesses: tuple[int, ...] = (0,) * NUM_SEQS) -> StepPlan:
    """Every block but the last is streamed, a group each, so half the groups hold no key of a sequence. Or the CPU
    attends to the last tokens of the first sequence's last group.
    """
    sampling = SamplingRow()
    last = num_groups * BLOCK
    steps = tuple(
        SequenceStep(
            seq_id=seq,
            token_ids=np.zeros(1 + guesses, dtype=np.int64),
            position=last + paged_len - 1 - guesses,
            num_prompt_tokens=last + paged_len,
            block_table=(seq,),
            num_paged_keys=paged_len,
            sampling=sampling,
            num_guesses=guesses,
        )
        for seq, (paged_len, guesses) in enumerate(zip(PAGED_LENS, num_guesses, strict=True))
    )
    streamed = tuple(
        StreamedGroup((seq * num_groups + i,), tuple((0,) if row == seq else () for row in range(NUM_SEQS)))
        for i in range(num_groups)
        for seq in range(NUM_SEQS)
    )
    if not num_cpu_tokens:
        return StepPlan(steps, KVMoves(streamed=streamed))
    i = (num_groups - 1) * NUM_SEQS
    cut = streamed[i]._replace(num_cut_tokens=num_cpu_tokens)
    spans = ((CpuSpan(cut.cpu_block_ids[0], BLOCK - num_cpu_tokens, BLOCK),), *[()] * (NUM_SEQS - 1))
    return StepPlan(steps, KVMoves(streamed=(*streamed[:i], cut, *streamed[i + 1 :]), cpu_spans=spans))


class Setup(NamedTuple):
    """Sequences over a paged cache, the same keys in CPU memory and in slots, and the buffers of graphs."""

    case: PagedCase
    offload: OffloadEngine
    buffers: GraphBuffers


def make_setup(
    make_offload: Callable[..., OffloadEngine],
    num_groups: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    num_guesses: tuple[int, ...] = (0,) * NUM_SEQS,
    max_num_rows: int = NUM_SEQS,
) -> Setup:
    """The blocks of sequence after sequence are in CPU memory, but for each one's last, which is in its slot."""
    lens = [(1 + g, num_groups * BLOCK + paged_len) for g, paged_len in zip(num_guesses, PAGED_LENS, strict=True)]
    options: dict[str, Any] = {"head_dim": head_dim, "dtype": dtype, "device": device, "mean_value": MEAN_VALUE}
    case = make_paged(lens, BLOCK, heads, causal=True, **options)
    shape = {"block_size": BLOCK, "num_kv_heads": heads[1], "head_dim": head_dim, "itemsize": dtype.itemsize}
    spec = KVCacheSpec(num_layers=1, **shape, staging=STAGING)
    offload = make_offload(spec, NUM_SEQS * num_groups, dtype, torch.device(device))
    offload.allocate_slots(NUM_SEQS)
    for seq, table in enumerate(case.batch.host.block_tables):
        cpu_blocks = slice(seq * num_groups, (seq + 1) * num_groups)
        for cpu, gpu, cache in (
            (offload.k_cache_cpu, offload.k_cache_gpu, case.k_cache),
            (offload.v_cache_cpu, offload.v_cache_gpu, case.v_cache),
        ):
            cpu[0, cpu_blocks] = cache[table[:num_groups]].cpu()
            gpu[0, seq] = cache[table[num_groups]]
    buffers = GraphBuffers(
        max_num_rows=max_num_rows,
        max_num_tokens=1,
        max_model_len=(1 + num_groups) * BLOCK,
        block_size=BLOCK,
        vocab_size=64,
        padded_vocab_size=64,
        dtype=dtype,
        device=torch.device(device),
    )
    return Setup(case, offload, buffers)


def replay(graphs: StreamedDecodeGraphs, offload: OffloadEngine, plan: StepPlan) -> None:
    """Run a step."""
    offload.begin_step(plan.moves, range(NUM_SEQS))
    inputs = build_inputs(plan, BLOCK, offload.spec.staging_group_blocks)
    graphs.replay(inputs, cpu_rows(plan))
    offload.end_step()


class Replayable:
    """Stands for a captured graph: its replay runs `work` and notes its name."""

    log: ClassVar[list[str]] = []

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name, self.work = name, work

    def replay(self) -> None:
        Replayable.log.append(self.name)
        self.work()


class LoggedEngine(OffloadEngine):
    """The calls that come between graphs go to the same log as the replays."""

    def begin_layer(self, layer: int) -> None:
        Replayable.log.append("begin_layer")
        super().begin_layer(layer)

    def stored(self, layer: int) -> None:
        Replayable.log.append("stored")
        super().stored(layer)

    def attended(self) -> None:
        Replayable.log.append("attended")
        super().attended()


def make_cpu_attention(offload: OffloadEngine, num_heads: int, is_pinned: bool = False) -> CpuAttention:
    return CpuAttention(
        choose_kernel([0], head_dim=offload.spec.head_dim, dtype=offload.dtype),
        offload,
        num_heads=num_heads,
        max_rows=8,
        is_pinned=is_pinned,
    )


def make_graphs(
    buffers: GraphBuffers,
    sizes: list[int],
    max_query_len: int,
    offload: OffloadEngine,
    cpu: CpuPart,
    backend: AttentionBackend,
    num_heads: int,
) -> StreamedDecodeGraphs:
    memory = OffloadMemory(offload.spec, backend, offload.dtype, offload.device, offload, cpu)
    memory.scale = SCALE
    return StreamedDecodeGraphs("streamed", sizes, max_query_len, buffers, memory, num_heads)


@pytest.mark.parametrize("num_guesses", [(0, 0), (4, 0), (1, 2)])
@pytest.mark.parametrize("num_cpu_tokens", [None, 0, 1, BLOCK - 1])
def test_streamed_replay_attends_to_all_keys_and_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch, num_cpu_tokens: int | None, num_guesses: tuple[int, ...]
) -> None:
    """What a GPU replays, done by the functions that are captured there; graphs for more rows than the step has."""
    dtype, backend, num_groups = torch.float32, HostlessTorch(), 3
    num_rows, max_query_len = NUM_SEQS + sum(num_guesses), 1 + max(num_guesses)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayable)
    Replayable.log = []
    case, offload, buffers = make_setup(
        lambda *args: LoggedEngine(*args, ImmediateStreams()),
        num_groups,
        (4, 2),
        16,
        dtype,
        "cpu",
        num_guesses=num_guesses,
        max_num_rows=8,
    )
    cpu = NoCpuPart() if num_cpu_tokens is None else make_cpu_attention(offload, num_heads=4)
    graphs = make_graphs(buffers, [4, 8], max_query_len, offload, cpu, backend, num_heads=4)
    size = graphs.size_for(num_rows)
    assert size > num_rows
    q_BHD, out_BHD = torch.zeros(size, 4, 16), torch.zeros(size, 4, 16)
    q_BHD[:num_rows] = case.q_THD

    def first_piece() -> None:
        batch, caches = buffers.decode_batch(size, max_query_len), (offload.k_cache_gpu[0], offload.v_cache_gpu[0])
        for cpu_graphs in graphs.cpu_graphs:
            cpu_graphs.capture_query(q_BHD)
        graphs.result.begin(q_BHD, backend.attend(q_BHD, *caches, batch, SCALE))

    def attend_to(buffer: int) -> Replayable:
        work = partial(graphs.groups.launch_kernels, size, buffer, graphs.result)
        return Replayable(f"group in buffer {buffer}", work)

    last_piece = partial(out_BHD.copy_, graphs.result.out_BHD[:size])
    pieces = [Replayable("piece 0", first_piece), Replayable("piece 1", last_piece)]
    graphs._graphs[size] = [*pieces, *map(attend_to, range(3))]  # type: ignore[list-item]
    for cpu_graphs in graphs.cpu_graphs:
        merge = partial(graphs.merge_cpu, cpu_graphs, size)
        graphs._graphs[size].append(Replayable("merge of the CPU's part", merge))  # type: ignore[arg-type]
    plan = make_plan(num_groups, num_cpu_tokens or 0, num_guesses)
    for _ in range(2):  # the second step finds the running result of the first
        Replayable.log.clear()
        out_BHD.zero_()
        replay(graphs, offload, plan)
        replays = [f"group in buffer {i % 3}" for i in range(NUM_SEQS * num_groups)]  # twice around
        if num_cpu_tokens:
            replays.append("merge of the CPU's part")
        assert Replayable.log == ["begin_layer", "piece 0", "stored", "attended", *replays, "piece 1"]
        torch.testing.assert_close(out_BHD[:num_rows].double(), case.naive(SCALE).out_THD, atol=5e-6, rtol=5e-6)
        assert not out_BHD[num_rows:].any()  # padding has no keys
    cpu.close()
    offload.close()


@pytest.mark.gpu
@pytest.mark.parametrize("with_cpu", [False, True])
@pytest.mark.parametrize("name", ["triton", "flash", "cudnn"])
@pytest.mark.parametrize("num_parts", PART_COUNTS)
def test_gpu_streamed_graphs_many_groups_round_once(name: str, num_parts: int, with_cpu: bool) -> None:
    """The static result was bf16, so it was rounded after every group: 6 times the error of one rounding after 122."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    try:
        backend = choose_backend(name, device, dtype, 128, enforce_eager=False)
    except ConfigError as error:
        pytest.skip(str(error))
    num_groups = num_parts - 1
    with torch.inference_mode():
        case, offload, buffers = make_setup(make_offload_engine, num_groups, (16, 2), 128, dtype, "cuda")
        model = OneAttention(case.q_THD)
        cpu = make_cpu_attention(offload, num_heads=16, is_pinned=True) if with_cpu else NoCpuPart()
        graphs = make_graphs(buffers, [NUM_SEQS], 1, offload, cpu, backend, num_heads=16)
        graphs.capture(model, graphs.sizes, show_progress=False)  # type: ignore[arg-type]
        plan = make_plan(num_groups, num_cpu_tokens=100 if with_cpu and num_groups else 0)
        for _ in range(2):  # the second step finds the running result of the first
            model.out_BHD.zero_()
            replay(graphs, offload, plan)
            torch.cuda.synchronize()
            assert num_roundings(model.out_BHD, case.naive(SCALE).out_THD) <= MAX_ROUNDINGS
        graphs.reset()
        cpu.close()
        offload.close()
