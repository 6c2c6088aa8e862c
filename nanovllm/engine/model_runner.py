"""ModelRunner: one rank's model and KV cache. Does what a plan says; the same on every rank."""

import gc
import logging
from pathlib import Path

import numpy as np
import torch

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.attention.paged import PagedAttention
from nanovllm.attention.selection import choose_backend
from nanovllm.attention.streamed import StreamedAttention
from nanovllm.config import Config, KVCacheSizes, kv_cache_spec
from nanovllm.distributed import TPGroup
from nanovllm.engine import inputs
from nanovllm.engine.batch import KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.engine.cuda_graphs import DecodeGraphs, DecodeInputs
from nanovllm.engine.streamed_graphs import StreamedDecodeGraphs
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.layers.sampler import SamplingTensors, sample
from nanovllm.loader import load_weights
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import build_model
from nanovllm.utils.memory import available_host_bytes

logger = logging.getLogger("nanovllm")


class StepResult:
    """The sampled tokens of a step that may still be running."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._host = tokens
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def token_ids(self) -> list[int]:
        """One id per sampling sequence of the plan. Waits for the step."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class ModelRunner:
    def __init__(
        self, config: Config, model_config: ModelConfig, directory: Path | None, tp: TPGroup, device: torch.device
    ) -> None:
        """Builds and loads this rank's part of the model. `directory`: where the weights are."""
        self.config, self.model_config, self.tp, self.device = config, model_config, tp, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.dtype = getattr(torch, model_config.torch_dtype if config.dtype == "auto" else config.dtype)
        self.max_model_len = config.max_model_len or model_config.max_model_len_limit
        self.model = build_model(model_config, tp, max_model_len=self.max_model_len, dtype=self.dtype, device=device)
        load_weights(
            self.model, directory, load_format=config.load_format, seed=config.seed, show_progress=tp.rank == 0
        )
        self.model.eval()
        self.scale = model_config.head_dim**-0.5
        self.spec = kv_cache_spec(config, model_config, tp.size)
        self.backend = choose_backend(config.attn_backend, device, self.dtype, model_config.head_dim)
        self.offload: OffloadEngine | None = None
        self.graphs: DecodeGraphs | None = None
        self.streamed_graphs: StreamedDecodeGraphs | None = None
        self._sampled = torch.zeros(0, dtype=torch.int64, device=device)

    # -- KV cache ------------------------------------------------------------------------------------------------

    def measure_num_gpu_blocks(self) -> int:
        """Blocks of KV that fit beside the model and the memory of its largest step, the smallest over all ranks."""
        if self.device.type == "cuda":
            num_bytes = self._measure_free_bytes()
        else:  # the model itself and everything else on the machine live in the same memory
            num_bytes = int(available_host_bytes() * self.config.gpu_memory_utilization / 2) // self.tp.size
        num_bytes -= self.spec.staging_bytes if self.config.enable_cpu_offload else 0
        fitting = torch.tensor([max(0, num_bytes // self.spec.block_bytes)], device=self.device)
        return int(self.tp.all_gather(fitting).min())

    def _measure_free_bytes(self) -> int:
        """total x utilization - used - peak + current, after a step of the largest size."""
        self._warm_up()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
        return int(total * self.config.gpu_memory_utilization) - (total - free) - peak + current

    def _warm_up(self) -> None:
        """Run the largest step once, on two blocks of a throw-away cache that all its sequences share."""
        torch.cuda.reset_peak_memory_stats()
        shape = (self.spec.num_layers, 2, self.spec.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in "kv")
        longest = min(2 * self.spec.block_size, self.max_model_len)
        remaining = self.config.max_num_batched_tokens
        steps: list[SequenceStep] = []
        while remaining:
            num_tokens = min(longest, remaining)
            remaining -= num_tokens
            sampling = SamplingRow(1.0, 0, 1.0, 0.0, 0, num_tokens)
            ids = np.zeros(num_tokens, dtype=np.int64)
            steps.append(SequenceStep(len(steps), ids, 0, num_tokens, (0, 1), num_tokens, sampling))
        self.launch(StepPlan(0, tuple(steps[: self.config.max_num_seqs]), KVMoves()))
        del self.k_cache, self.v_cache

    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None:
        """All KV memory, once. With CPU blocks the cache on the GPU is the slots of the OffloadEngine."""
        if sizes.num_cpu_blocks:
            self.offload = OffloadEngine(self.spec, sizes, self.dtype, self.device)
            self.k_cache, self.v_cache = self.offload.k_cache_gpu, self.offload.v_cache_gpu
            return
        spec = self.spec
        shape = (spec.num_layers, sizes.num_gpu_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # On the CPU memory that nothing touches costs nothing; on the GPU it could hold NaN, which 0 x NaN lets through
        make = torch.zeros if self.device.type == "cuda" else torch.empty
        self.k_cache, self.v_cache = (make(shape, dtype=self.dtype, device=self.device) for _ in "kv")

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Decode steps become CUDA graphs from here on. Needs the KV cache."""
        static = DecodeInputs(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.spec.block_size,
            device=self.device,
        )
        self.graphs = DecodeGraphs(static)
        self._capture(self.graphs)
        if self.offload is not None:
            num_heads = self.model_config.num_heads // self.tp.size
            self.streamed_graphs = StreamedDecodeGraphs(static, self.backend, self.offload, self.scale, num_heads)
            self._capture(self.streamed_graphs)

    def _capture(self, graphs: DecodeGraphs | StreamedDecodeGraphs) -> None:
        if self.tp.size > 1:
            self.tp.on_close.append(graphs.reset)
        graphs.capture(self.model, self._paged_attention, show_progress=self.tp.rank == 0)

    def freeze_objects(self) -> None:
        """The garbage collector leaves out what exists now, until `close`.

        It goes through everything once in some hundred steps, because of the tuples that they make: 0.2 s with all the
        objects of torch and transformers, which are here to stay.
        """
        gc.collect()
        gc.freeze()

    # -- one step ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepResult:
        """Enqueue the step. On the CPU it has run when this returns, on the GPU it need not have. Hot."""
        arrays = inputs.build_arrays(plan, self.spec.block_size)
        if self.offload is not None:
            self.offload.begin_step(plan.moves, (slot for step in plan.sequences for slot in step.block_table))
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

    def stats(self) -> dict[str, float | None]:
        """Counters of the copies of this rank, and the rate of its link."""
        return {} if self.offload is None else self.offload.stats()

    def close(self) -> None:
        """Finish what is enqueued and let go of all memory; only the garbage collector may touch this afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for graphs in (self.graphs, self.streamed_graphs):
            if graphs is not None:
                graphs.reset()
        if self.offload is not None:
            self.offload.close()
        self.graphs = self.streamed_graphs = self.offload = None
        for name in ("model", "k_cache", "v_cache"):
            vars(self).pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            gc.unfreeze()
