"""Checks of a plan: the reasons why it cannot work, and the options to change. Arithmetic only."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple, TypeAlias

from nanovllm.capacity.costs import packing_problem
from nanovllm.capacity.plan import MAX_HOST_SHARE, CapacityPlan, least_gpu_blocks, make_plan
from nanovllm.checkpoint.model_config import rope_extension
from nanovllm.checkpoint.quantization import QUANTIZATIONS
from nanovllm.errors import ConfigError
from nanovllm.plan.kv_spec import num_blocks_for, num_watermark_blocks
from nanovllm.plan.step_limits import max_model_len
from nanovllm.utils.arithmetic import ceil_div, format_bytes

MAX_REMEDIES = 4  # with more ranks
OFFLOAD = {"enable_cpu_offload": True, "num_kvcache_blocks": -1}
# Changes that leave more room for blocks, which may make a few long requests faster
ROOM_CHANGES: tuple[dict[str, Any], ...] = (
    {"gpu_memory_utilization": 0.95},
    {"max_num_seqs": 16},
    *({"max_num_batched_tokens": num_tokens} for num_tokens in (4096, 1024)),
)
NOTICEABLE = 1.05  # how much longer a request must take for an option to be worth naming

Change: TypeAlias = dict[str, Any]  # new values of Config's fields
Problem: TypeAlias = Callable[[CapacityPlan], str | None]


def check_start(plan: CapacityPlan) -> None:
    """Raise ConfigError if the engine cannot start. The message has the numbers, and remedies that work.

    Only exact sizes count here: the CPU pool, and on the GPU the weights, the KV blocks, the staging groups and the
    graphs' logits. An engine that is too large only by estimate may still work; start-up runs the largest step to find
    out.
    """
    if problem := _order_problem(plan):
        raise ConfigError(problem)
    if problem := _pool_problem(plan) or _gpu_problem(plan, with_estimates=False):
        raise ConfigError(f"{problem}; {remedies(plan, memory_problem)}")
    if problem := _cpu_problem(plan):
        raise ConfigError(problem)


def check_plan(plan: CapacityPlan) -> None:
    """Raise ConfigError, like `check_start`, also if the engine cannot run the plan's sequences together.

    Estimates count here too: everything that the plan's table marks with (!) is refused.
    """
    if problem := _order_problem(plan) or _packing_problem(plan) or _length_problem(plan):
        raise ConfigError(problem)
    if problem := any_problem(plan):
        raise ConfigError(f"{problem}; {remedies(plan, any_problem)}")
    if problem := _cpu_problem(plan):
        raise ConfigError(problem)


def any_problem(plan: CapacityPlan) -> str | None:
    return memory_problem(plan) or _sequences_problem(plan)


def memory_problem(plan: CapacityPlan) -> str | None:
    return _pool_problem(plan) or _gpu_problem(plan, with_estimates=True)


def _pool_problem(plan: CapacityPlan) -> str | None:
    config, available = plan.config, plan.machine.host_bytes
    if not config.enable_cpu_offload:
        return None
    if plan.num_cpu_blocks < 1:
        block = format_bytes(plan.spec.block_bytes * config.tensor_parallel_size)
        if config.cpu_memory_gb is not None:
            return f"cpu_memory_gb={config.cpu_memory_gb} is less than one block of {block}"
        room = f"{MAX_HOST_SHARE:.0%} of the {format_bytes(available)} of memory available"
        return f"{room} is less than one block of {block}"
    if not plan.fits_host:
        states = f" and states for later prompts {format_bytes(plan.snapshot_bytes)}" if plan.snapshot_bytes else ""
        return (
            f"a CPU pool of {plan.num_cpu_blocks} blocks needs {format_bytes(plan.cpu_pool_bytes)}{states}, "
            f"but only {format_bytes(available)} of memory is available"
        )
    return None


def _gpu_problem(plan: CapacityPlan, with_estimates: bool) -> str | None:
    limit, memory = plan.gpu_limit_bytes, plan.memory
    if limit is None or (memory.total_bytes if with_estimates else memory.exact_bytes) <= limit:
        return None
    parts = {
        "the weights": memory.weight_bytes,
        f"{_blocks_option(plan)}={plan.num_gpu_blocks}": memory.kv_bytes,
        "the shadow": memory.shadow_bytes,
        "the states": memory.state_bytes,
        "K and V of the draft head": memory.draft_bytes,
        "staging": memory.staging_bytes,
        "the logits": memory.logits_bytes,
    }
    listed = [f"{name} ({format_bytes(num_bytes)})" for name, num_bytes in parts.items() if num_bytes]
    exact, exact_bytes = f"{', '.join(listed[:-1])} and {listed[-1]}", format_bytes(memory.exact_bytes)
    more = (
        f"more than the {format_bytes(limit)} that gpu_memory_utilization={plan.config.gpu_memory_utilization} "
        f"allows of {format_bytes(plan.machine.gpu_bytes or 0)}"
    )
    if memory.exact_bytes > limit:
        return f"{exact} need {exact_bytes} of GPU memory, {more}"
    return (
        f"about {format_bytes(memory.total_bytes)} of GPU memory is needed, {more}: {exact} take {exact_bytes}, and "
        f"activations, graphs, their inputs, workspaces and CUDA itself an estimated "
        f"{format_bytes(memory.estimated_bytes)}"
    )


def _blocks_option(plan: CapacityPlan) -> str:
    return "num_gpu_blocks" if plan.config.enable_cpu_offload else "num_kvcache_blocks"


def _cpu_problem(plan: CapacityPlan) -> str | None:
    """Check the host's memory, which on a CPU the model, its cache and the CPU pool share.

    A size that the user left open counts with the smallest value that works, because start-up will make it fit.
    """
    config, available = plan.config, plan.machine.host_bytes
    if plan.machine.gpu_bytes is not None:
        return None
    name, least = _blocks_option(plan), least_gpu_blocks(config)
    num_blocks = max(getattr(config, name) or 0, 0) or least
    pool_bytes = plan.cpu_pool_bytes if config.num_cpu_blocks or config.cpu_memory_gb else 0
    block_bytes = plan.spec.block_bytes * config.tensor_parallel_size
    memory = plan.memory
    fixed_bytes = (memory.weight_bytes + memory.staging_bytes) * config.tensor_parallel_size + pool_bytes
    if fixed_bytes + num_blocks * block_bytes <= available:
        return None
    most = (available - fixed_bytes) // block_bytes
    remedy = f"lower {name} to {most} or less" if most >= least else "use a smaller model, pool or block size"
    others = "weights and staging" if config.enable_cpu_offload else "weights"
    others = "weights, staging and CPU pool" if pool_bytes else others
    return (
        f"{name}={num_blocks} blocks of {format_bytes(block_bytes)} need {format_bytes(num_blocks * block_bytes)} and "
        f"{others} {format_bytes(fixed_bytes)}, more than the {format_bytes(available)} of memory available; {remedy}"
    )


def _order_problem(plan: CapacityPlan) -> str | None:
    quantization = plan.model.quantization
    if plan.machine.gpu_bytes is None or quantization is None or not (quantization.has_order and quantization.block[1]):
        return None
    return (
        f"quant_method={quantization.method!r} has columns in another order (desc_act), which is supported on a CPU "
        "only; use a checkpoint with desc_act=false, or device='cpu'"
    )


def _packing_problem(plan: CapacityPlan) -> str | None:
    """By config.json. An engine asks the files, too, which may leave more layers unquantized."""
    return None if plan.machine.gpu_bytes is None else packing_problem(plan.config, plan.model)


def _length_problem(plan: CapacityPlan) -> str | None:
    limit, longest = max_model_len(plan.config, plan.model), plan.model.max_model_len_limit
    if plan.context <= limit:
        return None
    remedy = "raise max_model_len" if plan.context <= longest else rope_extension(plan.model, plan.context)
    return f"context={plan.context} exceeds max_model_len={limit}; shorten it, or {remedy}"


def _sequences_problem(plan: CapacityPlan) -> str | None:
    capacity = plan.capacity(plan.context)
    if plan.num_sequences <= capacity.num_sequences:
        return None
    reason = {
        "max_num_seqs": f"max_num_seqs={plan.config.max_num_seqs} allows",
        "the slots": f"each needs a slot, and the {plan.num_gpu_blocks} slots allow",
        "the CPU pool": f"the CPU pool's {plan.num_cpu_blocks} blocks allow",
        "the KV cache": f"the {plan.num_gpu_blocks} blocks on the GPU allow",
        "the state slots": "the room for states of recurrent layers allows",
    }[capacity.limit]
    num_blocks = ceil_div(plan.context, plan.spec.block_size)
    each = f"{num_blocks} block{'s' * (num_blocks > 1)} each"
    pool = {"the CPU pool": plan.num_cpu_blocks, "the KV cache": plan.num_gpu_blocks}.get(capacity.limit, 0)
    if plan.num_sequences > 1 and (num_free := num_watermark_blocks(pool)):
        each += f", and {num_free} that stay free for running sequences to grow"
    return f"{plan.num_sequences} x {plan.context} tokens ({each}) do not fit: {reason} {capacity.num_sequences}"


# -- remedies --------------------------------------------------------------------------------------------------------


class _Remedy(NamedTuple):
    """A change with which the plan works."""

    change: Change  # without values that the plan has already
    plan: CapacityPlan

    @property
    def tok_per_s(self) -> float:
        """The bound of decode with drafts; 0 if it is not known."""
        return self.plan.expected_decode_tok_per_s or 0.0

    def makes_needless(self, other: "_Remedy") -> bool:
        """Return True if `other` changes more options and is not faster."""
        return self.change.keys() < other.change.keys() and self.tok_per_s >= other.tok_per_s


def remedies(plan: CapacityPlan, problem: Problem) -> str:
    """Name changes with which `problem` finds nothing, the one with the highest bound of decode first.

    Each has been planned. Changes of a single option come alone if there are any besides offload. Otherwise several
    are changed together, with and without offload, and with the weights in fewer bits. More ranks are named last,
    because they need more GPUs. If nothing helps, say so.
    """
    offload = [] if plan.config.enable_cpu_offload else [OFFLOAD]
    found = _working(plan, [*_changes(plan), *offload], problem)
    if all("enable_cpu_offload" in each.change for each in found):
        bases = [{**format, **on} for format in ({}, *_smaller_formats(plan)) for on in ({}, *offload)]
        found = [each for base in bases if (each := _tuned(plan, base, problem)) is not None]
    found = [each for each in found if "enforce_eager" not in each.change] or found  # its cost is not in the bounds
    more_ranks = ({"tensor_parallel_size": n} for n in (2, 4, 8) if n > plan.config.tensor_parallel_size)
    ranks = _working(plan, more_ranks, problem, at_most=1)
    fastest = sorted(found, key=lambda each: -each.tok_per_s)
    fastest = [each for each in fastest if not any(other.makes_needless(each) for other in found)]
    shown, rest = fastest[: MAX_REMEDIES - len(ranks)], fastest[MAX_REMEDIES - len(ranks) :]
    exact = [each for each in rest if "quantization" not in each.change]
    if exact and all("quantization" in each.change for each in shown):
        shown[-1] = exact[0]  # one that does not change the weights
    texts = dict.fromkeys(_described(plan, each.change) for each in (*shown, *ranks))
    return ", or ".join(texts) or "no change of options helps; use a smaller model, or more memory"


def _smaller_formats(plan: CapacityPlan) -> list[Change]:
    """Return the formats in which the weights have fewer bits than now; none for a quantized checkpoint."""
    now = plan.model.quantization
    if now is not None and not now.is_online:
        return []
    return [{"quantization": name} for name, each in QUANTIZATIONS.items() if now is None or each.bits < now.bits]


def _tried(plan: CapacityPlan, change: Change, problem: Problem) -> _Remedy | None:
    """Return the change as a remedy, or None if it does not help."""
    change = {name: value for name, value in change.items() if getattr(plan.config, name) != value}
    changed = _changed(plan, change) if change else None
    return None if changed is None or problem(changed) is not None else _Remedy(change, changed)


def _working(
    plan: CapacityPlan, changes: Iterable[Change], problem: Problem, at_most: int | None = None
) -> list[_Remedy]:
    """Return the first change of each option that helps, at most `at_most` of them."""
    found: dict[tuple[str, ...], _Remedy] = {}
    for change in changes:
        if len(found) == at_most:
            break
        if tuple(change) not in found and (remedy := _tried(plan, change, problem)) is not None:
            found[tuple(change)] = remedy
    return list(found.values())


def _tuned(plan: CapacityPlan, base: Change, problem: Problem) -> _Remedy | None:
    """Add to `base` the changes that it needs to help, and each of ROOM_CHANGES that makes it noticeably faster.

    Returns None if nothing helps.
    """
    config, changed = plan.config, base
    pool = _other_pool(plan) if config.enable_cpu_offload or "enable_cpu_offload" in base else {}
    for_room = [each for each in _changes(plan) if each in ROOM_CHANGES]
    others = [each for each in (*_changes(plan), pool) if each and each not in for_room]
    if {"max_num_seqs": 16} in for_room:
        others = [each for each in others if "max_num_seqs" not in each]
    rungs: list[_Remedy] = []
    for i, other in enumerate([{}, *for_room, *others]):
        changed = changed | other
        if (remedy := _tried(plan, changed, problem)) is not None:
            rungs.append(remedy)
        if rungs and i >= len(for_room):
            break
    if not rungs:
        return None
    best = min(rungs, key=lambda each: each.plan.request_s)
    for name in reversed([name for name in best.change if name not in base]):
        fewer = {key: value for key, value in best.change.items() if key != name}
        without = _tried(plan, fewer, problem)
        if without is not None and without.plan.request_s <= NOTICEABLE * best.plan.request_s:
            best = without
    return best


def _changed(plan: CapacityPlan, change: Change) -> CapacityPlan | None:
    """The plan with other options; None if they do not work together."""
    options, model = dict(change), plan.model
    if "quantization" in change and model.quantization is not None and model.quantization.is_online:
        model = replace(model, quantization=None)  # as the checkpoint is
    if plan.unused_draft_bytes:
        model = replace(model, has_mtp=True)  # "auto" decides anew
    try:
        model = model.quantized(options.pop("quantization", None))
        config = replace(plan.config, **options)
        context, num_sequences, staging = plan.context, plan.num_sequences, plan.spec.staging
        made = make_plan(config, model, plan.machine, context=context, num_sequences=num_sequences, staging=staging)
    except ConfigError:
        return None
    return None if _packing_problem(made) else made


def _changes(plan: CapacityPlan) -> Iterator[Change]:
    """Changes of one option, other than to offload, that could help on the same GPUs, the mildest value first."""
    config, num_seqs = plan.config, plan.num_sequences
    yield from _other_num_blocks(plan)
    if plan.memory.draft_bytes:
        yield {"speculation": "prompt_lookup"}
    if config.enable_cpu_offload:
        yield _other_pool(plan)
        yield {"num_gpu_blocks": None}
    if plan.machine.gpu_bytes is not None:
        yield from ({"gpu_memory_utilization": u} for u in (0.95, 0.98) if u > config.gpu_memory_utilization)
    yield from ({"max_num_batched_tokens": n} for n in (4096, 1024) if n < config.max_num_batched_tokens)
    if config.block_size > 256:
        yield {"kvcache_block_size": 256}
    if num_seqs > config.max_num_seqs:
        yield {"max_num_seqs": num_seqs}
    yield from ({"max_num_seqs": n} for n in (64, 16) if num_seqs <= n < config.max_num_seqs)
    if plan.machine.gpu_bytes is not None and not config.enforce_eager:
        yield {"enforce_eager": True}


def _other_num_blocks(plan: CapacityPlan) -> Iterator[Change]:
    """Yield another number of GPU blocks if the user gave one: what the sequences need, or else what fits."""
    name, unset = _blocks_option(plan), None if plan.config.enable_cpu_offload else -1
    given = getattr(plan.config, name)
    if given == unset:
        return
    n, each = plan.num_sequences, ceil_div(plan.context, plan.spec.block_size)
    needed = n if plan.config.enable_cpu_offload else num_blocks_for(n, each)
    change: Change = {name: unset, "kvcache_block_size": plan.spec.block_size}
    if plan.config.speculation_method == "auto" and plan.config.enable_cpu_offload:
        change |= {"speculation": "resident", "shadow_bits": None, "shadow_memory_gb": None}  # given slots come first
    fitting = _changed(plan, change)
    if needed > given:
        yield {name: needed}
    elif fitting is not None and fitting.num_gpu_blocks < given:
        yield {name: fitting.num_gpu_blocks}


def _other_pool(plan: CapacityPlan) -> Change:
    """A CPU pool in the user's unit: one that holds the sequences, or if the present one is too large, what fits."""
    num_blocks = num_blocks_for(plan.num_sequences, ceil_div(plan.context, plan.spec.block_size))
    block_bytes = plan.spec.block_bytes * plan.config.tensor_parallel_size
    if not plan.fits_host:
        num_blocks = max(1, int(plan.machine.host_bytes * MAX_HOST_SHARE) // block_bytes)
    if plan.config.cpu_memory_gb is not None:
        return {"cpu_memory_gb": ceil(100 * num_blocks * block_bytes / 2**30) / 100}
    return {"num_cpu_blocks": num_blocks}


def _described(plan: CapacityPlan, change: Change) -> str:
    """Describe a change, such as "use enable_cpu_offload and lower max_num_batched_tokens to 1024"."""
    parts = []
    for name, value in change.items():
        old = getattr(plan.config, name, None)
        if isinstance(value, str):
            parts.append(f"use {name}={value}")
        elif value is True:
            parts.append(f"use {name}")
        elif value in (None, -1) and value != old:
            parts.append(f"leave {name} unset")
        elif value != old:
            verb = "set" if old is None else "raise" if value > old else "lower"
            parts.append(f"{verb} {name} to {value}")
    return " and ".join(parts)
