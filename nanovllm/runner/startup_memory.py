"""Measures the memory that a rank needs on its GPU besides KV blocks. To do so, start-up runs the largest steps and
captures the largest graphs. Together with `short_steps` they launch every kernel that prompts, chunks and sampling
need, so that start-up can compile them all and no request has to wait.
"""

import importlib.util
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.attention.base import LibraryPlan
from nanovllm.config import Config
from nanovllm.core.kv_spec import KVCacheSizes, KVCacheSpec
from nanovllm.core.logit_editor import Biases, LogitEdits, Penalties, RowEdits
from nanovllm.core.shadow_spec import SHADOW_BITS, wants_shadow
from nanovllm.core.step_limits import MAX_DECODE_QUERIES, max_step_rows
from nanovllm.core.step_plan import KVMoves, PromptScores, SamplingRow, SequenceStep, StepPlan, StreamedGroup
from nanovllm.device.devices import (
    GRAPH_LAYER_BYTES,
    MemoryProfile,
    current_device,
    memory_remedy,
    reserved_by,
    used_bytes,
)
from nanovllm.kernels.compile_server import CompileServer, TritonStart
from nanovllm.layers.packed_weight import PackedWeight, new_values
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.graph_set import GraphSet
from nanovllm.runner.inputs import sampling_arrays, to_device
from nanovllm.runner.kv_memory import KVMemory
from nanovllm.runner.step_result import StepResult
from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.utils.arithmetic import ceil_div
from nanovllm.utils.phases import Phases

# More history or more groups would not need more memory. From the fourth part on there is a running result in fp32
# (attention/base.py), and further parts reuse its temporaries. Scattered keys are attended to 16 MiB at a time. The
# history is not a multiple of 4096 tokens: the cudnn backend leaves a part of it to the paged backend.
HISTORY_TOKENS = 51199  # tokens before the chunk of a sequence
NUM_GROUPS = 4  # streamed groups that the chunk attends to
SCORED_TOKENS = 512  # enough for the chunks of logits that are scored at once
_SAMPLING = SamplingRow(temperature=1.0, top_k=20, top_p=0.95, min_p=0.05)
_TOKENS = np.zeros(1, np.int32)
_EDITS = LogitEdits(Penalties(1.1, 0.1, 0.1, None, _TOKENS, _TOKENS), 0, (RowEdits(Biases.of([0], 1.0)),))


def largest_steps(
    *, num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, group_blocks: int
) -> list[StepPlan]:
    """Steps of `num_tokens` new tokens: one in as few sequences as can hold them, and one in `max_num_seqs` sequences,
    most of which have a single new token. A third one is a chunk of which some tokens are scored. All of them edit the
    logits that they sample from, and report as many log-probabilities as a request can ask for.

    Every entry of every block table is block 0, so that a cache of one block is enough. The tokens overwrite each
    other's K and V, whose values do not matter. A sequence has HISTORY_TOKENS before its chunk if max_model_len allows.
    With `group_blocks` > 0, all sequences also attend to NUM_GROUPS streamed groups of that many CPU blocks, again all
    block 0.
    """
    fewest = min(max_num_seqs, ceil_div(num_tokens, max_model_len))
    most = min(max_num_seqs, num_tokens)
    batches = [
        _sequences(_lengths(num_tokens, num_seqs, max_model_len), max_model_len, block_size)
        for num_seqs in sorted({fewest, most})
    ]
    (chunk,) = _sequences((min(num_tokens, max_model_len),), max_model_len, block_size)
    scores = PromptScores(0, np.zeros(min(SCORED_TOKENS, chunk.num_tokens), np.int64), MAX_LOGPROBS)
    steps = []
    for sequences in (*batches, (chunk._replace(scores=scores),)):
        group = StreamedGroup((0,) * group_blocks, (tuple(range(group_blocks)),) * len(sequences))
        steps.append(StepPlan(sequences, KVMoves(streamed=(group,) * NUM_GROUPS if group_blocks else ())))
    return steps


def short_steps(*, max_num_seqs: int, max_model_len: int, block_size: int, group_blocks: int) -> list[StepPlan]:
    """Steps that need little memory and launch the kernels that largest_steps leaves out: for short prompts mixed with
    running sequences, and for a few tokens of a sequence, where each power of two may have a kernel of its own. Draft
    heads, which are in no graph, also run for a single token. Without history, a few tokens have another kernel than
    with it.

    With `group_blocks` > 0 the few tokens also attend to a streamed group.
    """
    mixed = (1, min(300, max_model_len))[-max_num_seqs:]
    few = [n for n in (1, 2, 4, 8, MAX_DECODE_QUERIES) if n <= max_model_len]
    steps = [StepPlan(_sequences(mixed, max_model_len, block_size), KVMoves())]
    group = StreamedGroup((0,) * group_blocks, (tuple(range(group_blocks)),))
    moves = KVMoves(streamed=(group,) if group_blocks else ())
    steps += [StepPlan(_sequences((n,), max_model_len, block_size), moves) for n in few]
    return steps + [StepPlan(_sequences((n,), n + 1, block_size), KVMoves()) for n in few]


def _sequences(lengths: Sequence[int], max_model_len: int, block_size: int) -> tuple[SequenceStep, ...]:
    return tuple(_sequence(i, length, max_model_len, block_size) for i, length in enumerate(lengths))


def _lengths(num_tokens: int, num_seqs: int, max_length: int) -> list[int]:
    """New tokens of each sequence: single tokens first, as the scheduler orders them, then the longest chunks."""
    lengths = [1] * num_seqs
    for i in reversed(range(num_seqs)):
        lengths[i] += min(max_length - 1, num_tokens - sum(lengths))
    return lengths


def _sequence(seq_id: int, length: int, max_model_len: int, block_size: int) -> SequenceStep:
    start = min(max(0, max_model_len - length - 1), HISTORY_TOKENS)
    return SequenceStep(
        seq_id=seq_id,
        token_ids=np.zeros(length, dtype=np.int64),
        position=start,
        num_prompt_tokens=start + length,
        block_table=(0,) * ceil_div(start + length, block_size),
        num_paged_keys=start + length,
        sampling=_SAMPLING,
        edits=_EDITS,
        num_logprobs=MAX_LOGPROBS,
    )


class MeasuredRunner(Protocol):
    """The part of ModelRunner that the measurement uses."""

    config: Config
    spec: KVCacheSpec
    max_model_len: int
    model: CausalLM
    phases: Phases
    compile_server: CompileServer | None
    triton_start: TritonStart | None

    @property
    def memory(self) -> KVMemory: ...

    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None: ...

    def launch(self, plan: StepPlan) -> StepResult: ...

    def make_graphs(self, num_gpu_blocks: int) -> GraphSet: ...

    def reset_graphs(self) -> None: ...

    def close_compile_server(self, is_complete: bool = False) -> None: ...

    def launch_attention_kernels(self, num_tokens: int) -> None: ...

    def library_plans(self) -> Sequence[LibraryPlan]: ...

    def max_split_bytes(self) -> int: ...


def profile_memory(runner: MeasuredRunner, num_cpu_blocks: int, most_gpu_blocks: int) -> MemoryProfile:
    """Measure with a cache of one block and one state, which all sequences share and which are dropped at the end.

    `most_gpu_blocks`: the largest number of blocks that the engine could use.
    """
    config, spec = runner.config, runner.spec
    num_pages = int(wants_shadow(config, spec))
    sizes = KVCacheSizes(1, num_cpu_blocks, num_pages, config.shadow_bits or SHADOW_BITS[0])
    sizes = replace(sizes, num_state_slots=int(spec.states is not None))  # all sequences use slot 0
    runner.allocate_kv_cache(sizes)
    steps = largest_steps(
        num_tokens=config.max_num_batched_tokens,
        max_num_seqs=max_step_rows(config, most_gpu_blocks),
        max_model_len=runner.max_model_len,
        block_size=spec.block_size,
        group_blocks=spec.staging_group_blocks if num_cpu_blocks else 0,
    )
    with memory_remedy("running its largest step"):
        _compile_kernels(runner, steps, most_gpu_blocks)
        with runner.phases("largest step"):
            step_bytes = reserved_by(lambda: [runner.launch(plan) for plan in steps])
            step_bytes += runner.max_split_bytes()  # a shorter step may need them, and these steps may not
    with runner.phases("graphs"):
        graph_bytes = 0 if config.enforce_eager else _measure_graph_bytes(runner, most_gpu_blocks)
    runner.memory.drop()
    total_bytes = torch.cuda.mem_get_info()[1]
    return MemoryProfile(
        total_bytes=total_bytes,
        utilization=config.gpu_memory_utilization,
        used_bytes=used_bytes(),
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
    )


def _compile_kernels(runner: MeasuredRunner, steps: Sequence[StepPlan], most_gpu_blocks: int) -> None:
    """Compile in parallel all kernels that prompts, chunks, sampling and decode graphs launch, so that no request waits
    for a compilation. Meanwhile the libraries of the backends are initialised.

    The kernels that take longest to compile come first. Short steps come before long ones, for which the backend's
    library has to be initialised: most kernels are known by then. Building the library's plans fills the time until all
    are compiled.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from nanovllm.kernels.launch import compile_only

    short = short_steps(
        max_num_seqs=max_step_rows(runner.config, most_gpu_blocks),
        max_model_len=runner.max_model_len,
        block_size=runner.spec.block_size,
        group_blocks=runner.spec.staging_group_blocks if runner.memory.offload is not None else 0,
    )
    num_tokens = max(seq.num_tokens for plan in steps for seq in plan.sequences)
    if runner.model.config.experts is not None:  # the more tokens, the larger the tiles
        chunks = [
            _sequences((1 << i,), runner.max_model_len, runner.spec.block_size)
            for i in range(5, num_tokens.bit_length())
        ]
        short += [StepPlan(sequences, KVMoves()) for sequences in chunks]
    with (
        runner.phases("kernels"),
        torch.inference_mode(),
        _warm_up_products(runner.model, num_tokens),
        compile_only(runner.compile_server) as is_compiling,
    ):
        if runner.triton_start is not None:
            runner.triton_start.wait()
        launch_sampler(runner.model)
        runner.launch_attention_kernels(num_tokens)
        with runner.model.skipping_inner_layers():
            for plan in (*short, *steps):
                runner.launch(plan)
            if not runner.config.enforce_eager:
                runner.make_graphs(most_gpu_blocks).launch_kernels()
        for library_plan in runner.library_plans():
            if library_plan.is_needed or is_compiling():
                library_plan.build()
    runner.close_compile_server(is_complete=True)
    runner.reset_graphs()


def launch_sampler(model: CausalLM) -> None:
    """Sample from a row of logits as the model computes them, and from a row of edited ones, which are fp32. The values
    are arbitrary.
    """
    head = model.lm_head
    params = to_device(sampling_arrays([SamplingRow()], np.ones(1, np.int64), np.ones(1, np.int64)), head.weight.device)
    sample(head.weight.new_zeros(1, head.padded_vocab_size)[:, : head.vocab_size], params)
    sample(head.weight.new_zeros(1, head.vocab_size, dtype=torch.float32), params)


@contextmanager
def _warm_up_products(model: CausalLM, num_tokens: int) -> Iterator[None]:
    """In another thread, multiply up to `num_tokens` rows by a weight of each shape, until the block ends.

    cuBLAS chooses a kernel by the number of rows, and loads it when it is first used, which takes 15 to 140 ms.
    """
    head = model.lm_head.weight
    layers = (model.model.layers, model.mtp)
    given = [getattr(module, "weight", None) for part in layers if part is not None for module in part.modules()]
    of_shape = {tuple(weight.shape): weight for weight in given if weight is not None and len(weight.shape) == 2}
    weights = list(of_shape.values())
    has_ended = threading.Event()

    @torch.inference_mode()
    def multiply() -> None:
        with current_device(head.device), suppress(torch.OutOfMemoryError):
            for num_rows, weight in itertools.product(product_rows(num_tokens), weights):
                if has_ended.is_set():
                    return
                values = new_values(*weight.shape, head) if isinstance(weight, PackedWeight) else weight
                F.linear(values.new_zeros(num_rows, values.shape[1]), values)

    thread = threading.Thread(target=multiply, name="warm-up")
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def product_rows(num_tokens: int) -> list[int]:
    """From `num_tokens` down to a few, four for each power of two."""
    rows = {num_tokens * part // (8 << halvings) for halvings in range(num_tokens.bit_length()) for part in range(5, 9)}
    return sorted((n for n in rows if n > 1), reverse=True)


def _measure_graph_bytes(runner: MeasuredRunner, most_gpu_blocks: int) -> int:
    """Capture the largest sizes of each kind, whose memory the others share. What these need on top is an estimate.

    Kernels and workspaces that the captures load stay in use, so they are not counted here.
    """
    graphs = runner.make_graphs(most_gpu_blocks)
    graphs.capture_largest()
    with_graphs = used_bytes()
    num_others = sum(len(kind.sizes) - len(kind.largest_sizes) for kind in graphs.kinds)
    del graphs
    runner.reset_graphs()
    return with_graphs - used_bytes() + num_others * runner.spec.num_layers * GRAPH_LAYER_BYTES
