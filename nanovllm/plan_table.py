"""A plan as a short table: what `nanovllm plan` prints, and the engine logs when it starts with offload."""

from typing import TYPE_CHECKING, TypeAlias

from nanovllm.utils.memory import format_bytes

if TYPE_CHECKING:
    from nanovllm.plan import Plan

Row: TypeAlias = tuple[str, str, str]  # name, figure, remark


def plan_table(plan: "Plan") -> str:
    """`~` marks what is estimated or assumed, `(!)` more than may be used; figures are per GPU, but the CPU pool's."""
    ranks = plan.config.tensor_parallel_size
    where = f"{ranks} x {plan.machine.name}" if ranks > 1 else plan.machine.name
    title = f"plan for {plan.num_sequences} x {plan.context:,} tokens of {plan.config.model} on {where}"
    rows = [*_memory_rows(plan), *_bound_rows(plan)]
    return "\n".join([title, *(f"  {name:<11} {figure:>11}  {remark}".rstrip() for name, figure, remark in rows)])


def _memory_rows(plan: "Plan") -> list[Row]:
    spec, offload, limit = plan.spec, plan.config.enable_cpu_offload, plan.gpu_limit_bytes
    blocks = f"{plan.num_gpu_blocks} of {spec.block_size} tokens, {format_bytes(spec.block_bytes)} each"
    per_token = f"{format_bytes(plan.kv_bytes_per_token)} a token"
    rows = [
        ("weights", format_bytes(plan.weight_bytes), ""),
        ("slots" if offload else "KV cache", format_bytes(plan.slot_bytes), f"{blocks}, {per_token}"),
    ]
    if offload:
        rows.append(("staging", format_bytes(plan.staging_bytes), ""))
    rows.append(("activations", f"~{format_bytes(plan.activation_bytes)}", "of the largest step"))
    if limit is not None:
        rows.append(("CUDA", f"~{format_bytes(plan.overhead_bytes)}", "context, libraries, graphs"))
        remark = f"of {format_bytes(limit)} that may be used" + ("" if plan.gpu_bytes <= limit else " (!)")
        rows.append(("GPU memory", f"~{format_bytes(plan.gpu_bytes)}", remark))
    if offload:
        remark = f"{plan.num_cpu_blocks} blocks; {format_bytes(plan.machine.host_bytes)} were available"
        rows.append(("CPU pool", format_bytes(plan.cpu_pool_bytes), remark))
        remark = f"full, of each sequence; {plan.num_missing_blocks} missing per step at the fewest"
        rows.append(("blocks", f"{plan.num_full_blocks:,}", remark))
    return rows


def _bound_rows(plan: "Plan") -> list[Row]:
    """The nearest bound, and each with the rate it is from."""
    m = plan.machine
    link = f"link {(m.link_byte_per_s or 0) / 1e9:.1f} GB/s, {m.link_source}"
    memory = f"GPU memory {(m.memory_byte_per_s or 0) / 1e12:.1f} TB/s, H200's"
    flop = f"arithmetic {(m.flop_per_s or 0) / 1e12:.0f} TFLOP/s, H200's"
    bounds = {
        "decode": {link: plan.link_decode_tok_per_s, memory: plan.memory_decode_tok_per_s},
        "prefill": {link: plan.link_prefill_tok_per_s, flop: plan.flop_prefill_tok_per_s},
    }
    rows = []
    for name, by_cause in bounds.items():
        given = {cause: rate for cause, rate in by_cause.items() if rate is not None}
        if given:
            causes = "; ".join(f"{_rate(rate)} ({cause})" for cause, rate in given.items())
            rows.append((name, f"<= {_rate(min(given.values()))}", f"tok/s: {causes}"))
    return rows


def _rate(tok_per_s: float) -> str:
    return f"{tok_per_s:,.0f}" if tok_per_s >= 1000 else f"{tok_per_s:.1f}"
