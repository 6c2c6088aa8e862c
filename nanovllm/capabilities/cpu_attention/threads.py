"""Choice of the cpus that the attention threads of a rank run on."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanovllm.errors import ConfigError

_CGROUP_V2 = "/sys/fs/cgroup/cpu.max"  # "quota period"; the quota is "max" if there is no limit
_CGROUP_V1 = ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_NODES = "/sys/devices/system/node"
_MANY_CPUS = 8  # with so many a rank leaves two to the threads that drive the GPU, with fewer one


@dataclass(frozen=True)
class AttentionCpus:
    """One cpu for each thread."""

    cpus: tuple[int, ...]
    is_pinned: bool  # each thread stays on its cpu; otherwise only the number of cpus counts


def available_cpus() -> list[int]:
    """The cpus that this process may use, ascending. A quota may allow only the time of fewer."""
    return sorted(os.sched_getaffinity(0))


def attention_cpus(num_threads: int | None, rank: int, num_ranks: int, numa_node: int | None = None) -> AttentionCpus:
    """The cpus of this rank's attention threads. Ranks get disjoint ones if there are enough for all.

    `None` leaves some of the rank's cpus to the threads that drive the GPU. Each rank owns a share of the cpus of every
    memory node. The cpus of `numa_node`, the GPU's, are taken first, apart from the ones that are left. A container's
    quota limits the number of threads. They are not pinned then, since other containers would choose the same cpus.
    Raises ConfigError for more threads than the rank has cpus.
    """
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    available = available_cpus()
    nodes = _nodes_of(available)
    if any(len(cpus) < num_ranks for cpus in nodes.values()):
        nodes = {0: available}
    shares = {node: _share(cpus, rank, num_ranks) for node, cpus in nodes.items()}
    nearest_first = [shares[node] for node in sorted(shares, key=lambda node: node != numa_node)]
    if not any(nearest_first):  # more ranks than cpus
        nearest_first = [[available[rank % len(available)]]]
    num_cpus = sum(map(len, nearest_first))
    quota = _quota_cpus()
    limit = len(available) if quota is None else min(quota, len(available))
    is_pinned = limit == len(available)
    if not is_pinned:
        num_cpus = min(num_cpus, max(1, len(_share(range(limit), rank, num_ranks))))
    num_spare = 2 if num_cpus >= _MANY_CPUS else 1
    if num_threads is None:
        num_threads = max(1, num_cpus - num_spare)
    if not 1 <= num_threads <= num_cpus:
        of_rank = f" for each of its {num_ranks} ranks" if num_ranks > 1 else ""
        raise ConfigError(
            f"{num_threads} threads for attention on the CPU, but the engine may use {num_cpus} cpus{of_rank}; "
            f"set 1 to {num_cpus} threads, or allow it more cpus (taskset, the limit of the container)"
        )
    return AttentionCpus(tuple(sorted(_in_order(nearest_first, num_spare)[:num_threads])), is_pinned)


def _in_order(nearest_first: Sequence[Sequence[int]], num_spare: int) -> list[int]:
    """Return a rank's cpus in the order in which they are taken: the nearest node's first, the spare ones last.

    On each node the last cpus are taken first, since the first ones tend to serve the system too. The spare cpus are
    the first of the nearest node, because the threads that drive the GPU should be near it.
    """
    spare = [cpu for cpus in nearest_first for cpu in cpus][:num_spare]
    return [cpu for cpus in nearest_first for cpu in reversed(cpus) if cpu not in spare] + spare[::-1]


def _share(cpus: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    return cpus[len(cpus) * rank // num_ranks : len(cpus) * (rank + 1) // num_ranks]


def _quota_cpus() -> int | None:
    """Number of cpus that the container's quota is worth, rounded down, or None without a quota."""
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
