"""How start-up measures the memory that a rank needs besides KV blocks, and compiles all kernels.

The largest steps take the most memory that requests can need. Together with `short_steps` they launch every kernel that
prompts, chunks and sampling need, so that start-up can compile them all and no request has to wait. Runner.apply calls
`measure_kv_room` and `measure_drafts` on every rank.
"""

import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.capacity.machine import available_host_bytes
from nanovllm.device.devices import (
    GRAPH_LAYER_BYTES,
    MemoryProfile,
    current_device,
    memory_remedy,
    reserved_by,
    used_bytes,
)
from nanovllm.layers.moe import Router
from nanovllm.layers.packed_weight import MAX_PACKED_ROWS, PackedWeight
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.kv_spec import KVCacheSizes
from nanovllm.plan.logit_edits import Biases, LogitEdits, Penalties, RowEdits
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES, max_step_rows
from nanovllm.plan.step_plan import (
    DraftTimes,
    KVMoves,
    PromptScores,
    SamplingRow,
    SequenceStep,
    StepPlan,
    StreamedGroup,
)
from nanovllm.runner.inputs import sampling_arrays, to_device
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.step_runner import CompanionSetup
from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.utils.arithmetic import ceil_div, format_bytes

# More history or more groups would not need more memory. From the fourth part on there is a running result in fp32
# (attention/base.py), and later parts reuse its temporaries. Scattered keys are gathered 16 MiB at a time. The history
# is not a multiple of 4096 tokens, so that the cudnn backend leaves a part of it to the paged backend.
HISTORY_TOKENS = 51199  # tokens before the chunk of a sequence
NUM_GROUPS = 4  # streamed groups that the chunk attends to
SCORED_TOKENS = 512  # enough for the chunks of logits that are scored at once
_SAMPLING = SamplingRow(temperature=1.0, top_k=20, top_p=0.95, min_p=0.05)
_TOKENS = np.zeros(1, np.int32)
_EDITS = LogitEdits(Penalties(1.1, 0.1, 0.1, None, _TOKENS, _TOKENS), 0, (RowEdits(Biases.of([0], 1.0)),))


@torch.inference_mode(False)  # the CPU pool that is allocated here stays, and is also written outside of steps
def measure_kv_room(
    num_cpu_blocks: int, most_gpu_blocks: int, companions: Sequence[CompanionSetup], runner: ModelRunner
) -> tuple[int, str]:
    """Measure the bytes that every rank has for KV on its GPU. Also returns a description of this rank's memory for
    error messages.

    On a GPU, this runs the largest steps and captures the largest graphs that an engine can need. `num_cpu_blocks`:
    blocks of the CPU pool, 0 without offload. `most_gpu_blocks`: the largest number of blocks on the GPU that the
    engine could use. `companions`: of the smallest possible size. Raises ConfigError if memory runs out.
    """
    if runner.device.type == "cuda":
        room_bytes = int(torch.cuda.mem_get_info()[1] * runner.config.gpu_memory_utilization) - used_bytes()
        fitting = _least_of_ranks(
            runner, room_bytes // runner.spec.block_bytes
        )  # with the weights but without activations
        profile = profile_memory(runner, num_cpu_blocks, min(most_gpu_blocks, max(1, fitting)), companions)
        num_bytes, room = profile.free_bytes, str(profile)
    else:  # the blocks share this memory with the model and with everything else on the machine
        num_bytes = int(available_host_bytes() * runner.config.gpu_memory_utilization / 2) // runner.tp.size
        num_bytes -= runner.spec.staging_bytes if num_cpu_blocks else 0
        room = f"{format_bytes(max(0, num_bytes))} of memory is available"
    return _least_of_ranks(runner, max(0, num_bytes)), room


def _least_of_ranks(runner: ModelRunner, number: int) -> int:
    return int(runner.tp.all_gather(torch.tensor([number], device=runner.device)).min())


def measure_drafts(runner: ModelRunner) -> DraftTimes:
    """Measure how long drafting a token takes. Runs decode steps, so it needs an allocated KV cache."""
    with runner.phases("drafts"):
        return runner.steps.measure_drafts(runner.max_model_len)


def profile_memory(
    runner: ModelRunner, num_cpu_blocks: int, most_gpu_blocks: int, companions: Sequence[CompanionSetup]
) -> MemoryProfile:
    """Measure memory with a cache of one block, which all sequences share and which is dropped at the end.

    `most_gpu_blocks`: the largest number of blocks that the engine could use. `companions`: of the smallest possible
    size.
    """
    config, spec = runner.config, runner.spec
    runner.allocate_kv_cache(KVCacheSizes(1, num_cpu_blocks), companions)
    steps = largest_steps(
        num_tokens=config.max_num_batched_tokens,
        max_num_seqs=max_step_rows(config, most_gpu_blocks),
        max_model_len=runner.max_model_len,
        block_size=spec.block_size,
        group_blocks=runner.memory.group_blocks,
    )
    with memory_remedy("running its largest step"):
        _compile_kernels(runner, steps, most_gpu_blocks)
        with runner.phases("largest step"):
            step_bytes = reserved_by(lambda: [runner.launch(plan) for plan in steps])
            # A shorter step may need these bytes even if the largest steps do not
            step_bytes += runner.backend.max_split_bytes(_queries(runner, 1))
    with runner.phases("graphs"):
        graph_bytes = 0 if config.enforce_eager else _measure_graph_bytes(runner, most_gpu_blocks)
    runner.drop_kv_cache()
    total_bytes = torch.cuda.mem_get_info()[1]
    return MemoryProfile(
        total_bytes=total_bytes,
        utilization=config.gpu_memory_utilization,
        used_bytes=used_bytes(),
        step_bytes=step_bytes,
        graph_bytes=graph_bytes,
    )


def _compile_kernels(runner: ModelRunner, steps: Sequence[StepPlan], most_gpu_blocks: int) -> None:
    """Compile in parallel all kernels that prompts, chunks, sampling and decode graphs launch, so that no request waits
    for a compilation. Meanwhile the libraries of the backends are initialised.

    The kernels that take longest to compile come first. Short steps come before long steps, for which the backend's
    library has to be initialised: by then, most kernels have been found. Building the library's plans fills the time
    until all kernels are compiled.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from nanovllm.kernels.launch import compile_only

    short = short_steps(
        max_num_seqs=max_step_rows(runner.config, most_gpu_blocks),
        max_model_len=runner.max_model_len,
        block_size=runner.spec.block_size,
        group_blocks=runner.memory.group_blocks,
    )
    num_tokens = max(seq.num_tokens for plan in steps for seq in plan.sequences)
    model = runner.model.config
    if model.experts is not None or model.quantization is not None:  # more tokens use larger tiles
        most_tokens = max(plan.num_tokens for plan in steps)
        if model.experts is None:
            most_tokens = min(most_tokens, MAX_PACKED_ROWS)
        short += chunk_steps(most_tokens, runner.max_model_len, runner.spec.block_size)
    with (
        runner.phases("kernels"),
        torch.inference_mode(),
        warm_up_products(runner.model, num_tokens),
        compile_only(runner.compile_server) as is_compiling,
    ):
        if runner.triton_start is not None:
            runner.triton_start.wait()
        launch_sampler(runner.model)
        launch_head(runner.model, max_step_rows(runner.config, most_gpu_blocks))
        _launch_attention_kernels(runner, num_tokens)
        with runner.model.skipping_inner_layers():
            for plan in (*short, *steps):
                runner.launch(plan)
            if not runner.config.enforce_eager:
                runner.make_graphs(most_gpu_blocks).launch_kernels()
        _build_plans(runner, is_compiling)
    runner.close_compile_server(is_complete=True)
    runner.reset_graphs()


def _launch_attention_kernels(runner: ModelRunner, num_tokens: int) -> None:
    """Launch the backend's kernels for chunks of up to `num_tokens` tokens, and the companions' kernels."""
    k_cache, _ = runner.memory.cache
    queries, sinks_H = _queries(runner, num_tokens), runner.model.sinks
    runner.backend.launch_kernels(queries, k_cache[0], sinks_H=sinks_H)
    for companion in runner.memory.companions:
        companion.launch_kernels(queries, runner.memory.cache, runner.max_model_len, sinks_H)


def _build_plans(runner: ModelRunner, has_time: Callable[[], bool]) -> None:
    """Build the backend's plans for the chunks that steps can hold."""
    lens = min(runner.config.max_num_batched_tokens, runner.max_model_len), runner.max_model_len
    runner.backend.build_plans(_queries(runner, 1), runner.spec.num_kv_heads, *lens, has_time=has_time)


def _queries(runner: ModelRunner, num_tokens: int) -> torch.Tensor:
    return torch.zeros(num_tokens, runner.num_heads, runner.spec.head_dim, dtype=runner.dtype, device=runner.device)


def _measure_graph_bytes(runner: ModelRunner, most_gpu_blocks: int) -> int:
    """Capture the largest sizes of each kind, whose memory the other sizes share. The rest of their memory is
    estimated.

    Kernels and workspaces that the captures load stay in use and are not counted here.
    """
    graphs = runner.make_graphs(most_gpu_blocks)
    graphs.capture_largest()
    with_graphs = used_bytes()
    num_others = sum(len(kind.sizes) - len(kind.largest_sizes) for kind in graphs.kinds)
    del graphs
    runner.reset_graphs()
    return with_graphs - used_bytes() + num_others * runner.spec.num_layers * GRAPH_LAYER_BYTES


# -- the steps that start-up runs -----------------------------------------------------------------------------------


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
    running sequences, and for a few tokens of a sequence, where each power of two may have a separate kernel. Draft
    heads, which are in no graph, also run for a single token. A few tokens use different kernels with and without
    history.

    With `group_blocks` > 0 the few tokens also attend to a streamed group.
    """
    mixed = (1, min(300, max_model_len))[-max_num_seqs:]
    few = [n for n in (1, 2, 4, 8, MAX_DECODE_QUERIES) if n <= max_model_len]
    steps = [StepPlan(_sequences(mixed, max_model_len, block_size), KVMoves())]
    group = StreamedGroup((0,) * group_blocks, (tuple(range(group_blocks)),))
    moves = KVMoves(streamed=(group,) if group_blocks else ())
    steps += [StepPlan(_sequences((n,), max_model_len, block_size), moves) for n in few]
    return steps + [StepPlan(_sequences((n,), n + 1, block_size), KVMoves()) for n in few]


def chunk_steps(max_num_tokens: int, max_model_len: int, block_size: int) -> list[StepPlan]:
    """Return a step of chunks, as few as possible, for each power of two of tokens from 32 on."""
    steps = []
    for num_tokens in (1 << i for i in range(5, max_num_tokens.bit_length())):
        lengths = _lengths(num_tokens, ceil_div(num_tokens, max_model_len), max_model_len)
        steps.append(StepPlan(_sequences(lengths, max_model_len, block_size), KVMoves()))
    return steps


def prompt_step(num_tokens: int, block_size: int) -> StepPlan:
    """Return a step that computes a whole prompt."""
    return StepPlan(_sequences((num_tokens,), num_tokens + 1, block_size), KVMoves())


def _sequences(lengths: Sequence[int], max_model_len: int, block_size: int) -> tuple[SequenceStep, ...]:
    return tuple(_sequence(i, length, max_model_len, block_size) for i, length in enumerate(lengths))


def _lengths(num_tokens: int, num_seqs: int, max_length: int) -> list[int]:
    """New tokens of each sequence: single tokens first, in the scheduler's order, then the longest chunks."""
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


def launch_sampler(model: CausalLM) -> None:
    """Sample from a row of logits of the model's dtype, and from a row of edited logits, which are fp32. The values are
    arbitrary.
    """
    head, device = model.lm_head, model.device
    params = to_device(sampling_arrays([SamplingRow()], np.ones(1, np.int64), np.ones(1, np.int64)), device)
    logits = torch.zeros(1, head.padded_vocab_size, dtype=model.dtype, device=device)
    sample(logits[:, : head.vocab_size], params)
    sample(torch.zeros(1, head.vocab_size, dtype=torch.float32, device=device), params)


def launch_head(model: CausalLM, max_num_rows: int) -> None:
    """Multiply a packed output head by 1 to `max_num_rows` rows. Each power of two may have a separate kernel, and
    without graphs no other step launches all of them.
    """
    head = model.lm_head
    if isinstance(head.weight, PackedWeight):
        for num_rows in sorted({min(n, max_num_rows) for n in (1, 8, 16, 32, 64, 128, MAX_PACKED_ROWS)}):
            head.weight.linear(torch.zeros(num_rows, head.hidden_size, dtype=model.dtype, device=model.device), None)


@contextmanager
def warm_up_products(model: CausalLM, num_tokens: int) -> Iterator[None]:
    """In another thread, multiply up to `num_tokens` rows by a weight of each shape, until the block ends.

    cuBLAS chooses a kernel by the number of rows, and loads the kernel at its first use, which takes 15 to 140 ms.
    """
    layers = (model.model.layers, model.mtp)
    modules = [module for part in layers if part is not None for module in part.modules()]
    given = [getattr(module, "weight", None) for module in modules if not isinstance(module, Router)]
    weights = [each for weight in given for each in getattr(weight, "weights", [weight])]  # of a StackedWeight
    of_shape = {tuple(weight.shape): weight for weight in weights if weight is not None and len(weight.shape) == 2}
    # Routers have sums in fp32. All routers have the same shape
    routers = [module for module in modules if isinstance(module, Router)][:1]
    multiplied = [*of_shape.values(), *routers]
    zeros = partial(torch.zeros, dtype=model.dtype, device=model.device)
    has_ended = threading.Event()

    @torch.inference_mode()
    def multiply() -> None:
        with current_device(model.device), suppress(torch.OutOfMemoryError):
            for num_rows, each in itertools.product(product_rows(num_tokens), multiplied):
                if has_ended.is_set():
                    return
                if isinstance(each, Router):
                    each.product_of_many(zeros(num_rows, each.weight.shape[1]))
                elif isinstance(each, PackedWeight):
                    if num_rows > each.max_packed_rows:  # fewer rows never reach cuBLAS
                        each.warm_up(zeros(num_rows, each.shape[1]))
                else:
                    F.linear(each.new_zeros(num_rows, each.shape[1]), each)

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
