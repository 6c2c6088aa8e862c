"""Which cpus the attention threads of a rank run on."""

import os
from collections.abc import Sequence
from pathlib import Path

from nanovllm.errors import ConfigError

_CGROUP_V2 = "/sys/fs/cgroup/cpu.max"  # "quota period"; the quota is "max" if there is no limit
_CGROUP_V1 = ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_NODES = "/sys/devices/system/node"
_MANY_CPUS = 8  # with so many a rank leaves two to the threads that drive the GPU, with fewer one


def available_cpus() -> list[int]:
    """The cpus that this process may use, ascending, and no more of them than the container's quota is worth."""
    cpus = sorted(os.sched_getaffinity(0))
    quota = _quota_cpus()
    return cpus if quota is None else cpus[: max(1, quota)]


def attention_cpus(num_threads: int | None, rank: int, num_ranks: int, numa_node: int | None = None) -> list[int]:
    """The cpus of this rank's attention threads, one for each. Ranks get disjoint ones if there are enough for all.

    `None` leaves some of the rank's cpus to the threads that drive the GPU. Each rank owns a share of the cpus of every
    memory node. If its share of `numa_node` is enough, only that is used. Raises ConfigError for more threads than the
    rank has cpus.
    """
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    available = available_cpus()
    nodes = _nodes_of(available)
    if any(len(cpus) < num_ranks for cpus in nodes.values()):
        nodes = {0: available}
    shares = {node: _share(cpus, rank, num_ranks) for node, cpus in nodes.items()}
    nearest_first = sorted(shares, key=lambda node: node != numa_node)
    # Of each node the last cpus are taken first, since the first ones tend to serve the system too.
    share = [cpu for node in nearest_first for cpu in reversed(shares[node])]
    if not share:  # more ranks than cpus
        share = [available[rank % len(available)]]
    if num_threads is None:
        num_threads = max(1, len(share) - (2 if len(share) >= _MANY_CPUS else 1))
    if not 1 <= num_threads <= len(share):
        of_rank = f" for each of its {num_ranks} ranks" if num_ranks > 1 else ""
        raise ConfigError(
            f"{num_threads} threads for attention on the CPU, but the engine may use {len(share)} cpus{of_rank}; "
            f"set 1 to {len(share)} threads, or allow it more cpus (taskset, the limit of the container)"
        )
    return sorted(share[:num_threads])


def _share(cpus: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    return cpus[len(cpus) * rank // num_ranks : len(cpus) * (rank + 1) // num_ranks]


def _quota_cpus() -> int | None:
    """How many cpus the container's quota is worth, rounded down, or None without a quota."""
    v2 = _read_words(_CGROUP_V2)
    v1 = [word for path in _CGROUP_V1 for word in _read_words(path)]
    for words in (v2, v1):
        if len(words) == 2 and all(word.isdigit() for word in words):  # v1 writes -1 for no limit
            quota_us, period_us = map(int, words)
            return quota_us // period_us
    return None


def _nodes_of(available: Sequence[int]) -> dict[int, list[int]]:
    """The available cpus of each memory node. Everything is node 0 where the system does not say."""
    nodes = {}
    for path in Path(_NODES).glob("node[0-9]*/cpulist"):
        on_node = parse_cpulist(" ".join(_read_words(str(path))))
        if cpus := [cpu for cpu in available if cpu in on_node]:
            nodes[int(path.parent.name.removeprefix("node"))] = cpus
    if sum(map(len, nodes.values())) != len(available):
        return {0: list(available)}
    return dict(sorted(nodes.items()))


def parse_cpulist(text: str) -> set[int]:
    """Linux's notation for sets of cpus, such as 0-3,8."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _read_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []
