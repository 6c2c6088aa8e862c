"""Measures the memory that a rank needs on its GPU besides KV blocks. To do so, start-up runs the largest steps and
captures the largest graphs.
"""

import importlib.util
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
import torch.nn.functional as F

from nanovllm.attention.base import LibraryPlan
from nanovllm.config import Config
from nanovllm.core.kv_spec import KVCacheSizes, KVCacheSpec
from nanovllm.core.step_limits import max_step_rows
from nanovllm.core.step_plan import StepPlan
from nanovllm.device.device_guard import current_device
from nanovllm.device.memory_profile import GRAPH_LAYER_BYTES, MemoryProfile, memory_remedy, reserved_by, used_bytes
from nanovllm.kernels.compile_server import CompileServer
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.kernels.triton_start import TritonStart
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.graph_set import GraphSet
from nanovllm.runner.inputs import SAMPLING_DTYPES, torch_dtype
from nanovllm.runner.kv_memory import KVMemory
from nanovllm.runner.largest_step import largest_steps, short_steps
from nanovllm.runner.step_result import StepResult
from nanovllm.utils.phases import Phases


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
    """Measure with a cache of one block, which all sequences share and which is dropped at the end.

    `most_gpu_blocks`: the largest number of blocks that the engine could use.
    """
    config, spec = runner.config, runner.spec
    runner.allocate_kv_cache(KVCacheSizes(1, num_cpu_blocks))
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
    dtypes = map(torch_dtype, SAMPLING_DTYPES.values())
    params = SamplingTensors._make(torch.zeros(1, dtype=dtype, device=head.weight.device) for dtype in dtypes)
    sample(head.weight.new_zeros(1, head.padded_vocab_size)[:, : head.vocab_size], params)
    sample(head.weight.new_zeros(1, head.vocab_size, dtype=torch.float32), params)


@contextmanager
def _warm_up_products(model: CausalLM, num_tokens: int) -> Iterator[None]:
    """In another thread, multiply up to `num_tokens` rows by the weights of a layer, until the block ends.

    cuBLAS chooses a kernel by the number of rows, and loads it when it is first used, which takes 15 to 140 ms.
    """
    weights = [parameter for parameter in model.model.layers[0].parameters() if parameter.dim() == 2]
    has_ended = threading.Event()

    @torch.inference_mode()
    def multiply() -> None:
        with current_device(weights[0].device), suppress(torch.OutOfMemoryError):
            for num_rows, weight in itertools.product(product_rows(num_tokens), weights):
                if has_ended.is_set():
                    return
                F.linear(weight.new_zeros(num_rows, weight.shape[1]), weight)

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
    """Capture the largest sizes of each kind, whose memory the others share. What these need on top is an estimate."""
    before = used_bytes()
    graphs = runner.make_graphs(most_gpu_blocks)
    graphs.capture_largest()
    num_bytes = used_bytes() - before
    num_others = sum(len(kind.sizes) - len(kind.largest_sizes) for kind in graphs.kinds)
    del graphs
    runner.reset_graphs()
    return num_bytes + num_others * runner.spec.num_layers * GRAPH_LAYER_BYTES
