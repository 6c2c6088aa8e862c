"""DeviceMemory: the memory of an engine on each GPU, part by part.

The weights, the KV blocks, the staging groups and the logits of the decode graphs are exact, because they follow from
shapes. The other parts are estimated with the constants below, which were fitted to the memory use of six engines of
Qwen3-0.6B and Qwen3-8B on an H200 (`python -m benchmarks.device_memory`; docs/log/2026-11-21.md has the figures). A
constant marked as assumed was never measured. This module is arithmetic only and loads neither torch nor weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from nanovllm.capacity.costs import (
    activation_bytes,
    expert_staging_bytes,
    itemsize,
    layer_activation_bytes,
    weight_bytes,
)
from nanovllm.capacity.division import wants_shadow
from nanovllm.capacity.machine import Machine
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.config import Config
from nanovllm.plan.kv_spec import KVCacheSpec, StateSpec, uses_draft_head
from nanovllm.plan.step_limits import (
    MAX_GRAPH_CHUNKS,
    draft_graph_sizes,
    graph_sizes,
    has_mixed_graphs,
    head_graph_sizes,
    max_graph_rows,
    max_step_rows,
    mixed_graph_sizes,
    streamed_graph_sizes,
    streamed_verifying_graph_sizes,
    verifying_graph_sizes,
)
from nanovllm.utils.arithmetic import ceil_div

MIB = 2**20
CONTEXT_BYTES = 780 * MIB  # CUDA's context (524 MiB), and the kernels that libraries and Triton load
NCCL_BYTES = 256 * MIB  # NCCL's buffers, if there is more than one rank; assumed
NUM_WORKSPACES = 2  # torch keeps one per stream that calls cuBLAS: the capturing stream and the running one
WORKSPACE_BYTES = 32 * MIB  # with compute capability 9.0 and above
OLD_WORKSPACE_BYTES = 8320 * 2**10  # below 9.0
GRAPH_LAYER_BYTES = 12 * 2**10  # a layer of one instantiated graph, about a dozen kernels; 10 to 50 MiB for all graphs
GRAPH_POOL_BYTES = 4 * MIB  # two pages of torch's allocator, in addition to the activations of the pool's graphs
DRAFTING_BYTES = 300 * MIB  # kernels and graph pools of drafts from a shadow, beyond the above: 350 to 490 MiB measured
INPUT_BYTES_PER_ROW = 8 * 14  # token, position, cell, lengths and sampling parameters of a sequence
MIXED_INPUT_BYTES_PER_TOKEN = 8 * 6  # the same for a token of a step with chunks
ALLOCATOR_SHARE = 0.4  # memory that torch's allocator cannot reuse for other sizes or streams, relative to activations


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Peak memory use on each GPU or, on a CPU, of the process."""

    weight_bytes: int
    kv_bytes: int  # all blocks: the slots with offload, or the whole cache without offload
    shadow_bytes: int
    state_bytes: int  # all slots of states
    draft_bytes: int  # K and V of the draft head, with offload
    staging_bytes: int
    expert_staging_bytes: int  # for experts that cross the link
    logits_bytes: int  # one static buffer that all graphs write their logits to
    input_bytes: int  # static inputs of the graphs
    activation_bytes: int  # in the largest step
    graph_bytes: int
    workspace_bytes: int  # cuBLAS
    context_bytes: int  # used by CUDA itself

    @property
    def exact_bytes(self) -> int:
        caches = self.kv_bytes + self.shadow_bytes + self.state_bytes + self.draft_bytes
        return self.weight_bytes + caches + self.staging_bytes + self.expert_staging_bytes + self.logits_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all parts, including estimates."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def estimated_bytes(self) -> int:
        return self.total_bytes - self.exact_bytes


def device_memory(
    config: Config,
    model: ModelConfig,
    machine: Machine,
    spec: KVCacheSpec,
    max_model_len: int,
    num_gpu_blocks: int,
    shadow_bytes: int = 0,
    state_bytes: int = 0,
    draft_bytes: int = 0,
) -> DeviceMemory:
    """Return the memory use of an engine with `num_gpu_blocks` blocks on each GPU."""
    is_gpu = machine.gpu_bytes is not None
    workspace = WORKSPACE_BYTES if (machine.capability or (0, 0)) >= (9, 0) else OLD_WORKSPACE_BYTES
    return DeviceMemory(
        weight_bytes=weight_bytes(config, model, is_packed=is_gpu),
        kv_bytes=num_gpu_blocks * spec.block_bytes,
        shadow_bytes=shadow_bytes,
        state_bytes=state_bytes,
        draft_bytes=draft_bytes,
        staging_bytes=spec.staging_bytes if config.enable_cpu_offload else 0,
        expert_staging_bytes=expert_staging_bytes(config, model) if is_gpu else 0,
        **step_bytes(config, model, machine, spec, max_model_len, num_gpu_blocks),
        workspace_bytes=NUM_WORKSPACES * workspace if is_gpu else 0,
        context_bytes=_context_bytes(config, spec) if is_gpu else 0,
    )


def step_bytes(
    config: Config, model: ModelConfig, machine: Machine, spec: KVCacheSpec, max_model_len: int, num_gpu_blocks: int
) -> dict[str, int]:
    """Return the fields of DeviceMemory that depend on the sequences of a step, and so on the number of blocks."""
    num_rows, is_gpu = max_step_rows(config, num_gpu_blocks), machine.gpu_bytes is not None
    activations = activation_bytes(config, model, max_model_len, num_rows)
    if not is_gpu or config.enforce_eager:
        parts = dict.fromkeys(("logits_bytes", "input_bytes", "graph_bytes"), 0)
    else:
        num_rows = max_graph_rows(model, num_rows)
        parts = {
            "logits_bytes": num_rows * model.vocab_size * spec.itemsize,
            "input_bytes": _input_bytes(config, model, max_model_len, num_rows),
            "graph_bytes": _graph_bytes(config, model, spec, num_rows),
        }
    return parts | {"activation_bytes": int(activations * (1 + ALLOCATOR_SHARE)) if is_gpu else activations}


def _context_bytes(config: Config, spec: KVCacheSpec) -> int:
    nccl_bytes = NCCL_BYTES if config.tensor_parallel_size > 1 else 0
    return CONTEXT_BYTES + nccl_bytes + (DRAFTING_BYTES if wants_shadow(config, spec) else 0)


def _input_bytes(config: Config, model: ModelConfig, max_model_len: int, num_rows: int) -> int:
    """Return the size of the graphs' static inputs and of the hidden states that graphs return. Graphs of steps with
    chunks return hidden states, and with a draft head all graphs.

    With offload, the inputs include the query, the fp32 result and the log-sum-exp between the pieces of a streamed
    step.
    """
    size = itemsize(config, model)
    table_bytes = 4 * ceil_div(max_model_len, config.block_size)
    per_row = INPUT_BYTES_PER_ROW
    if config.enable_cpu_offload:
        num_heads = model.num_heads // config.tensor_parallel_size
        per_row += num_heads * (model.head_dim * (size + 4) + 4)
    if uses_draft_head(config, model):
        per_row += model.hidden_size * size
    if not has_mixed_graphs(model):
        return num_rows * (per_row + table_bytes)
    mixed = mixed_graph_sizes(config.max_num_batched_tokens, num_rows)
    per_token = MIXED_INPUT_BYTES_PER_TOKEN + model.hidden_size * size
    return num_rows * per_row + (num_rows + MAX_GRAPH_CHUNKS) * table_bytes + mixed[-1].num_tokens * per_token


def _graph_bytes(config: Config, model: ModelConfig, spec: KVCacheSpec, num_rows: int) -> int:
    """Return the size of all graphs, and of the activations of the largest graph of each kind, which stay in the kind's
    memory pool.

    With speculation there are graphs for verification steps, and with a shadow or a draft head graphs that draft. With
    offload, graphs in pieces and graphs of the staging groups run streamed steps. Graphs of the last kind run steps
    with chunks of prompts (`has_mixed_graphs`).
    """
    verifies, num_pools = config.max_guesses > 0, 0
    kinds: list[Sequence[object]] = [graph_sizes(num_rows)]  # one graph for each size
    kinds += [verifying_graph_sizes(num_rows)] if verifies else []
    kinds += [draft_graph_sizes(num_rows)] if wants_shadow(config, spec) else []
    if config.enable_cpu_offload:  # the pieces and the groups of streamed steps have separate pools
        kinds += [streamed_graph_sizes(num_rows)]
        kinds += [streamed_verifying_graph_sizes(num_rows)] if verifies else []
        num_pools = 1 + verifies
    kinds += [head_graph_sizes(num_rows)] if uses_draft_head(config, model) else []
    num_bytes = len(kinds) * layer_activation_bytes(config, model, num_rows)
    if has_mixed_graphs(model):
        mixed = mixed_graph_sizes(config.max_num_batched_tokens, num_rows)
        kinds.append(mixed)
        num_bytes += layer_activation_bytes(config, model, mixed[-1].num_tokens)
    if isinstance(spec.states, StateSpec) and spec.has_states:
        # In a recurrent layer each row has room for its new tokens and for all tokens that may be replayed
        num_verifying = verifying_graph_sizes(num_rows)[-1] if verifies else 0
        num_tokens = num_rows * (1 + config.max_guesses) + num_verifying * (1 + 2 * config.max_guesses)
        input_bytes = spec.states.input_size * spec.states.itemsize
        num_bytes += (1 + config.enable_cpu_offload) * num_tokens * input_bytes
    num_graphs = sum(map(len, kinds))
    return num_bytes + num_graphs * model.num_layers * GRAPH_LAYER_BYTES + (len(kinds) + num_pools) * GRAPH_POOL_BYTES
