"""A plan as a short table. `nanovllm plan` prints it, and the engine logs it when it starts with offload."""

from collections.abc import Mapping
from typing import TypeAlias

from nanovllm.capacity.plan import CapacityPlan
from nanovllm.utils.memory import format_bytes

ACCEPTANCES = (0.5, 0.7, 0.9)  # shares of right guesses that the bound of decode is shown for

Row: TypeAlias = tuple[str, str, str]  # (name, figure, remark)


def plan_table(plan: CapacityPlan) -> str:
    """The plan, one figure per line. `~` marks an estimate, `(!)` a figure above its limit.

    Bytes are per GPU, except for the CPU pool, whose size is that of all ranks together.
    """
    ranks = plan.config.tensor_parallel_size
    where = f"{ranks} x {plan.machine.name}" if ranks > 1 else plan.machine.name
    title = f"plan for {plan.num_sequences} x {plan.context:,} tokens of {plan.config.model} on {where}"
    rows = [*_memory_rows(plan), *_sequence_rows(plan), *_bound_rows(plan)]
    return "\n".join([title, *(f"  {name:<11} {figure:>11}  {remark}".rstrip() for name, figure, remark in rows)])


def _memory_rows(plan: CapacityPlan) -> list[Row]:
    """The parts of the GPU memory that are not empty, their sum, and the CPU pool."""
    spec, memory, limit = plan.spec, plan.memory, plan.gpu_limit_bytes
    offload = plan.config.enable_cpu_offload
    blocks = f"{plan.num_gpu_blocks} of {spec.block_size} tokens, {format_bytes(spec.block_bytes)} each"
    exact = [
        ("weights", memory.weight_bytes, ""),
        (
            "slots" if offload else "KV cache",
            memory.kv_bytes,
            f"{blocks}, {format_bytes(plan.kv_bytes_per_token)} a token",
        ),
        ("staging", memory.staging_bytes, ""),
        ("logits", memory.logits_bytes, "one buffer for all graphs"),
    ]
    estimated = [
        ("inputs", memory.input_bytes, "static inputs of the graphs"),
        ("activations", memory.activation_bytes, "in the largest step"),
        ("graphs", memory.graph_bytes, ""),
        ("workspaces", memory.workspace_bytes, "cuBLAS"),
        ("CUDA", memory.context_bytes, "its context and kernels"),
    ]
    rows = [(name, format_bytes(num_bytes), remark) for name, num_bytes, remark in exact if num_bytes]
    rows += [(name, f"~{format_bytes(num_bytes)}", remark) for name, num_bytes, remark in estimated if num_bytes]
    if limit is not None:
        remark = f"of {format_bytes(limit)} that may be used" + ("" if plan.fits_gpu else " (!)")
        rows.append(("GPU memory", f"~{format_bytes(memory.total_bytes)}", remark))
    if offload:
        num_tokens = plan.num_cpu_blocks * spec.block_size
        remark = f"{plan.num_cpu_blocks} blocks, {num_tokens:,} tokens of all requests together"
        remark += f"; {format_bytes(plan.machine.host_bytes)} was available"
        rows.append(("CPU pool", format_bytes(plan.cpu_pool_bytes), remark + ("" if plan.fits_host else " (!)")))
    return rows


def _sequence_rows(plan: CapacityPlan) -> list[Row]:
    """How many sequences fit, both of the plan's length and of one block, and how many blocks are missing."""
    long, short = plan.capacity(plan.context), plan.capacity(plan.spec.block_size)
    remark = f"of {plan.context:,} tokens at once, limited by {long.limit}"
    if plan.context > plan.spec.block_size:
        remark += f"; {short.num_sequences} of up to {plan.spec.block_size:,}, by {short.limit}"
    rows = [("sequences", f"{long.num_sequences:,}", remark)]
    if plan.config.enable_cpu_offload:
        remark = f"full per sequence; at least {plan.num_missing_blocks} missing per step"
        rows.append(("blocks", f"{plan.num_full_blocks:,}", remark))
    return rows


def _bound_rows(plan: CapacityPlan) -> list[Row]:
    """The machine's rates with their sources, and the bounds that follow from them, lowest first."""
    m = plan.machine
    rows = []
    if m.link_byte_per_s and plan.config.enable_cpu_offload:
        rows.append(("link", f"{m.link_byte_per_s / 1e9:.1f} GB/s", m.link_source))
    if m.cpu_byte_per_s:
        rows.append(("CPU", f"{m.cpu_byte_per_s / 1e9:.1f} GB/s", "attention beside the link, measured"))
    if m.memory_byte_per_s:
        rows.append(("memory rate", f"{m.memory_byte_per_s / 1e12:.2f} TB/s", m.rates_source))
    if m.flop_per_s:
        rows.append(("arithmetic", f"{m.flop_per_s / 1e12:.0f} TFLOP/s", m.rates_source))
    decode = {"link": plan.link_decode_tok_per_s, "memory rate": plan.memory_decode_tok_per_s}
    remark = ""
    if m.cpu_byte_per_s:
        decode = {"link and the CPU": plan.link_and_cpu_decode_tok_per_s, "memory rate": plan.memory_decode_tok_per_s}
    elif plan.config.cpu_attention != "off" and (link_tok_per_s := decode.pop("link")) is not None:
        remark = f"{_rate(link_tok_per_s)} by the link alone, and more with the CPU"
    prefill = {"link": plan.link_prefill_tok_per_s, "arithmetic": plan.flop_prefill_tok_per_s}
    rows += _bound_row("decode", decode, remark)
    guessing = {f"at acceptance {a}": plan.guessing_decode_tok_per_s(a) for a in ACCEPTANCES}
    if shares := ", ".join(f"{_rate(rate)} {share}" for share, rate in guessing.items() if rate is not None):
        rows.append(("guesses", "", f"tok/s: {shares}, with up to {plan.config.max_guesses} a step"))
    rows += _bound_row("prefill", prefill)
    return rows


def _bound_row(name: str, by_cause: Mapping[str, float | None], remark: str = "") -> list[Row]:
    """The lowest of the bounds that are known, and all of them in the remark. Without any, only the remark."""
    known = sorted((rate, cause) for cause, rate in by_cause.items() if rate is not None)
    causes = ", ".join(f"{_rate(rate)} by the {cause}" for rate, cause in known)
    remarks = "; ".join(text for text in (causes, remark) if text)
    return [(name, f"<= {_rate(known[0][0])}" if known else "", f"tok/s: {remarks}")] if remarks else []


def _rate(tok_per_s: float) -> str:
    return f"{tok_per_s:,.0f}" if tok_per_s >= 1000 else f"{tok_per_s:.1f}"
