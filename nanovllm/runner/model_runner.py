"""ModelRunner: one rank's model and KV cache. Does what a plan says; the same on every rank."""

import gc
import importlib.util
import itertools
import logging
from pathlib import Path

import numpy as np
import torch

from nanovllm.attention.backends.selection import choose_backend
from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.attention.paged import PagedAttention
from nanovllm.attention.streamed import StreamedAttention
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.core.kv_spec import (
    KVCacheSizes,
    dtype_name,
    kv_cache_spec,
)
from nanovllm.core.start_report import StartReport
from nanovllm.core.step_limits import max_model_len, max_sampled_rows
from nanovllm.core.step_plan import StepPlan
from nanovllm.device.device_guard import current_device, on_own_device
from nanovllm.device.devices import use_expandable_segments
from nanovllm.device.memory_profile import (
    GRAPH_LAYER_BYTES,
    MemoryProfile,
    memory_remedy,
    reserved_by,
    used_bytes,
)
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.kvcache.transfer.offload_engine import OffloadEngine
from nanovllm.layers.sampler import sample
from nanovllm.models.loader import load_weights
from nanovllm.models.registry import build_model
from nanovllm.runner import inputs
from nanovllm.runner.cuda_graphs import DecodeGraphs, DecodeInputs
from nanovllm.runner.largest_step import largest_steps, short_step
from nanovllm.runner.step_result import StepResult
from nanovllm.runner.streamed_graphs import StreamedDecodeGraphs
from nanovllm.utils.memory import available_host_bytes, format_bytes
from nanovllm.utils.phases import Phases

logger = logging.getLogger("nanovllm")


class ModelRunner:
    def __init__(
        self, config: Config, model_config: ModelConfig, directory: Path | None, tp: TPGroup, device: torch.device
    ) -> None:
        """Builds and loads this rank's part of the model. `directory`: where the weights are."""
        self.config, self.model_config, self.tp, self.device = config, model_config, tp, device
        self.offload: OffloadEngine | None = None
        self.graphs: DecodeGraphs | None = None
        self.streamed_graphs: StreamedDecodeGraphs | None = None
        self.phases = Phases()
        with current_device(device), memory_remedy("loading the model"), self.phases("weights"):
            self._load(directory)

    def _load(self, directory: Path | None) -> None:
        config, model_config, device, tp = self.config, self.model_config, self.device, self.tp
        self.dtype = getattr(torch, dtype_name(config, model_config))
        self.backend = choose_backend(
            config.attn_backend, device, self.dtype, model_config.head_dim, enforce_eager=config.enforce_eager
        )
        self.max_model_len = max_model_len(config, model_config)
        self.model = build_model(model_config, tp, max_model_len=self.max_model_len, dtype=self.dtype, device=device)
        load_weights(
            self.model, directory, load_format=config.load_format, seed=config.seed, show_progress=tp.rank == 0
        )
        self.model.eval()
        self.scale = model_config.head_dim**-0.5
        self.spec = kv_cache_spec(config, model_config, tp.size)
        self._sampled = torch.zeros(0, dtype=torch.int64, device=device)

    # -- KV cache ------------------------------------------------------------------------------------------------

    @on_own_device
    def measure_num_gpu_blocks(self, num_cpu_blocks: int, most_gpu_blocks: int) -> tuple[int, str]:
        """The number of KV blocks that fit, the smallest over all ranks, and a description of rank 0's memory.

        On a GPU it runs the largest steps and captures the largest graphs that an engine of up to `most_gpu_blocks`
        blocks can need.
        """
        if self.device.type == "cuda":
            profile = self._profile_memory(num_cpu_blocks, most_gpu_blocks)
            num_bytes, room = profile.free_bytes, str(profile)
        else:  # the model itself and everything else on the machine live in the same memory
            num_bytes = int(available_host_bytes() * self.config.gpu_memory_utilization / 2) // self.tp.size
            num_bytes -= self.spec.staging_bytes if num_cpu_blocks else 0
            room = f"{format_bytes(max(0, num_bytes))} of memory are available for it"
        fitting = torch.tensor([max(0, num_bytes // self.spec.block_bytes)], device=self.device)
        return int(self.tp.all_gather(fitting).min()), room

    def _profile_memory(self, num_cpu_blocks: int, most_gpu_blocks: int) -> MemoryProfile:
        """Measured with a cache of one block, which all sequences share."""
        self.allocate_kv_cache(KVCacheSizes(1, num_cpu_blocks))
        steps = largest_steps(
            num_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=max_sampled_rows(self.config, most_gpu_blocks),
            max_model_len=self.max_model_len,
            block_size=self.spec.block_size,
            group_blocks=self.spec.staging_group_blocks if num_cpu_blocks else 0,
        )
        with memory_remedy("running its largest step"):
            self._compile_kernels(steps, most_gpu_blocks)
            with self.phases("largest step"):
                step_bytes = reserved_by(lambda: [self.launch(plan) for plan in steps])
        with self.phases("graphs"):
            graph_bytes = 0 if self.config.enforce_eager else self._measure_graph_bytes(most_gpu_blocks)
        self._drop_kv_cache()
        total_bytes = torch.cuda.mem_get_info()[1]
        return MemoryProfile(
            total_bytes=total_bytes,
            utilization=self.config.gpu_memory_utilization,
            used_bytes=used_bytes(),
            step_bytes=step_bytes,
            graph_bytes=graph_bytes,
        )

    def _compile_kernels(self, steps: list[StepPlan], most_gpu_blocks: int) -> None:
        """Compile side by side what prompts, chunks, samplers and decode graphs launch, so that no request waits for
        it. Meanwhile the libraries of the backends are initialised.
        """
        if importlib.util.find_spec("triton") is None:
            return
        from nanovllm.kernels.launch import compile_only

        short = short_step(max_sampled_rows(self.config, most_gpu_blocks), self.max_model_len, self.spec.block_size)
        with self.phases("kernels"), torch.inference_mode(), compile_only() as is_compiling:
            for plan in (*steps, short):
                self.launch(plan)
            if not self.config.enforce_eager:
                for graphs in self._make_graphs(most_gpu_blocks):
                    for size in graphs.sizes:
                        if size & (size - 1) == 0 or size == graphs.sizes[-1]:
                            graphs.run_eager(self.model, self._paged_attention, size)
            num_tokens = max(seq.num_tokens for plan in steps for seq in plan.sequences)
            shape = (num_tokens, self.model_config.num_heads // self.tp.size, self.spec.head_dim)
            q_THD = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self.backend.warm_up(q_THD, self.spec.num_kv_heads, self.max_model_len, has_time=is_compiling)
        self._reset_graphs()

    def _measure_graph_bytes(self, most_gpu_blocks: int) -> int:
        """From the largest size of each kind, whose memory the others share; their own part is an estimate."""
        before = used_bytes()
        all_graphs = self._make_graphs(most_gpu_blocks)
        for graphs in all_graphs:
            self._capture(graphs, graphs.sizes[-1:])
        num_bytes = used_bytes() - before
        num_others = sum(len(graphs.sizes) - 1 for graphs in all_graphs)
        self._reset_graphs()
        return num_bytes + num_others * self.spec.num_layers * GRAPH_LAYER_BYTES

    @on_own_device
    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None:
        """All KV memory. With CPU blocks the cache on the GPU is the slots of the OffloadEngine."""
        with memory_remedy("allocating the KV cache"), self.phases("KV cache"):
            if sizes.num_cpu_blocks:
                if self.offload is None:
                    self.offload = OffloadEngine(self.spec, sizes.num_cpu_blocks, self.dtype, self.device)
                self.offload.allocate_slots(sizes.num_gpu_blocks)
                self.k_cache, self.v_cache = self.offload.k_cache_gpu, self.offload.v_cache_gpu
                return
            spec = self.spec
            shape = (spec.num_layers, sizes.num_gpu_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
            # Untouched CPU pages are free, so leave them uninitialised. Zero the GPU cache: garbage may be NaN, and a
            # masked weight of 0 does not cancel NaN.
            make = torch.zeros if self.device.type == "cuda" else torch.empty
            self.k_cache, self.v_cache = (make(shape, dtype=self.dtype, device=self.device) for _ in ("k", "v"))

    def _drop_kv_cache(self) -> None:
        """Let go of the blocks on the GPU, so that others can be allocated."""
        del self.k_cache, self.v_cache
        if self.offload is not None:
            self.offload.drop_slots()

    @on_own_device
    def capture_graphs(self, num_gpu_blocks: int) -> None:
        """Decode steps become CUDA graphs from here on. Needs the KV cache."""
        start_bytes = used_bytes()
        with self.phases("graphs"):
            all_graphs = self._make_graphs(num_gpu_blocks)
            for graphs in all_graphs:
                self._capture(graphs, graphs.sizes)
        sizes = ", ".join(f"{len(graphs.sizes)} {graphs.name}" for graphs in all_graphs)
        logger.info("captured decode graphs (%s), %s", sizes, format_bytes(used_bytes() - start_bytes))

    def _make_graphs(self, num_gpu_blocks: int) -> list[DecodeGraphs | StreamedDecodeGraphs]:
        head = self.model.lm_head
        static = DecodeInputs(
            max_num_seqs=max_sampled_rows(self.config, num_gpu_blocks),
            max_model_len=self.max_model_len,
            block_size=self.spec.block_size,
            vocab_size=self.model_config.vocab_size,
            padded_vocab_size=head.padded_vocab_size,
            dtype=self.dtype,
            device=self.device,
        )
        self.graphs = DecodeGraphs(static)
        if self.offload is None:
            return [self.graphs]
        num_heads = self.model_config.num_heads // self.tp.size
        self.streamed_graphs = StreamedDecodeGraphs(static, self.backend, self.offload, self.scale, num_heads)
        return [self.graphs, self.streamed_graphs]

    @torch.inference_mode()
    def _capture(self, graphs: DecodeGraphs | StreamedDecodeGraphs, sizes: list[int]) -> None:
        if self.tp.size > 1:
            self.tp.on_close.append(graphs.reset)
        with memory_remedy("capturing CUDA graphs"):
            graphs.capture(self.model, self._paged_attention, sizes, show_progress=self.tp.rank == 0)

    def _reset_graphs(self) -> None:
        for graphs in (self.graphs, self.streamed_graphs):
            if graphs is not None:
                graphs.reset()
        self.graphs = self.streamed_graphs = None
        self.tp.on_close.clear()

    def freeze_objects(self) -> None:
        """The garbage collector leaves out what exists now, until `close`.

        It goes through everything once in some hundred steps, because of the tuples that they make: 0.2 s with all the
        objects of torch and transformers, which are here to stay.
        """
        gc.collect()
        gc.freeze()

    # -- one step ------------------------------------------------------------------------------------------------

    @on_own_device
    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """Enqueue the step. On the CPU it has run when this returns, on the GPU it need not have. Hot."""
        arrays = inputs.build_arrays(plan, self.spec.block_size)
        if self.offload is not None:
            slots_in_use = itertools.chain.from_iterable(step.block_table for step in plan.sequences)
            self.offload.begin_step(plan.moves, slots_in_use)
        decodes_by_graph = self.graphs is not None and plan.is_decode and not (plan.moves.loads or plan.moves.copies)
        run = self._run_graph if decodes_by_graph else self._run_eager
        self._sampled = run(plan, arrays)
        if self.offload is not None:
            self.offload.end_step()
        return StepResult(self._sampled)

    def _run_eager(self, plan: StepPlan, arrays: dict[str, np.ndarray]) -> torch.Tensor:
        """Any step. Returns the tokens of the rows that sample."""
        groups = inputs.build_groups(plan, self.spec.block_size, self.spec.staging_group_blocks)
        for i, (lens, tables) in enumerate(groups):
            arrays |= {f"group_context_lens_{i}": lens, f"group_tables_{i}": tables}
        tensors = inputs.to_device(arrays, self.device)
        if len(arrays["pending_tokens"]):  # what the previous step sampled comes from there, not by way of the host
            pending = self._sampled[tensors["pending_rows"]].clamp_(min=0)  # an invalid one ends its request soon
            tensors["input_ids"][tensors["pending_tokens"]] = pending
        rope_lens = tensors["rope_lens"] if self.model.needs_rope_lens else None
        rows = None if plan.is_decode else tensors["logits_rows"]
        attention = self._attention(plan, tensors)
        hidden = self.model(tensors["input_ids"], tensors["positions"], attention, rope_lens, rows)
        if not len(hidden):
            return self._sampled[:0]
        params = SamplingTensors(*(tensors[name] for name in inputs.SAMPLING_ARRAYS))
        sampled = self.tp.broadcast(sample(self.model.compute_logits(hidden), params))
        if self.graphs is not None:
            self.graphs.inputs.sampled[: len(sampled)].copy_(sampled)  # where the next step's graph looks for them
        return sampled

    def _run_graph(self, plan: StepPlan, arrays: dict[str, np.ndarray]) -> torch.Tensor:
        """A decode step that loads nothing into slots: one replay, or pieces where groups are streamed."""
        assert self.graphs is not None
        if plan.moves.streamed:
            assert self.streamed_graphs is not None
            groups = inputs.build_groups(plan, self.spec.block_size, self.spec.staging_group_blocks)
            logits = self.streamed_graphs.run(arrays, groups)
        else:
            if self.offload is not None:
                self.offload.begin_all_layers()
            logits = self.graphs.run(arrays)
            if self.offload is not None:
                self.offload.ran_all_layers()
        return self.tp.broadcast(self.graphs.inputs.sampled[: len(logits)])

    def _paged_attention(self, slot_mapping: torch.Tensor, batch: PagedBatch) -> StepAttention:
        return PagedAttention(self.backend, self.k_cache, self.v_cache, slot_mapping, batch, batch, self.scale)

    def _attention(self, plan: StepPlan, tensors: dict[str, torch.Tensor]) -> StepAttention:
        batches = inputs.build_batches(plan, tensors, self.spec.block_size)
        last = batches if plan.is_decode else inputs.last_token_batches(plan, batches, tensors["sampled"])
        cache = self.k_cache, self.v_cache, tensors["slot_mapping"]
        if self.offload is None:
            return PagedAttention(self.backend, *cache, batches.paged, last.paged, self.scale)
        return StreamedAttention(
            self.backend,
            self.offload,
            *cache,
            batches.paged,
            last.paged,
            batches.groups,
            last.groups,
            self.scale,
        )

    def start_report(self) -> StartReport:
        """What the engine must know of this rank, once it has started."""
        return StartReport(
            kv_spec=self.spec,
            needs_rope_lens=self.model.needs_rope_lens,
            link_byte_per_s=None if self.offload is None else self.offload.link_byte_per_s,
            phases=str(self.phases),
        )

    def stats(self) -> dict[str, float | None]:
        """Counters of the copies of this rank, and the rate of its link."""
        return {} if self.offload is None else self.offload.stats()

    @on_own_device
    def close(self) -> None:
        """Finish what is enqueued and let go of all memory; only the garbage collector may touch this afterwards."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        finally:  # a GPU that has failed cannot finish; the memory goes all the same
            self._reset_graphs()
            if self.offload is not None:
                self.offload.close()
            self.offload = None
            for name in ("model", "k_cache", "v_cache"):
                vars(self).pop(name, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                gc.unfreeze()


def make_runner(
    config: Config, model_config: ModelConfig, directory: Path | None, device: torch.device, tp: TPGroup
) -> ModelRunner:
    """One rank's runner; with several ranks on GPUs, rank r has cuda:r."""
    if device.type == "cuda":
        use_expandable_segments()
        device = torch.device("cuda", tp.rank) if tp.size > 1 else device
    return ModelRunner(config, model_config, directory, tp, device)
