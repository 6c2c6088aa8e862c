"""CapacityPlan: memory, speed bounds and the number of sequences that fit, known before anything is allocated.

A plan follows from a model, a machine and the engine's options. planner.py makes it, and plan_check.py judges it. This
is arithmetic only: it loads neither torch nor weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.capacity import costs
from nanovllm.capacity.device_memory import DeviceMemory, device_memory
from nanovllm.capacity.machine import Machine
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.core.guesses import expected_tokens
from nanovllm.core.kv_spec import KVCacheSpec
from nanovllm.core.step_limits import max_model_len
from nanovllm.utils.arithmetic import ceil_div


class Capacity(NamedTuple):
    """How many sequences of one length can run together, and which limit applies."""

    num_sequences: int
    limit: str


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """Memory and speed bounds of an engine that runs `num_sequences` sequences together. Bytes are per GPU.

    A bound is a number of tokens per second, over all sequences, that no schedule can exceed. It follows from the
    bytes that must be moved or the arithmetic that must be done, and from the machine's rate for that.
    """

    config: Config
    model: ModelConfig
    machine: Machine
    spec: KVCacheSpec  # the KV cache of one GPU
    context: int  # tokens of each sequence
    num_sequences: int
    num_gpu_blocks: int  # slots, or without offload the whole cache
    num_cpu_blocks: int  # 0 without offload

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.block_bytes // self.spec.block_size

    @property
    def memory(self) -> DeviceMemory:
        """How much GPU memory is used, part by part."""
        limit = max_model_len(self.config, self.model)
        return device_memory(self.config, self.model, self.machine, self.spec, limit, self.num_gpu_blocks)

    @property
    def gpu_limit_bytes(self) -> int | None:
        """GPU memory that the engine may use; None on a CPU."""
        if self.machine.gpu_bytes is None:
            return None
        return int(self.machine.gpu_bytes * self.config.gpu_memory_utilization)

    @property
    def fits_gpu(self) -> bool:
        """Whether the GPU memory used, including estimates, is within the limit. True on a CPU."""
        return self.gpu_limit_bytes is None or self.memory.total_bytes <= self.gpu_limit_bytes

    @property
    def cpu_pool_bytes(self) -> int:
        """Size of the CPU pools of all ranks together."""
        return self.num_cpu_blocks * self.spec.block_bytes * self.config.tensor_parallel_size

    @property
    def fits_host(self) -> bool:
        return self.cpu_pool_bytes <= self.machine.host_bytes

    # -- sequences and blocks ------------------------------------------------------------------------------------

    def capacity(self, num_tokens: int) -> Capacity:
        """How many sequences of `num_tokens` tokens, prompt and answer, can run together."""
        each = ceil_div(num_tokens, self.spec.block_size)
        by_limit = {"max_num_seqs": self.config.max_num_seqs}
        if self.config.enable_cpu_offload:
            by_limit |= {"the slots": self.num_gpu_blocks, "the CPU pool": self.num_cpu_blocks // each}
        else:
            by_limit |= {"the KV cache": self.num_gpu_blocks // each}
        limit = min(by_limit, key=by_limit.__getitem__)
        return Capacity(by_limit[limit], limit)

    @property
    def num_full_blocks(self) -> int:
        """Number of full blocks of each sequence."""
        return costs.num_full_blocks(self.context, self.spec.block_size)

    @property
    def num_missing_blocks(self) -> int:
        """The fewest blocks that can cross the link in a decode step: full blocks - (slots - sequences)."""
        if not self.config.enable_cpu_offload:
            return 0
        return costs.num_missing_blocks(self.context, self.spec.block_size, self.num_gpu_blocks, self.num_sequences)

    # -- bounds --------------------------------------------------------------------------------------------------

    @property
    def link_decode_tok_per_s(self) -> float | None:
        """sequences x link rate / missing bytes. None if nothing crosses the link, or if its rate is unknown."""
        if not (self.machine.link_byte_per_s and self.num_missing_blocks):
            return None
        missing_bytes = self.num_missing_blocks * self.spec.block_bytes
        return self.num_sequences * self.machine.link_byte_per_s / missing_bytes

    @property
    def link_and_cpu_decode_tok_per_s(self) -> float | None:
        """sequences x (link rate + CPU rate) / missing bytes. None if nothing is missing or a rate is unknown."""
        link_bound, cpu_byte_per_s = self.link_decode_tok_per_s, self.machine.cpu_byte_per_s
        if not (link_bound and self.machine.link_byte_per_s and cpu_byte_per_s):
            return None
        return link_bound * (1 + cpu_byte_per_s / self.machine.link_byte_per_s)

    @property
    def memory_decode_tok_per_s(self) -> float | None:
        """sequences x GPU memory rate / (weights + all keys and values)."""
        if not self.machine.memory_byte_per_s:
            return None
        num_keys = self.num_sequences * self.context
        step_bytes = costs.decode_bytes(self.config, self.model, num_keys, self.kv_bytes_per_token)
        return self.num_sequences * self.machine.memory_byte_per_s / step_bytes

    def guessing_decode_tok_per_s(self, acceptance: float) -> float | None:
        """The lowest bound of decode, with as many guesses in each step as allowed, of which this share is right.

        Drafts are taken to cost nothing. None without speculation, or if no bound of decode is known.
        """
        bounds = (self.link_and_cpu_decode_tok_per_s or self.link_decode_tok_per_s, self.memory_decode_tok_per_s)
        known = [bound for bound in bounds if bound is not None]
        if not (self.config.max_guesses and known):
            return None
        return min(known) * expected_tokens(acceptance, self.config.max_guesses)

    @property
    def link_prefill_tok_per_s(self) -> float | None:
        """Prompts run one after the other. For each chunk, the earlier blocks that are not resident cross the link."""
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
