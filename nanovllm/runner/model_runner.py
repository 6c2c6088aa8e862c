"""ModelRunner: one rank's model and KV cache. It decides nothing: every rank runs the same plans unchanged.

On a GPU, start-up measures the memory that a rank needs besides KV blocks (`profile_memory`), and compiles all kernels.
"""

import gc
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanovllm.attention.selection import choose_backend
from nanovllm.capacity.machine import available_host_bytes
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.device import kernel_target
from nanovllm.device.devices import (
    GRAPH_LAYER_BYTES,
    MemoryProfile,
    current_device,
    memory_remedy,
    on_own_device,
    reserved_by,
    use_expandable_segments,
    used_bytes,
)
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.compile_server import CompileServer, TritonStart, start_compile_server
from nanovllm.layers.packed_weight import MAX_PACKED_ROWS
from nanovllm.models.loader import build_model, load_weights
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.plan.kv_spec import KVCacheSizes, KVCacheSpec, StartReport, dtype_name
from nanovllm.plan.step_limits import max_model_len, max_step_rows
from nanovllm.plan.step_plan import DraftTimes, StepPlan
from nanovllm.runner.companion_memory import RankStore
from nanovllm.runner.cpu_part import CpuPart, CpuPartFactory, NoCpuPart
from nanovllm.runner.graph_inputs import GraphBuffers
from nanovllm.runner.graph_set import GraphSet
from nanovllm.runner.kv_memory import KVMemory, OffloadEngineFactory
from nanovllm.runner.startup_steps import (
    chunk_steps,
    largest_steps,
    launch_sampler,
    short_steps,
    warm_up_products,
)
from nanovllm.runner.step_result import StepResult
from nanovllm.runner.step_runner import CompanionSetup, ModelDrafts, StepRunner
from nanovllm.utils.arithmetic import format_bytes

logger = logging.getLogger("nanovllm")

Result = TypeVar("Result")


class Phases:
    """Seconds by phase, in the order in which the phases first began. A phase can occur several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start_s

    def __str__(self) -> str:
        """Return the phases, such as `model 1.2 s, kernels 3.4 s`."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())


class ModelRunner:
    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        directory: Path | None,
        spec: KVCacheSpec,
        tp: TPGroup,
        device: torch.device,
        make_offload_engine: OffloadEngineFactory,
        make_cpu_part: CpuPartFactory,
    ) -> None:
        """Build this rank's part of the model and load its weights from `directory`."""
        self.config, self.model_config, self.spec, self.tp, self.device = config, model_config, spec, tp, device
        self._make_offload_engine, self._make_cpu_part = make_offload_engine, make_cpu_part
        self._memory: KVMemory | None = None  # None: before `allocate_kv_cache` and after `close`
        self._steps: StepRunner | None = None  # exists as long as the memory does
        self.store = RankStore()  # of prompts outside of memory
        self.phases = Phases()
        self.compile_server: CompileServer | None = None  # starts while the weights are loaded; None after `close`
        self.triton_start: TritonStart | None = None  # prepares Triton while the weights are loaded
        if device.type == "cuda":
            self.compile_server = start_compile_server(config, model_config, tp.size, kernel_target.target_of(device))
            self.triton_start = TritonStart()
        try:
            with current_device(device), memory_remedy("loading the model"), self.phases("weights"):
                self._load(directory)
        except BaseException:
            self.close_compile_server()
            raise

    def _load(self, directory: Path | None) -> None:
        config, model_config, device, tp = self.config, self.model_config, self.device, self.tp
        self.dtype = getattr(torch, dtype_name(config, model_config))
        self.backend = choose_backend(
            config.attn_backend, device, self.dtype, model_config.head_dim, enforce_eager=config.enforce_eager
        )
        self.max_model_len = max_model_len(config, model_config)
        is_read = config.load_format != "dummy"
        self.model = build_model(
            model_config,
            tp,
            max_model_len=self.max_model_len,
            dtype=self.dtype,
            device=device,
            directory=directory if is_read else None,
            with_mtp=self.spec.has_draft_head,
        )
        if self.triton_start is not None and config.quantization is not None:
            self.triton_start.wait()  # loading launches a kernel
        load_weights(
            self.model, directory, load_format=config.load_format, seed=config.seed, show_progress=tp.rank == 0
        )
        self.model.eval()
        self.num_heads = model_config.num_heads // tp.size  # query heads of this rank

    def close_compile_server(self, is_complete: bool = False) -> None:
        """End the server. Nothing is compiled from now on. `is_complete`: all kernels that this engine needs are
        compiled.
        """
        if self.compile_server is not None:
            self.compile_server.close(is_complete)
            self.compile_server = None

    # -- KV cache ------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> KVMemory:
        assert self._memory is not None, "the KV cache has not been allocated, or has been released"
        return self._memory

    @property
    def steps(self) -> StepRunner:
        assert self._steps is not None, "the KV cache has not been allocated, or has been released"
        return self._steps

    @property
    def graphs(self) -> GraphSet | None:
        """The CUDA graphs, or None if every step is launched kernel by kernel."""
        return None if self._steps is None else self._steps.graphs

    @property
    def offload(self) -> OffloadEngine | None:
        """The engine that copies the blocks, or None without offload."""
        return None if self._memory is None else self._memory.offload

    @on_own_device
    def measure_kv_room(
        self, num_cpu_blocks: int, most_gpu_blocks: int, companions: Sequence[CompanionSetup]
    ) -> tuple[int, str]:
        """Measure the bytes that every rank has for KV on its GPU. Also returns a description of this rank's memory.

        On a GPU, this runs the largest steps and captures the largest graphs that an engine of up to `most_gpu_blocks`
        blocks can need.
        """
        if self.device.type == "cuda":
            profile = profile_memory(self, num_cpu_blocks, most_gpu_blocks, companions)
            num_bytes, room = profile.free_bytes, str(profile)
        else:  # the blocks share this memory with the model and with everything else on the machine
            num_bytes = int(available_host_bytes() * self.config.gpu_memory_utilization / 2) // self.tp.size
            num_bytes -= self.spec.staging_bytes if num_cpu_blocks else 0
            room = f"{format_bytes(max(0, num_bytes))} of memory is available"
        available = torch.tensor([max(0, num_bytes)], device=self.device)
        return int(self.tp.all_gather(available).min()), room

    def launch_attention_kernels(self, num_tokens: int) -> None:
        """Call AttentionBackend.launch_kernels for chunks of up to `num_tokens` tokens."""
        k_cache, _ = self.memory.cache
        self.backend.launch_kernels(self._queries(num_tokens), k_cache[0])
        for companion in self.memory.companions:
            companion.launch_kernels(self._queries(1), self.memory.cache, self.max_model_len)

    def build_plans(self, has_time: Callable[[], bool]) -> None:
        """AttentionBackend.build_plans for the chunks that steps can hold."""
        lens = min(self.config.max_num_batched_tokens, self.max_model_len), self.max_model_len
        self.backend.build_plans(self._queries(1), self.spec.num_kv_heads, *lens, has_time=has_time)

    def max_split_bytes(self) -> int:
        """Return AttentionBackend.max_split_bytes of this model."""
        return self.backend.max_split_bytes(self._queries(1))

    def _queries(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, self.num_heads, self.spec.head_dim, dtype=self.dtype, device=self.device)

    @on_own_device
    def allocate_kv_cache(self, sizes: KVCacheSizes, companions: Sequence[CompanionSetup] = ()) -> None:
        """Allocate all KV memory. With offload, the cache on the GPU consists of the OffloadEngine's slots."""
        with memory_remedy("allocating the KV cache"), self.phases("KV cache"):
            if self._memory is None:
                offload: OffloadEngine | None = None
                cpu: CpuPart = NoCpuPart()
                if sizes.num_cpu_blocks:
                    offload = self._make_offload_engine(self.spec, sizes.num_cpu_blocks, self.dtype, self.device)
                    cpu = self._make_cpu_part(self.config, offload, self.num_heads, self.tp)
                self._memory = KVMemory(self.spec, self.backend, self.dtype, self.device, offload, cpu)
            self._memory.allocate(sizes.num_gpu_blocks)
            drafts = ModelDrafts()
            for setup in companions:
                companion = setup.allocate(self._memory)
                self._memory.companions.append(companion)
                drafts = setup.make_drafts(companion) or drafts
            self._steps = StepRunner(self.model, self._memory, self.tp, drafts)

    def drop_kv_cache(self) -> None:
        """Release the cache on the GPU, so that it can be allocated in other sizes."""
        self.steps.drafts = ModelDrafts()
        self.memory.drop()

    # -- graphs --------------------------------------------------------------------------------------------------

    @on_own_device
    def capture_graphs(self, num_gpu_blocks: int) -> None:
        """Capture the CUDA graphs that decode steps replay from now on. Needs an allocated KV cache."""
        start_bytes = used_bytes()
        with self.phases("graphs"):
            graphs = self.make_graphs(num_gpu_blocks)
            graphs.capture_all()
        logger.info("captured decode graphs (%s), %s", graphs, format_bytes(used_bytes() - start_bytes))

    def make_graphs(self, num_gpu_blocks: int) -> GraphSet:
        """Make the graphs for a cache of `num_gpu_blocks` blocks, still to be captured. Steps use the graphs from now
        on.
        """
        buffers = GraphBuffers(
            max_num_rows=max_step_rows(self.config, num_gpu_blocks),
            max_num_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.spec.block_size,
            vocab_size=self.model_config.vocab_size,
            padded_vocab_size=self.model.lm_head.padded_vocab_size,
            dtype=self.dtype,
            device=self.device,
            column_paddings=self.memory.column_paddings,
            hidden_size=self.model_config.hidden_size if self.steps.drafts.needs_hidden else 0,
        )
        graphs = self.steps.graphs = GraphSet(
            buffers=buffers,
            model=self.model,
            memory=self.memory,
            num_heads=self.num_heads,
            max_guesses=self.config.max_guesses,
            tp=self.tp,
            make_draft_graphs=self.steps.drafts.make_graphs,
        )
        return graphs

    def reset_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()
            self.steps.graphs = None

    @on_own_device
    @torch.inference_mode()
    def apply(self, function: Callable[["ModelRunner"], Result]) -> Result:
        """See Runner."""
        return function(self)

    @on_own_device
    def measure_drafts(self) -> DraftTimes:
        """Measure how long drafting a token takes. Runs decode steps."""
        with self.phases("drafts"):
            return self.steps.measure_drafts(self.max_model_len)

    @on_own_device
    def move(self, moves: Any) -> None:
        """See Runner. The store waits for the compute stream, which is that of the current device."""
        self.store.submit(moves)

    def freeze_objects(self) -> None:
        """Exempt all objects that exist now from garbage collection, until `close`.

        The tuples that steps make trigger a full collection every few hundred steps. Each collection would take 0.2 s
        to go through all objects of torch and transformers, which are never freed anyway.
        """
        gc.collect()
        gc.freeze()

    # -- one step ------------------------------------------------------------------------------------------------

    @on_own_device
    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """Enqueue the step. On the CPU the step has run when this returns; on a GPU it may still be running. Hot."""
        return self.steps.launch(plan)

    def start_report(self) -> StartReport:
        """Make the report to the engine, once this rank has started."""
        return StartReport(
            needs_rope_lens=self.model.needs_rope_lens,
            link_byte_per_s=None if self.offload is None else self.offload.link_byte_per_s,
            phases=str(self.phases),
        )

    def stats(self) -> dict[str, Any]:
        """Counters of the copies of this rank, and the rate of its link."""
        return ({} if self._memory is None else self._memory.stats()) | self.store.stats()

    @on_own_device
    def close(self) -> None:
        """Finish what is enqueued and release all memory. The runner must not be used afterwards."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.store.close()
        finally:  # a GPU that has failed cannot finish, but the memory must be released all the same
            self.close_compile_server()
            self.reset_graphs()
            if self._memory is not None:
                self._memory.close()
            self._memory = self._steps = None
            vars(self).pop("model", None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                gc.unfreeze()


# -- memory other than the KV cache, on a GPU --------------------------------------------------------------------------


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
        group_blocks=spec.staging_group_blocks if num_cpu_blocks else 0,
    )
    with memory_remedy("running its largest step"):
        _compile_kernels(runner, steps, most_gpu_blocks)
        with runner.phases("largest step"):
            step_bytes = reserved_by(lambda: [runner.launch(plan) for plan in steps])
            step_bytes += runner.max_split_bytes()  # a shorter step may need the bytes even if these steps do not
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
        group_blocks=runner.spec.staging_group_blocks if runner.memory.offload is not None else 0,
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
        runner.launch_attention_kernels(num_tokens)
        with runner.model.skipping_inner_layers():
            for plan in (*short, *steps):
                runner.launch(plan)
            if not runner.config.enforce_eager:
                runner.make_graphs(most_gpu_blocks).launch_kernels()
        runner.build_plans(is_compiling)
    runner.close_compile_server(is_complete=True)
    runner.reset_graphs()


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


def make_runner(
    config: Config,
    model_config: ModelConfig,
    directory: Path | None,
    spec: KVCacheSpec,
    device: torch.device,
    make_offload_engine: OffloadEngineFactory,
    make_cpu_part: CpuPartFactory,
    tp: TPGroup,
) -> ModelRunner:
    """Make one rank's runner. With several ranks, each has the device that its process group was made for."""
    if device.type == "cuda":
        use_expandable_segments()
    device = tp.device or device
    return ModelRunner(config, model_config, directory, spec, tp, device, make_offload_engine, make_cpu_part)
