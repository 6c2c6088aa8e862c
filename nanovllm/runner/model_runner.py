"""ModelRunner: one rank's model and KV cache. It decides nothing: every rank runs the same plans as they are."""

import gc
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.backends.selection import choose_backend
from nanovllm.attention.base import LibraryPlan
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.core.cpu_split import CpuSplit
from nanovllm.core.disk_moves import DISK_GRAIN_TOKENS, DiskMoves, DiskSetup
from nanovllm.core.kv_spec import KVCacheSizes, KVCacheSpec, StartReport, dtype_name
from nanovllm.core.shadow_spec import ShadowSpec
from nanovllm.core.step_limits import max_model_len, max_step_rows
from nanovllm.core.step_plan import DraftTimes, StepPlan
from nanovllm.device import kernel_target
from nanovllm.device.devices import current_device, memory_remedy, on_own_device, use_expandable_segments, used_bytes
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.compile_server import CompileServer, TritonStart, start_compile_server
from nanovllm.kvcache.disk.store import DiskStore
from nanovllm.kvcache.transfer.disk_worker import DiskWorker, open_worker, weights_identity
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine
from nanovllm.models.loader import build_model, load_weights
from nanovllm.runner.cpu_rates import make_cpu_attention, measure_split
from nanovllm.runner.graph_inputs import GraphBuffers
from nanovllm.runner.graph_set import GraphSet
from nanovllm.runner.kv_memory import KVMemory, OffloadEngineFactory
from nanovllm.runner.startup_memory import Phases, profile_memory
from nanovllm.runner.step_result import StepResult
from nanovllm.runner.step_runner import StepRunner
from nanovllm.utils.arithmetic import format_bytes
from nanovllm.utils.memory import available_host_bytes
from nanovllm.utils.version import __version__

logger = logging.getLogger("nanovllm")


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
    ) -> None:
        """Build this rank's part of the model and load its weights from `directory`."""
        self.config, self.model_config, self.spec, self.tp, self.device = config, model_config, spec, tp, device
        self._make_offload_engine = make_offload_engine
        self._memory: KVMemory | None = None  # None: before `allocate_kv_cache` and after `close`
        self._steps: StepRunner | None = None  # exists as long as the memory does
        self._disk: DiskWorker | None = None  # None: no KV is kept on disk
        self.phases = Phases()
        self.compile_server: CompileServer | None = None  # gets ready while the weights are loaded; until `close`
        self.triton_start: TritonStart | None = None  # likewise
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
        load_weights(
            self.model, directory, load_format=config.load_format, seed=config.seed, show_progress=tp.rank == 0
        )
        self.model.eval()
        self._weights_identity = weights_identity(self.model) if config.kv_disk_path is not None else ""
        self.num_heads = model_config.num_heads // tp.size  # query heads of this rank
        self._unbuilt: Iterator[LibraryPlan] | None = None  # None before the first is built

    def close_compile_server(self, is_complete: bool = False) -> None:
        """Nothing is compiled from here on. `is_complete`: all kernels that this engine needs have been."""
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
        """None: every step is launched kernel by kernel."""
        return None if self._steps is None else self._steps.graphs

    @property
    def offload(self) -> OffloadEngine | None:
        """The engine that moves the blocks; None without offload."""
        return None if self._memory is None else self._memory.offload

    @on_own_device
    def measure_kv_room(self, num_cpu_blocks: int, most_gpu_blocks: int) -> tuple[int, str]:
        """The bytes that every rank has for KV on its GPU, and a description of this rank's memory.

        On a GPU, this runs the largest steps and captures the largest graphs that an engine of up to `most_gpu_blocks`
        blocks can need.
        """
        if self.device.type == "cuda":
            profile = profile_memory(self, num_cpu_blocks, most_gpu_blocks)
            num_bytes, room = profile.free_bytes, str(profile)
        else:  # the blocks share this memory with the model and with everything else on the machine
            num_bytes = int(available_host_bytes() * self.config.gpu_memory_utilization / 2) // self.tp.size
            num_bytes -= self.spec.staging_bytes if num_cpu_blocks else 0
            room = f"{format_bytes(max(0, num_bytes))} of memory is available"
        available = torch.tensor([max(0, num_bytes)], device=self.device)
        return int(self.tp.all_gather(available).min()), room

    def launch_attention_kernels(self, num_tokens: int) -> None:
        """AttentionBackend.launch_kernels for chunks of up to `num_tokens` tokens."""
        k_cache, _ = self.memory.cache
        self.backend.launch_kernels(self._queries(num_tokens), k_cache[0])
        if self.memory.shadow is not None:
            self.memory.shadow.launch_kernels(self._queries(1), *self.memory.cache, self.max_model_len)

    def library_plans(self) -> Sequence[LibraryPlan]:
        """AttentionBackend.library_plans for the chunks that steps can hold."""
        max_query_len = min(self.config.max_num_batched_tokens, self.max_model_len)
        return self.backend.library_plans(self._queries(1), self.spec.num_kv_heads, max_query_len, self.max_model_len)

    @on_own_device
    @torch.inference_mode()
    def build_next_plan(self) -> bool:
        """Build the next of `library_plans`, for the thread that calls. Returns False if there is none left."""
        if self._unbuilt is None:
            self._unbuilt = iter(self.library_plans())
        plan = next(self._unbuilt, None)
        if plan is None:
            return False
        try:
            plan.build()
        except RuntimeError as error:  # such as too little memory; no prompt may ever need this plan
            logger.debug("a plan is left until a prompt needs it: %s", error)
        return True

    def max_split_bytes(self) -> int:
        """AttentionBackend.max_split_bytes of this model."""
        return self.backend.max_split_bytes(self._queries(1))

    def _queries(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, self.num_heads, self.spec.head_dim, dtype=self.dtype, device=self.device)

    @on_own_device
    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None:
        """Allocate all KV memory. With offload, the cache on the GPU consists of the OffloadEngine's slots."""
        with memory_remedy("allocating the KV cache"), self.phases("KV cache"):
            if self._memory is None:
                offload = cpu = None
                if sizes.num_cpu_blocks:
                    offload = self._make_offload_engine(self.spec, sizes.num_cpu_blocks, self.dtype, self.device)
                    cpu = make_cpu_attention(self.config, offload, self.num_heads, self.tp)
                self._memory = KVMemory(self.spec, self.backend, self.dtype, self.device, offload, cpu)
                self._steps = StepRunner(self.model, self._memory, self.tp)
            self._memory.allocate(sizes.num_gpu_blocks)
            if sizes.num_state_slots:
                self._memory.allocate_states(sizes.num_state_slots, sizes.num_snapshots)
            if self.spec.has_draft_head:
                self._memory.allocate_draft_head(sizes.num_cpu_blocks, sizes.num_state_slots)
            if sizes.num_pages:
                self._memory.allocate_shadow(ShadowSpec.of(self.spec, sizes.shadow_bits), sizes.num_pages)

    # -- graphs --------------------------------------------------------------------------------------------------

    @on_own_device
    def capture_graphs(self, num_gpu_blocks: int) -> None:
        """Capture the CUDA graphs that decode steps replay from here on. Needs an allocated KV cache."""
        start_bytes = used_bytes()
        with self.phases("graphs"):
            graphs = self.make_graphs(num_gpu_blocks)
            graphs.capture_all()
        logger.info("captured decode graphs (%s), %s", graphs, format_bytes(used_bytes() - start_bytes))

    def make_graphs(self, num_gpu_blocks: int) -> GraphSet:
        """Make the graphs for a cache of `num_gpu_blocks` blocks, still to be captured. Steps use them from here on."""
        buffers = GraphBuffers(
            max_num_rows=max_step_rows(self.config, num_gpu_blocks),
            max_num_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.spec.block_size,
            vocab_size=self.model_config.vocab_size,
            padded_vocab_size=self.model.lm_head.padded_vocab_size,
            dtype=self.dtype,
            device=self.device,
            has_states=self.spec.states is not None,
            hidden_size=self.model_config.hidden_size if self.spec.has_draft_head else 0,
        )
        graphs = self.steps.graphs = GraphSet(
            buffers=buffers,
            model=self.model,
            memory=self.memory,
            num_heads=self.num_heads,
            max_guesses=self.config.max_guesses,
            tp=self.tp,
        )
        return graphs

    def reset_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.reset()
            self.steps.graphs = None

    @on_own_device
    def measure_cpu_split(self) -> CpuSplit | None:
        """Measure how to divide attention between link and CPU; None if the CPU takes no part. Runs decode steps."""
        offload, cpu = self.memory.offload, self.memory.cpu
        if offload is None or cpu is None:
            return None
        with self.phases("CPU attention"):
            return measure_split(offload, cpu, self.launch, self.tp, is_forced=self.config.cpu_attention == "on")

    @on_own_device
    def measure_drafts(self) -> DraftTimes:
        """Measure how long drafting a token takes. Runs decode steps."""
        with self.phases("drafts"):
            return self.steps.measure_drafts(self.max_model_len)

    @on_own_device
    @torch.inference_mode()
    def open_disk(self, setup: DiskSetup) -> DiskStore:
        """Open the cache on disk. What it holds belongs to this rank's weights and layout, and to no others."""
        spec, model, states = self.spec, self.model_config, self.memory.state_memory
        with self.phases("KV on disk"):
            identity = {
                "version": __version__,
                "config": repr(model),
                "weights": self._weights_identity,
                "dtype": str(self.dtype),
                "rank": f"{self.tp.rank} of {self.tp.size}",
                "layout": [2, spec.num_layers, DISK_GRAIN_TOKENS, spec.num_kv_heads, spec.head_dim],
                "states": [] if states is None else [list(part.shape[1:]) for part in states.stored_parts],
            }
            self._disk = open_worker(setup, self.memory.disk_pool(), identity, self.tp.rank, self.tp.size)
        return self._disk.store

    @on_own_device
    def move_disk(self, moves: DiskMoves) -> None:
        assert self._disk is not None, "open_disk comes first"
        self._disk.submit(moves)

    def freeze_objects(self) -> None:
        """Exempt all objects that exist now from garbage collection, until `close`.

        The tuples that steps make trigger a full collection every few hundred steps. It would take 0.2 s each time to
        go through all objects of torch and transformers, which are never freed anyway.
        """
        gc.collect()
        gc.freeze()

    # -- one step ------------------------------------------------------------------------------------------------

    @on_own_device
    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """Enqueue the step. On the CPU it has run when this returns; on a GPU it may still be running. Hot."""
        return self.steps.launch(plan)

    def start_report(self) -> StartReport:
        """Report to the engine, once this rank has started."""
        return StartReport(
            needs_rope_lens=self.model.needs_rope_lens,
            link_byte_per_s=None if self.offload is None else self.offload.link_byte_per_s,
            phases=str(self.phases),
        )

    def stats(self) -> dict[str, Any]:
        """Counters of the copies of this rank, and the rate of its link."""
        return ({} if self._memory is None else self._memory.stats()) | (
            {} if self._disk is None else self._disk.stats()
        )

    @on_own_device
    def close(self) -> None:
        """Finish what is enqueued and release all memory. The runner must not be used afterwards."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if self._disk is not None:
                self._disk.close()
        finally:  # a GPU that has failed cannot finish, but the memory must be released all the same
            self.close_compile_server()
            self.reset_graphs()
            if self._memory is not None:
                self._memory.close()
            self._memory = self._steps = self._unbuilt = None
            vars(self).pop("model", None)
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
    tp: TPGroup,
) -> ModelRunner:
    """Make one rank's runner. With several ranks, each has the device that its process group was made for."""
    if device.type == "cuda":
        use_expandable_segments()
    return ModelRunner(config, model_config, directory, spec, tp, tp.device or device, make_offload_engine)
