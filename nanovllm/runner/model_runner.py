"""ModelRunner: one rank's model and KV cache. It decides nothing: every rank runs the same plans unchanged.

measure.py has what start-up does with the runner before the first request.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanovllm.attention.selection import choose_backend
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.device import kernel_target
from nanovllm.device.devices import (
    current_device,
    memory_remedy,
    on_own_device,
    use_expandable_segments,
    used_bytes,
)
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.compile_server import CompileServer, TritonStart, start_compile_server
from nanovllm.models.loader import CpuExpertsFactory, build_model, load_weights
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.plan.kv_spec import KVCacheSizes, KVCacheSpec, StartReport, dtype_name
from nanovllm.plan.step_limits import max_model_len, max_step_rows
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.graph_inputs import GraphBuffers
from nanovllm.runner.kv_memory import KVMemory, OffloadEngineFactory, OffloadMemory
from nanovllm.runner.seams import CpuPartFactory, RankStore
from nanovllm.runner.step_result import StepResult
from nanovllm.runner.step_runner import CompanionSetup, GraphSet, ModelDrafts, RankGraphs, StepRunner
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
        make_cpu_experts: CpuExpertsFactory | None = None,
    ) -> None:
        """Build this rank's part of the model and load its weights from `directory`."""
        self.config, self.model_config, self.spec, self.tp, self.device = config, model_config, spec, tp, device
        self._make_offload_engine, self._make_cpu_part = make_offload_engine, make_cpu_part
        self._make_cpu_experts = make_cpu_experts
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
            make_cpu_experts=self._make_cpu_experts,
        )
        if self.triton_start is not None and config.quantization is not None:
            self.triton_start.wait()  # loading launches a kernel
        load_weights(
            self.model, directory, load_format=config.load_format, seed=config.seed, show_progress=tp.rank == 0
        )
        self.model.eval()
        if self.model.cpu_experts is not None:
            self.model.cpu_experts.start(config)
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
    def graphs(self) -> RankGraphs:
        """The CUDA graphs."""
        return RankGraphs() if self._steps is None else self._steps.graphs

    @property
    def offload(self) -> OffloadEngine | None:
        """The engine that copies the blocks, or None without offload."""
        return None if self._memory is None else self._memory.offload

    @on_own_device
    def allocate_kv_cache(self, sizes: KVCacheSizes, companions: Sequence[CompanionSetup] = ()) -> None:
        """Allocate all KV memory. With offload, the cache on the GPU consists of the OffloadEngine's slots."""
        with memory_remedy("allocating the KV cache"), self.phases("KV cache"):
            if self._memory is None:
                self._memory = self._make_memory(sizes.num_cpu_blocks)
            self._memory.allocate(sizes.num_gpu_blocks)
            drafts = ModelDrafts()
            for setup in companions:
                companion = setup.allocate(self._memory)
                self._memory.companions.append(companion)
                drafts = setup.make_drafts(companion) or drafts
            self._steps = StepRunner(self.model, self._memory, self.tp, drafts)

    def _make_memory(self, num_cpu_blocks: int) -> KVMemory:
        if not num_cpu_blocks:
            return KVMemory(self.spec, self.backend, self.dtype, self.device)
        offload = self._make_offload_engine(self.spec, num_cpu_blocks, self.dtype, self.device)
        experts = self.model.cpu_experts
        kernel = None if experts is None else experts.kernel
        cpu = self._make_cpu_part(self.config, offload, self.num_heads, self.tp, kernel)
        return OffloadMemory(self.spec, self.backend, self.dtype, self.device, offload, cpu)

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
        num_rows, experts = max_step_rows(self.config, num_gpu_blocks), self.model.cpu_experts
        buffers = GraphBuffers(
            max_num_rows=num_rows,
            max_graph_rows=None if experts is None else experts.max_rows,
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
        if self._steps is not None:
            self._steps.graphs.reset()
            self._steps.graphs = RankGraphs()

    @on_own_device
    @torch.inference_mode()
    def apply(self, function: Callable[["ModelRunner"], Result]) -> Result:
        """See Runner."""
        return function(self)

    @on_own_device
    def move(self, moves: Any) -> None:
        """See Runner. The store waits for the compute stream, the current stream of the rank's device."""
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
            link_byte_per_s=self.memory.link_byte_per_s,
            phases=str(self.phases),
        )

    def stats(self) -> dict[str, Any]:
        """Counters of the copies of this rank and of its experts in CPU memory, and the rate of its link."""
        experts = None if self._memory is None else self.model.cpu_experts
        of_experts = {} if experts is None else experts.stats()
        return ({} if self._memory is None else self._memory.stats()) | self.store.stats() | of_experts

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
            model = vars(self).pop("model", None)
            if model is not None and model.cpu_experts is not None:
                model.cpu_experts.close()
            del model
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                gc.unfreeze()


def make_runner(
    config: Config,
    model_config: ModelConfig,
    directory: Path | None,
    spec: KVCacheSpec,
    device: torch.device,
    make_offload_engine: OffloadEngineFactory,
    make_cpu_part: CpuPartFactory,
    make_cpu_experts: CpuExpertsFactory,
    tp: TPGroup,
) -> ModelRunner:
    """Make one rank's runner. With several ranks, each has the device that its process group was made for."""
    if device.type == "cuda":
        use_expandable_segments()
    device = tp.device or device
    makers = make_offload_engine, make_cpu_part, make_cpu_experts
    return ModelRunner(config, model_config, directory, spec, tp, device, *makers)
