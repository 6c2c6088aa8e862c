"""The report of `nanovllm plan`: the options, the plan as a table, and what fits on a GPU as a table.

All figures of speed are projected: they are the plan's bounds, which no run exceeds.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from nanovllm.capabilities.disk.disk_moves import document_disk_bytes, num_document_states
from nanovllm.capacity.costs import (
    cpu_expert_bytes,
    decode_bytes,
    embedding_bytes,
    expert_share,
    head_bytes,
    num_full_blocks,
    weight_bytes,
)
from nanovllm.capacity.fit import (
    FAST_TOK_PER_S,
    Fit,
    choose,
    expert_prefill_tok_per_s,
    first_token_s,
    flop_prefill_tok_per_s,
    link_prefill_tok_per_s,
)
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.capacity.plan_check import HEAD_FORMAT
from nanovllm.checkpoint.quantization import KL_ON_SMOLLM2, WEIGHTS_ALONE, can_multiply_fp8
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.checkpoint.rope import rope_overrides
from nanovllm.config import BLOCK_SIZE_STEP, Config
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import max_stateful_seqs
from nanovllm.plan.step_limits import max_model_len
from nanovllm.utils.arithmetic import format_bytes
from nanovllm.utils.options import check_options, option

ACCEPTANCES = (0.8, 0.9, 0.95, 0.98)  # acceptance rates of draft tokens for which the bound of decode is shown
MAX_TOKENS = 10**9  # limit of a context, which bounds the loop over its chunks
MAX_GB = 10**9  # limit of memory, and of a rate per second, above any machine's
_WORK, _MACHINE = "the work", "the machine, if not this one"  # groups

Row: TypeAlias = tuple[str, str, str]  # (name, figure, remark)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of a plan, in addition to the engine's options. An invalid value raises ConfigError."""

    context: int | None = option(
        None,
        help="tokens of each sequence, such as 131072 or 131k; by default, max_model_len",
        group=_WORK,
        above=0,
        most=MAX_TOKENS,
    )
    sequences: int = option(1, help="number of sequences that run together", group=_WORK, above=0)
    fit: bool | None = option(
        None,
        help="list the presets, formats and contexts that run on the GPU, with projected bounds of speed, and "
        "recommend one; --no-fit: plan the options as they are given. By default, options that are not given are "
        "chosen as serve, chat and generate choose them",
        group=_WORK,
    )
    gpu: str | None = option(
        None, help="name of a GPU, such as 'RTX 4090'; by default, this machine's GPU, or an H200", group=_MACHINE
    )
    gpu_memory_gb: float | None = option(
        None, help="memory of one GPU in GiB; by default, the GPU's memory", group=_MACHINE, above=0, most=MAX_GB
    )
    host_memory_gb: float | None = option(
        None,
        help="available CPU memory in GiB; by default, the memory that is available on this machine",
        group=_MACHINE,
        above=0,
        most=MAX_GB,
    )
    link_gb_per_s: float | None = option(
        None,
        help="rate from CPU memory to the GPU in GB/s (10^9 bytes); by default, the GPU's rate, measured or projected",
        group=_MACHINE,
        above=0,
        most=MAX_GB,
    )
    cpu_gb_per_s: float | None = option(
        None,
        help="rate in GB/s at which the link and the CPU together read CPU memory; by default, measured if the GPU is "
        "in this machine, else the rate of a usual machine for the GPU",
        group=_MACHINE,
        above=0,
        most=MAX_GB,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.gpu is not None:
            find_gpu(self.gpu)

    def apply(self, machine: Machine) -> Machine:
        """Return `machine` with these options applied. Raises ConfigError if the plan is for the CPU and an option
        describes a GPU.
        """
        named = {name: getattr(self, name) for name in ("gpu", "gpu_memory_gb", "link_gb_per_s", "cpu_gb_per_s")}
        if machine.gpu_bytes is None and (given := [name for name, value in named.items() if value is not None]):
            raise ConfigError(f"{', '.join(given)} describe a GPU, but device='cpu' plans for the CPU; give only one")
        if self.gpu is not None:
            machine = Machine.gpu(machine.host_bytes, find_gpu(self.gpu))
        if self.gpu_memory_gb is not None:
            machine = replace(machine, gpu_bytes=int(self.gpu_memory_gb * 2**30), used_gpu_bytes=0)
        if self.host_memory_gb is not None:
            machine = replace(machine, host_bytes=int(self.host_memory_gb * 2**30))
        machine = machine.with_link(self.link_gb_per_s and self.link_gb_per_s * 1e9, "given")
        return machine.with_cpu(self.cpu_gb_per_s and self.cpu_gb_per_s * 1e9, "given")


# -- sizes on disk --------------------------------------------------------------------------------------------------


def disk_states(plan: CapacityPlan) -> int:
    """Return the number of states on disk for a document of `context` tokens."""
    return num_document_states(plan.context, _prefix_tokens(plan)) if plan.spec.has_states else 0


def disk_bytes(plan: CapacityPlan) -> int:
    """Return the size on disk of a document of `context` tokens, on all ranks."""
    state_bytes, prefix_tokens = plan.spec.states.state_bytes, _prefix_tokens(plan)
    of_rank = document_disk_bytes(plan.context, plan.kv_bytes_per_token, state_bytes, prefix_tokens)
    return of_rank * plan.config.tensor_parallel_size


def _prefix_tokens(plan: CapacityPlan) -> int:
    """Return the unit of prefix hits in tokens."""
    return BLOCK_SIZE_STEP if plan.config.enable_cpu_offload else plan.config.block_size


# -- the table -------------------------------------------------------------------------------------------------------


def plan_table(plan: CapacityPlan) -> str:
    """Return the plan as text, one figure per line. `~` marks an estimate, `(!)` a figure above its limit.

    Bytes are per GPU, except for what is in CPU memory, which is counted for all ranks together.
    """
    ranks = plan.config.tensor_parallel_size
    where = f"{ranks} x {plan.machine.name}" if ranks > 1 else plan.machine.name
    title = f"plan for {plan.num_sequences} x {plan.context:,} tokens of {plan.config.model} on {where}"
    rows = [*_memory_rows(plan), *_sequence_rows(plan)]
    if plan.fits_gpu and plan.fits_host:
        rows += _bound_rows(plan)
    return "\n".join([title, *(f"  {name:<11} {figure:>11}  {remark}".rstrip() for name, figure, remark in rows)])


def _memory_rows(plan: CapacityPlan) -> list[Row]:
    """Return the parts of the GPU memory that are not empty, the sum, and what is in CPU memory."""
    spec, memory, limit = plan.spec, plan.memory, plan.gpu_limit_bytes
    offload = plan.config.enable_cpu_offload
    blocks = f"{plan.num_gpu_blocks} of {spec.block_size} tokens, {format_bytes(spec.block_bytes)} each"
    blocks += f", {format_bytes(plan.kv_bytes_per_token)} a token"
    parts = (
        ("weights", "", memory.weight_bytes, _weights_remark(plan)),
        ("slots" if offload else "KV cache", "", memory.kv_bytes, blocks),
        ("shadow", "", memory.shadow_bytes, f"{plan.num_pages} blocks in {plan.shadow_bits} bits, for drafts"),
        ("states", "", memory.state_bytes, _states_remark(plan)),
        ("draft head", "", memory.draft_bytes, "its K and V, for all blocks of the CPU pool"),
        ("staging", "", memory.staging_bytes, ""),
        ("staging", "", memory.expert_staging_bytes, "for experts that cross the link: two layers, and single ones"),
        ("logits", "", memory.logits_bytes, "one buffer for all graphs"),
        ("inputs", "~", memory.input_bytes, "static inputs of the graphs"),
        ("activations", "~", memory.activation_bytes, "in the largest step"),
        ("graphs", "~", memory.graph_bytes, ""),
        ("workspaces", "~", memory.workspace_bytes, "cuBLAS"),
        ("CUDA", "~", memory.context_bytes, "its context and kernels"),
    )
    rows = [(name, f"{sign}{format_bytes(num_bytes)}", remark) for name, sign, num_bytes, remark in parts if num_bytes]
    if plan.unused_draft_bytes:
        needs = f"its K and V would take {format_bytes(plan.unused_draft_bytes)}, over a quarter of the memory for KV"
        rows.append(("draft head", "left out", needs))
    if limit is not None:
        used = plan.machine.used_gpu_bytes
        remark = f"of {format_bytes(limit)} that may be used" + ("" if plan.fits_gpu else " (!)")
        remark += f"; {format_bytes(used)} are in use now" if used else ""
        rows.append(("GPU memory", f"~{format_bytes(memory.total_bytes)}", remark))
    if offload:
        num_tokens = plan.num_cpu_blocks * spec.block_size
        remark = f"{plan.num_cpu_blocks} blocks, {num_tokens:,} tokens of all requests together"
        remark += f"; {format_bytes(plan.machine.host_bytes)} was available"
        rows.append(("CPU pool", format_bytes(plan.cpu_pool_bytes), remark + ("" if plan.fits_host else " (!)")))
    if plan.model.has_cpu_experts:
        rows.append(("experts", format_bytes(plan.host_expert_bytes), _experts_remark(plan)))
    elif plan.config.enable_expert_offload:
        rows.append(("experts", "0 B", "in CPU memory, because all experts fit the GPU"))
    if plan.host_table_bytes:
        rows.append(("embedding", format_bytes(plan.host_table_bytes), "in pinned CPU memory instead of the GPU's"))
    if plan.snapshot_bytes:
        remark = f"{plan.num_snapshots} state{'s' * (plan.num_snapshots > 1)} for later prompts, in CPU memory"
        rows.append(("snapshots", format_bytes(plan.snapshot_bytes), remark))
    if disk_limit := plan.config.disk_bytes:
        remark = f"a document of {plan.context:,} tokens"
        if num_states := disk_states(plan):
            remark += f" with {num_states} state{'s' * (num_states > 1)}"
        if num_bytes := disk_bytes(plan):
            remark += f"; there is room for {disk_limit // num_bytes:,} in {format_bytes(disk_limit)}"
        rows.append(("on disk", format_bytes(num_bytes), remark))
    return rows


def _experts_remark(plan: CapacityPlan) -> str:
    """Say where the experts are, and why."""
    config, experts = plan.config, plan.model.experts
    assert experts is not None, "the model has experts"
    mark = "" if plan.host_weight_bytes <= plan.machine.host_bytes else " (!)"
    if plan.machine.gpu_bytes is None:
        return f"of {len(experts.cpu_layers)} of {len(experts.layers)} layers, in the checkpoint's format{mark}"
    remark = f"in pinned CPU memory{mark}, of {len(experts.cpu_layers)} of {len(experts.layers)} layers; "
    if config.num_gpu_expert_layers is not None or config.gpu_expert_memory_gb is not None:
        return f"{remark}{plan.num_gpu_expert_layers} are on the GPU, as given"
    limit = max_model_len(config, plan.model)
    return f"{remark}the GPU has room for {plan.num_gpu_expert_layers} and the KV of {limit:,} tokens"


def _weights_remark(plan: CapacityPlan) -> str:
    return "; ".join(filter(None, (_format_remark(plan), _vocabulary_remark(plan))))


def _format_remark(plan: CapacityPlan) -> str:
    """Say what a format to which the weights are quantized costs, and what the formats in fp8 are for. On a CPU the
    weights are values in the model's dtype.
    """
    name, capability = plan.config.quantization, plan.machine.capability
    remarks = [f"{name} loses {KL_ON_SMOLLM2[name]:g} (KL on SmolLM2)"] if name in KL_ON_SMOLLM2 else []
    if plan.machine.gpu_bytes is None:
        return "".join(remarks)
    if name == "fp8_dynamic":
        remarks.append("in fp8, as are activations in products of many rows; fp8 has smaller errors")
    if name == "fp8" and capability is not None and can_multiply_fp8(capability):
        remarks.append("fp8_dynamic is for long prompts and large batches, and int8 loses a fifteenth")
    return "; ".join(remarks)


def _vocabulary_remark(plan: CapacityPlan) -> str:
    """Return the sizes of the output head and the embedding table per GPU, and of the head with and without
    quantization.
    """
    config, model = plan.config, plan.model

    def size(num_bytes: int) -> str:
        return format_bytes(num_bytes // config.tensor_parallel_size)

    is_gpu = plan.machine.gpu_bytes is not None
    table = size(embedding_bytes(config, model, is_packed=is_gpu))
    if not model.has_own_head:
        return f"embedding table and output head {table}"
    head = size(head_bytes(config, model, is_packed=is_gpu and model.gguf_head_type is not None))
    if is_gpu and model.gguf_head_type is None:
        quantized = size(head_bytes(config, model.quantized(None, HEAD_FORMAT)))
        instead = f"{quantized} instead of {head}", f"{head} ({quantized} in {HEAD_FORMAT})"
        head = instead[0 if model.head_quantization else 1]
    return f"output head {head}, embedding table {'in CPU memory' if plan.host_table_bytes else table}"


def _states_remark(plan: CapacityPlan) -> str:
    if not plan.spec.has_states:
        return ""
    num_seqs = max_stateful_seqs(plan.config, plan.spec.states, plan.num_state_slots)
    return f"of {num_seqs} sequence{'s' * (num_seqs > 1)}, {format_bytes(plan.spec.states.slot_bytes)} each"


def _sequence_rows(plan: CapacityPlan) -> list[Row]:
    """Return the number of sequences that fit, of the plan's length and of one block, and of missing blocks."""
    long, short = plan.capacity(plan.context), plan.capacity(plan.spec.block_size)
    remark = f"of {plan.context:,} tokens at once, limited by {long.limit}"
    if plan.context > plan.spec.block_size:
        remark += f"; {short.num_sequences} of up to {plan.spec.block_size:,}, by {short.limit}"
    rows = [("sequences", f"{long.num_sequences:,}", remark)]
    if plan.config.enable_cpu_offload:
        remark = f"full per sequence; at least {plan.num_missing_blocks} missing per step"
        rows.append(("blocks", f"{num_full_blocks(plan.context, plan.spec.block_size):,}", remark))
    return rows


def _bound_rows(plan: CapacityPlan) -> list[Row]:
    """Return the machine's rates with their sources, and the bounds that follow from the rates, lowest first."""
    m = plan.machine
    rows = []
    if m.gpu_bytes is not None and plan.model.has_cpu_experts:
        rows.append(("reads", "", _reads_remark(plan)))
    if m.gpu_bytes is not None and (plan.config.enable_cpu_offload or plan.model.has_cpu_experts):
        rows += [("link", f"{m.link_byte_per_s / 1e9:.1f} GB/s", m.link_source)] if m.link_byte_per_s else []
        rows += [("CPU memory", f"{m.cpu_byte_per_s / 1e9:.1f} GB/s", m.cpu_source)] if m.cpu_byte_per_s else []
    if m.memory_byte_per_s:
        rows.append(("memory rate", f"{m.memory_byte_per_s / 1e12:.2f} TB/s", m.rates_source))
    if m.flop_per_s:
        rows.append(("arithmetic", f"{m.flop_per_s / 1e12:.0f} TFLOP/s", m.rates_source))
    decode, remark = {"memory rate": plan.memory_decode_tok_per_s}, ""
    decode["CPU's experts and the GPU in turn"] = plan.expert_decode_tok_per_s()
    if plan.config.cpu_attention == "off":
        decode["link"] = plan.link_decode_tok_per_s
    elif plan.link_decode_tok_per_s:
        decode["link and the CPU"] = plan.link_and_cpu_decode_tok_per_s
        remark = f"{rate_text(plan.link_decode_tok_per_s)} by the link alone"
    rows += _bound_row("decode", decode, remark)
    guessing = {f"at acceptance {a}": plan.guessing_decode_tok_per_s(a) for a in ACCEPTANCES}
    if shares := ", ".join(f"{rate_text(rate)} {share}" for share, rate in guessing.items() if rate is not None):
        rows.append(("drafts", "", f"tok/s: {shares}, with up to {plan.config.max_guesses} a step"))
    prefill = {"link": link_prefill_tok_per_s(plan), "arithmetic": flop_prefill_tok_per_s(plan)}
    prefill["slower of both in each chunk"] = expert_prefill_tok_per_s(plan)
    rows += _bound_row("prefill", prefill)
    if (first_s := first_token_s(plan)) is not None:
        rows.append(("first token", f">= {seconds_text(first_s)}", f"after a prompt of {plan.context:,} tokens"))
    return rows


def _reads_remark(plan: CapacityPlan) -> str:
    """Say what a decode step reads over which path."""
    config, num_keys = plan.config, plan.num_sequences * plan.context
    on_gpu = decode_bytes(config, plan.model, plan.num_sequences, num_keys, plan.kv_bytes_per_token)
    missing_bytes = plan.num_missing_blocks * plan.spec.block_bytes
    by_cpu = cpu_expert_bytes(config, plan.model) * expert_share(plan.model, plan.num_sequences)
    parts = [f"{format_bytes(on_gpu - missing_bytes)} from GPU memory", f"{format_bytes(by_cpu)} of experts by the CPU"]
    parts += [f"{format_bytes(missing_bytes)} of KV from CPU memory"] if missing_bytes else []
    return f"in a step that decodes: {', '.join(parts)}"


def _bound_row(name: str, by_cause: Mapping[str, float | None], remark: str = "") -> list[Row]:
    """Return a row with the lowest known bound, and all known bounds in the remark, or no row without a known bound."""
    known = sorted((rate, cause) for cause, rate in by_cause.items() if rate is not None)
    causes = ", ".join(f"{rate_text(rate)} by the {cause}" for rate, cause in known)
    remarks = "; ".join(text for text in (causes, remark) if text)
    return [(name, f"<= {rate_text(known[0][0])}", f"tok/s: {remarks}")] if known else []


def rate_text(tok_per_s: float) -> str:
    return f"{tok_per_s:,.0f}" if tok_per_s >= 1000 else f"{tok_per_s:.1f}"


def seconds_text(number: float) -> str:
    return f"{number:,.0f} s" if number >= 100 else f"{number:.1f} s" if number >= 0.1 else f"{number:.1g} s"


# -- what fits ---------------------------------------------------------------------------------------------------------


HUB_NAMES = {  # models with the sizes of the presets, which have no weights
    **{f"gemma-3-{size}": f"google/gemma-3-{size}-it" for size in ("270m", "1b", "4b", "12b", "27b")},
    "gemma-4-12b": "google/gemma-4-12B-it",
    "gemma-4-26b-a4b": "google/gemma-4-26B-A4B-it",
    "gemma-4-31b": "google/gemma-4-31B-it",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen2.5-7b-1m": "Qwen/Qwen2.5-7B-Instruct-1M",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
}
SAME_SIZES = {  # models of later versions that have the sizes of a preset
    "qwen3.5-27b": "Qwen3.6-27B and Qwen3.8-27B",
    "qwen3.5-35b-a3b": "Qwen3.6-35B-A3B",
}


def fit_table(
    machine: Machine, found: Sequence[Fit], quantization: str | None = None, context: int | None = None
) -> str:
    """Return a table of `found` as lines of text, with the options of each entry, and recommend one.

    quantization, context: what the user has asked for.
    """
    if machine.gpu_bytes is None:
        raise ConfigError("fit lists what runs on a GPU; leave out device='cpu'")
    title = (
        f"what runs on {machine.name} ({format_bytes(machine.gpu_bytes)}) with {format_bytes(machine.host_bytes)} of "
        "CPU memory; decode and first token are projected bounds, with drafts where a shadow pays"
    )
    if not found:
        return f"{title}\n  nothing; use a smaller model or context, or more memory"
    head = ("model", "format", "head", "context", "KV cache", "where", "decode", "first token")
    rows = [
        (
            fit.model,
            fit.format,
            fit.plan.config.quantize_head or "as is",
            f"{fit.plan.context:,}",
            format_bytes(fit.kv_bytes),
            fit.where,
            f"<= {rate_text(rate)}/s" if (rate := fit.plan.expected_decode_tok_per_s) else "unknown",
            f">= {seconds_text(first_s)}" if (first_s := first_token_s(fit.plan)) else "unknown",
        )
        for fit in found
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(["", *map(str.ljust, row[:3], widths), *map(str.rjust, row[3:], widths[3:])]) for row in (head, *rows)
    ]
    names = list(dict.fromkeys(fit.model for fit in found))
    how = (
        "serve, chat and generate choose everything else by themselves: add --max-model-len CONTEXT, --quantization "
        "FORMAT unless it is the checkpoint's, --quantize-head HEAD unless it is as is, and for a context beyond the "
        "model's limit the --hf-overrides that plan prints"
    )
    how += "; quantizing costs a KL divergence from 16 bits, on SmolLM2: " + ", ".join(
        f"{name} {KL_ON_SMOLLM2[name]:g}" for name in WEIGHTS_ALONE
    )
    also = [f"{name} also stands for {SAME_SIZES[name]}" for name in names if name in SAME_SIZES]
    command = recommended_command(machine, names, quantization, context)
    return "\n".join((title, *lines, how, *also, *([f"recommended: {command}"] if command else [])))


def recommended_command(
    machine: Machine, models: Sequence[str], quantization: str | None, context: int | None
) -> str | None:
    """Return the command for the model with the most weights that is fast or, if none is, for the fastest. None if no
    model runs. quantization, context: what the user has asked for.
    """
    best: tuple[tuple[bool, float], str] | None = None
    for name in models:
        stored = config_without_weights(name)
        overrides = None
        if context is not None and context > stored.max_model_len_limit:
            overrides, _ = rope_overrides(stored, context)
            stored = config_without_weights(name, overrides)
        config = Config(model=name, fit=True, quantization=quantization, hf_overrides=overrides)
        choice = choose(config, {"quantization"}, stored, machine, context=context)
        if choice.plan is None:
            continue
        rate = choice.plan.expected_decode_tok_per_s or 0.0
        is_fast = rate >= FAST_TOK_PER_S
        rank = is_fast, weight_bytes(config, stored, is_packed=False) if is_fast else rate
        if best is None or rank > best[0]:
            wanted = choice.config.quantization, choice.config.quantize_head, choice.plan.context
            flags = zip(("--quantization", "--quantize-head", "--max-model-len"), wanted, strict=True)
            words = ["nanovllm", "chat", HUB_NAMES.get(name, name)]
            words += [word for flag, value in flags if value is not None for word in (flag, str(value))]
            words += [] if overrides is None else ["--hf-overrides", json.dumps(overrides)]
            best = rank, shlex.join(words)
    return None if best is None else best[1]
