"""Plan: what a model, a machine and the engine's options come to, before anything is allocated.

Memory, bounds, and what cannot work; made by planner.py. Arithmetic only: no torch, no weights.
"""

from dataclasses import dataclass

from nanovllm import costs
from nanovllm.config import Config, KVCacheSpec, kv_cache_spec
from nanovllm.machine import Machine
from nanovllm.model_config import ModelConfig
from nanovllm.plan_table import plan_table
from nanovllm.utils.memory import format_bytes

MAX_HOST_SHARE = 0.7  # of the memory available, for a CPU pool whose size the user left open
GPU_OVERHEAD_BYTES = 2**30  # CUDA context, libraries, graphs: assumed, not measured


def max_model_len(config: Config, model: ModelConfig) -> int:
    """Tokens of the longest sequence. Raises ValueError for more than the rope covers."""
    limit = model.max_model_len_limit
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {limit} tokens the model's rope covers; lower it, "
            "or extend the rope in the model's config.json (rope_scaling)"
        )
    return config.max_model_len or limit


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory and bounds of an engine and of the sequences it is to run together. Bytes are per GPU.

    Exact: weights, blocks, staging, CPU pool, missing blocks. Estimated: activations. Assumed: CUDA's own memory. A
    bound is what no schedule can exceed: bytes or arithmetic that cannot be avoided, over the machine's rate; tok/s
    of all sequences together.
    """

    config: Config
    model: ModelConfig
    machine: Machine
    context: int  # tokens of each sequence
    num_sequences: int
    num_gpu_blocks: int  # slots, or without offload the whole cache
    num_cpu_blocks: int  # 0 without offload

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> KVCacheSpec:
        """The KV cache of one GPU."""
        return kv_cache_spec(self.config, self.model, self.config.tensor_parallel_size)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.block_bytes // self.spec.block_size

    @property
    def weight_bytes(self) -> int:
        return costs.weight_bytes(self.config, self.model)

    @property
    def slot_bytes(self) -> int:
        """All blocks on the GPU."""
        return self.num_gpu_blocks * self.spec.block_bytes

    @property
    def staging_bytes(self) -> int:
        return self.spec.staging_bytes if self.config.enable_cpu_offload else 0

    @property
    def activation_bytes(self) -> int:
        """Estimate of the largest step."""
        return costs.activation_bytes(self.config, self.model, max_model_len(self.config, self.model))

    @property
    def overhead_bytes(self) -> int:
        """CUDA's own memory, assumed."""
        return 0 if self.machine.gpu_bytes is None else GPU_OVERHEAD_BYTES

    @property
    def gpu_bytes(self) -> int:
        """Everything on the GPU at the peak, estimates included."""
        parts = self.weight_bytes + self.slot_bytes + self.staging_bytes
        return parts + self.activation_bytes + self.overhead_bytes

    @property
    def gpu_limit_bytes(self) -> int | None:
        """What the engine may use; None on a CPU."""
        if self.machine.gpu_bytes is None:
            return None
        return int(self.machine.gpu_bytes * self.config.gpu_memory_utilization)

    @property
    def cpu_pool_bytes(self) -> int:
        """Of all ranks together."""
        return self.num_cpu_blocks * self.spec.block_bytes * self.config.tensor_parallel_size

    # -- blocks and bounds ---------------------------------------------------------------------------------------

    @property
    def num_full_blocks(self) -> int:
        """Of each sequence."""
        return costs.num_full_blocks(self.context, self.spec.block_size)

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that cross the link in each decode step, at the fewest: full - (slots - sequences)."""
        if not self.config.enable_cpu_offload:
            return 0
        return costs.num_missing_blocks(self.context, self.spec.block_size, self.num_gpu_blocks, self.num_sequences)

    @property
    def link_decode_tok_per_s(self) -> float | None:
        """sequences x link / missing bytes. None: nothing crosses the link, or there is none."""
        if not (self.machine.link_byte_per_s and self.num_missing_blocks):
            return None
        missing_bytes = self.num_missing_blocks * self.spec.block_bytes
        return self.num_sequences * self.machine.link_byte_per_s / missing_bytes

    @property
    def memory_decode_tok_per_s(self) -> float | None:
        """sequences x GPU memory rate / (weights + all keys and values)."""
        if not self.machine.memory_byte_per_s:
            return None
        num_keys = self.num_sequences * self.context
        step_bytes = costs.decode_bytes(self.config, self.model, num_keys, self.kv_bytes_per_token)
        return self.num_sequences * self.machine.memory_byte_per_s / step_bytes

    @property
    def link_prefill_tok_per_s(self) -> float | None:
        """One prompt after the other; per chunk, its history less what the other slots hold, crosses the link."""
        if not (self.machine.link_byte_per_s and self.config.enable_cpu_offload):
            return None
        num_loaded = costs.num_prefill_loaded_blocks(
            self.context, self.spec.block_size, self.num_gpu_blocks, self.config.max_num_batched_tokens
        )
        seconds = num_loaded * self.spec.block_bytes / self.machine.link_byte_per_s
        return self.context / seconds if seconds else None

    @property
    def flop_prefill_tok_per_s(self) -> float | None:
        if not self.machine.flop_per_s:
            return None
        return self.context * self.machine.flop_per_s / costs.prefill_flop(self.config, self.model, self.context)

    # -- what cannot work ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ValueError, with the numbers and the remedy, for an engine that cannot start."""
        problem = (self._pool_problem() if self.config.enable_cpu_offload else None) or self._gpu_problem()
        problem = problem or self._cpu_problem()
        if problem:
            raise ValueError(problem)

    def check_workload(self) -> None:
        """Raises ValueError when the engine can start and yet not run these sequences together."""
        problem = self._workload_problem()
        if problem:
            raise ValueError(problem)

    def _pool_problem(self) -> str | None:
        config, available = self.config, self.machine.host_bytes
        if self.num_cpu_blocks < 1:
            block = format_bytes(self.spec.block_bytes * config.tensor_parallel_size)
            if config.cpu_memory_gb is None:
                room = f"{MAX_HOST_SHARE:.0%} of the {format_bytes(available)} of memory available hold"
            else:
                room = f"cpu_memory_gb={config.cpu_memory_gb} holds"
            return f"{room} no block of {block}; raise cpu_memory_gb or lower kvcache_block_size"
        if self.cpu_pool_bytes > available:
            return (
                f"a CPU pool of {self.num_cpu_blocks} blocks needs {format_bytes(self.cpu_pool_bytes)}, "
                f"{format_bytes(available)} of memory are available; lower num_cpu_blocks or cpu_memory_gb"
            )
        return None

    def _gpu_problem(self) -> str | None:
        """By what is exact; what only the estimates forbid is for start-up to find out."""
        limit, fixed_bytes = self.gpu_limit_bytes, self.weight_bytes + self.staging_bytes
        if limit is None or self.machine.gpu_bytes is None or fixed_bytes + self.slot_bytes <= limit:
            return None
        offload = self.config.enable_cpu_offload
        name, least = ("num_gpu_blocks", 2) if offload else ("num_kvcache_blocks", 1)
        most = (limit - fixed_bytes) // self.spec.block_bytes
        if most >= least:
            remedy = f"lower {name} to {most} or less, or raise gpu_memory_utilization"
        else:
            remedy = "raise gpu_memory_utilization, lower kvcache_block_size, or use a smaller model or more ranks"
        return (
            f"{name}={self.num_gpu_blocks} blocks of {format_bytes(self.spec.block_bytes)} need "
            f"{format_bytes(self.slot_bytes)}, weights {'and staging ' if offload else ''}{format_bytes(fixed_bytes)}: "
            f"more than the {format_bytes(limit)} that gpu_memory_utilization={self.config.gpu_memory_utilization} "
            f"allows of {format_bytes(self.machine.gpu_bytes)}; {remedy}"
        )

    def _cpu_problem(self) -> str | None:
        """On a CPU the model, its cache and the CPU pool share the host's memory. Sizes that the user left open count
        with the least that works: start-up makes them fit.
        """
        config, available = self.config, self.machine.host_bytes
        if self.machine.gpu_bytes is not None:
            return None
        offload = config.enable_cpu_offload
        name, least = ("num_gpu_blocks", 2) if offload else ("num_kvcache_blocks", 1)
        given = config.num_gpu_blocks if offload else config.num_kvcache_blocks
        num_blocks = given if given is not None and given > 0 else least
        pool_bytes = self.cpu_pool_bytes if config.num_cpu_blocks or config.cpu_memory_gb else 0
        block_bytes = self.spec.block_bytes * config.tensor_parallel_size
        fixed_bytes = (self.weight_bytes + self.staging_bytes) * config.tensor_parallel_size + pool_bytes
        if fixed_bytes + num_blocks * block_bytes <= available:
            return None
        most = (available - fixed_bytes) // block_bytes
        remedy = f"lower {name} to {most} or less" if most >= least else "use a smaller model, pool or block size"
        beside = "weights" if not offload else "weights, staging and CPU pool" if pool_bytes else "weights and staging"
        return (
            f"{name}={num_blocks} blocks of {format_bytes(block_bytes)} need {format_bytes(num_blocks * block_bytes)}, "
            f"{beside} {format_bytes(fixed_bytes)}: more than the {format_bytes(available)} of memory available; "
            f"{remedy}"
        )

    def _workload_problem(self) -> str | None:
        config, limit = self.config, max_model_len(self.config, self.model)
        if self.context > limit:
            longest = self.model.max_model_len_limit
            remedy = (
                "raise max_model_len" if self.context <= longest else f"extend the rope, which covers {longest} tokens"
            )
            return f"context={self.context} exceeds max_model_len={limit}; shorten it, or {remedy}"
        if self.num_sequences > config.max_num_seqs:
            return f"sequences={self.num_sequences} exceeds max_num_seqs={config.max_num_seqs}; raise max_num_seqs"
        needed = self.num_sequences * -(-self.context // self.spec.block_size)
        each = f"{self.num_sequences} x {self.context} tokens need {needed} blocks"
        if not config.enable_cpu_offload:
            if needed <= self.num_gpu_blocks:
                return None
            return f"{each} on the GPU, there is room for {self.num_gpu_blocks}; use enable_cpu_offload or more ranks"
        if needed > self.num_cpu_blocks:
            return (
                f"{each} in CPU memory, the pool has {self.num_cpu_blocks}; raise num_cpu_blocks or cpu_memory_gb "
                f"({format_bytes(self.machine.host_bytes)} are available)"
            )
        if self.num_sequences > self.num_gpu_blocks:
            return (
                f"{self.num_sequences} sequences need a slot each, there are {self.num_gpu_blocks}; raise "
                "num_gpu_blocks, or lower kvcache_block_size for more and smaller ones"
            )
        return None

    def __str__(self) -> str:
        return plan_table(self)
