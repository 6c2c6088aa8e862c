"""Remedies: which options to change so that a plan works. A change is recommended only after checking that it works."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, TypeAlias

from nanovllm.capacity.plan import CapacityPlan
from nanovllm.capacity.planner import MAX_HOST_SHARE, make_plan
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import ceil_div

Change: TypeAlias = Mapping[str, Any]  # new values of Config's fields
Problem: TypeAlias = Callable[[CapacityPlan], str | None]

MAX_REMEDIES = 3
MAX_UTILIZATION = 0.98
MIN_BATCHED_TOKENS = 512
SMALL_BATCHED_TOKENS = 2048
SMALL_NUM_SEQS = 16


def remedies(plan: CapacityPlan, problem: Problem) -> str:
    """Which options to change so that `problem` finds nothing, mildest change first, or why no change helps.

    Suggests single options if one is enough, otherwise several together. Also suggests more GPUs if that helps.
    """
    found = [change for changes in _alternatives(plan) if (change := _first_working(plan, changes, problem))]
    together = None if found else _together(plan, problem)
    if together:
        found = [together]
    ranks = [{"tensor_parallel_size": n} for n in (2, 4, 8) if n > plan.config.tensor_parallel_size]
    found += [change] if (change := _first_working(plan, ranks, problem)) else []
    if found:
        return " or ".join(_described(plan, change) for change in found[:MAX_REMEDIES])
    return f"no option changes that: {_at_the_smallest(plan, problem)}; use a smaller model, or more memory"


def _first_working(plan: CapacityPlan, changes: Sequence[Change], problem: Problem) -> Change | None:
    return next((change for change in changes if _works(plan, change, problem)), None)


def _together(plan: CapacityPlan, problem: Problem) -> Change | None:
    """A set of options that solves the problem, and from which none can be left out; None if there is none."""
    together: dict[str, Any] = {}
    for change in _shrinking(plan):
        together |= change
        if _works(plan, together, problem):
            return _needed(plan, together, problem)
    return None


def _at_the_smallest(plan: CapacityPlan, problem: Problem) -> str:
    """Describe the problem that remains with all changes of `_shrinking`."""
    options = {name: value for change in _shrinking(plan) for name, value in change.items()}
    smallest = _changed(plan, options)
    remaining = problem(smallest) if smallest else None
    assert remaining, "the smallest engine has invalid options, or has no problem"
    listed = ", ".join(f"{name}={value}" for name, value in options.items() if value not in (None, -1))
    return f"with {listed}, {remaining}"


def _works(plan: CapacityPlan, change: Change, problem: Problem) -> bool:
    changed = _changed(plan, change)
    return changed is not None and problem(changed) is None


def _changed(plan: CapacityPlan, change: Change) -> CapacityPlan | None:
    """The plan with other options; None if they are invalid together."""
    try:
        config = replace(plan.config, **change)
        return make_plan(
            config,
            plan.model,
            plan.machine,
            context=plan.context,
            num_sequences=plan.num_sequences,
            staging=plan.spec.staging,
        )
    except ConfigError:
        return None


def _needed(plan: CapacityPlan, together: Change, problem: Problem) -> Change:
    """The options in `together` that are really needed."""
    needed = dict(together)
    for name in together:
        fewer = {other: value for other, value in needed.items() if other != name}
        if _works(plan, fewer, problem):
            needed = fewer
    return needed


def _alternatives(plan: CapacityPlan) -> Iterator[list[Change]]:
    """For each option that could help on the same GPUs, the values to try, mildest first."""
    config = plan.config
    yield _other_num_blocks(plan)
    if config.enable_cpu_offload:
        yield _other_pools(plan)
    if plan.machine.gpu_bytes is not None:
        now = round(100 * config.gpu_memory_utilization)
        yield [{"gpu_memory_utilization": u / 100} for u in range(now + 1, round(100 * MAX_UTILIZATION) + 1)]
    yield [{"max_num_batched_tokens": n} for n in _halves(config.max_num_batched_tokens, MIN_BATCHED_TOKENS)]
    yield [{"kvcache_block_size": n} for n in _halves(config.block_size, 256) if n % 256 == 0]
    if plan.num_sequences > config.max_num_seqs:
        yield [{"max_num_seqs": plan.num_sequences}]
    else:
        yield [{"max_num_seqs": n} for n in _halves(config.max_num_seqs, plan.num_sequences)]
    if not config.enable_cpu_offload:
        offload = {"enable_cpu_offload": True, "num_kvcache_blocks": -1}
        with_offload = _changed(plan, offload)
        yield [offload, *({**offload, **pool} for pool in (_other_pools(with_offload) if with_offload else ()))]
    if plan.machine.gpu_bytes is not None and not config.enforce_eager:
        yield [{"enforce_eager": True}]


def _shrinking(plan: CapacityPlan) -> Iterator[Change]:
    """Changes that save memory, to be applied together. Those that cost the least speed come first."""
    config = plan.config
    if not config.enable_cpu_offload:
        yield {"enable_cpu_offload": True}
    yield {"num_kvcache_blocks": -1, "num_gpu_blocks": None}
    yield {"num_cpu_blocks": None, "cpu_memory_gb": None}
    yield {"max_num_batched_tokens": min(config.max_num_batched_tokens, SMALL_BATCHED_TOKENS)}
    yield {"kvcache_block_size": 256}
    yield {"num_cpu_blocks": plan.num_sequences * ceil_div(plan.context, 256)}
    yield {"max_num_seqs": min(config.max_num_seqs, max(plan.num_sequences, SMALL_NUM_SEQS))}
    yield {"gpu_memory_utilization": max(config.gpu_memory_utilization, MAX_UTILIZATION)}
    yield {"max_num_batched_tokens": min(config.max_num_batched_tokens, MIN_BATCHED_TOKENS)}
    yield {"enforce_eager": True}


def _other_num_blocks(plan: CapacityPlan) -> list[Change]:
    """If the user gave a number of GPU blocks: the number that the sequences need if larger, else what fits."""
    config, offload = plan.config, plan.config.enable_cpu_offload
    name, given, unset = (
        ("num_gpu_blocks", config.num_gpu_blocks, None)
        if offload
        else ("num_kvcache_blocks", max(config.num_kvcache_blocks, 0), -1)
    )
    open_plan = _changed(plan, {name: unset, "kvcache_block_size": config.block_size})
    if not given or open_plan is None:
        return []
    each = 1 if offload else ceil_div(plan.context, plan.spec.block_size)
    needed = plan.num_sequences * each
    if needed > given:
        return [{name: needed}]
    return [{name: open_plan.num_gpu_blocks}] if open_plan.num_gpu_blocks < given else []


def _other_pools(plan: CapacityPlan) -> list[Change]:
    """Two CPU pools, in the user's unit: one that just holds the sequences, and the largest that fits. Milder first."""
    block_bytes = plan.spec.block_bytes * plan.config.tensor_parallel_size
    needed = plan.num_sequences * ceil_div(plan.context, plan.spec.block_size)
    most = int(plan.machine.host_bytes * MAX_HOST_SHARE) // block_bytes
    numbers = (needed, most) if plan.fits_host else (most, needed)
    if plan.config.cpu_memory_gb is not None:
        return [{"cpu_memory_gb": ceil(100 * n * block_bytes / 2**30) / 100} for n in numbers if n]
    return [{"num_cpu_blocks": n} for n in numbers if n]


def _halves(value: int, least: int) -> list[int]:
    """Half of `value`, a quarter and so on, down to `least`."""
    halves = []
    while value // 2 >= least:
        value //= 2
        halves.append(value)
    return halves


def _described(plan: CapacityPlan, change: Change) -> str:
    parts = []
    for name, value in change.items():
        old = getattr(plan.config, name)
        if value == old:
            continue
        if isinstance(value, bool):
            parts.append(f"use {name}")
        elif value is None or value == -1:
            parts.append(f"leave {name} unset")
        else:
            verb = "set" if old is None else "raise" if value > old else "lower"
            parts.append(f"{verb} {name} to {value}")
    return " and ".join(parts)
