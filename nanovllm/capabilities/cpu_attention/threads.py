"""Choice of the cpus that the attention threads of a rank run on."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nanovllm.errors import ConfigError

_CGROUP_V2 = "/sys/fs/cgroup/cpu.max"  # "quota period"; the quota is "max" if there is no limit
_CGROUP_V1 = ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_NODES = "/sys/devices/system/node"
_MANY_CPUS = 8  # from this many cpus on, a rank leaves two cpus to the threads that drive the GPU, otherwise one


class AttentionCpus(NamedTuple):
    """One cpu for each attention thread."""

    cpus: tuple[int, ...]
    is_pinned: bool  # True if each thread stays on its cpu; otherwise only the number of cpus matters


def available_cpus() -> list[int]:
    """Return the cpus that this process may use, ascending. A quota may allow less cpu time than these cpus have."""
    return sorted(os.sched_getaffinity(0))


def attention_cpus(
    num_threads: int | None, rank: int, num_ranks: int, numa_node: int | None = None, *, launches_rarely: bool = False
) -> AttentionCpus:
    """Return the cpus of this rank's attention threads. Ranks get disjoint cpus if there are enough cpus.

    num_threads: the number of threads, or None to use all cpus of the rank but one or two, which are left to the
    threads that drive the GPU: one if `launches_rarely` says that these make a call for each step instead of each
    layer. numa_node: the memory node of the GPU.

    Each rank owns a share of the cpus of every memory node. The rank's cpus on `numa_node` are used first, except the
    cpus left to the threads that drive the GPU. A container's quota limits the number of threads. With a quota, threads
    are not pinned, because other containers would choose the same cpus. Raises ConfigError for more threads than the
    rank has cpus.
    """
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    available, quota = available_cpus(), _quota_cpus()
    nodes = _nodes_of(available)
    if any(len(on_node) < num_ranks for on_node in nodes.values()):
        nodes = {0: available}
    nearest_first = sorted(nodes, key=lambda node: (node != numa_node, node))
    shares = [_share(nodes[node], rank, num_ranks) for node in nearest_first]
    if not any(shares):  # more ranks than cpus
        shares = [[available[rank % len(available)]]]
    cpus = [cpu for share in shares for cpu in share]
    num_cpus, is_pinned = len(cpus), True
    if quota is not None and quota < len(available):
        num_cpus, is_pinned = min(num_cpus, max(1, len(_share(range(quota), rank, num_ranks)))), False
    num_spare = 2 if num_cpus >= _MANY_CPUS and not launches_rarely else 1
    if num_threads is None:
        num_threads = max(1, num_cpus - num_spare)
    if not 1 <= num_threads <= num_cpus:
        of_rank = f" for each of its {num_ranks} ranks" if num_ranks > 1 else ""
        raise ConfigError(
            f"{num_threads} threads for attention and experts on the CPU, but the engine may use {num_cpus} "
            f"cpus{of_rank}; set 1 to {num_cpus} threads, or allow it more cpus (taskset, the limit of the container)"
        )
    # The threads that drive the GPU should be near the GPU, so the spare cpus are on the nearest node. On each node the
    # last cpus are used first, because the system tends to use the first cpus.
    spare = cpus[:num_spare]
    in_order = [cpu for share in shares for cpu in reversed(share) if cpu not in spare] + spare[::-1]
    return AttentionCpus(tuple(sorted(in_order[:num_threads])), is_pinned)


def _share(cpus: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    return cpus[len(cpus) * rank // num_ranks : len(cpus) * (rank + 1) // num_ranks]


def _quota_cpus() -> int | None:
    """Return the container's quota in cpus, rounded down, or None without a quota."""
    for text in (_read(_CGROUP_V2), " ".join(map(_read, _CGROUP_V1))):
        words = text.split()
        if len(words) == 2 and all(word.isdigit() for word in words):  # v1 writes -1 for no limit
            quota_us, period_us = map(int, words)
            return quota_us // period_us
    return None


def _nodes_of(available: Sequence[int]) -> dict[int, Sequence[int]]:
    """Return the available cpus of each memory node. If the system does not list every cpu, all cpus are on node 0."""
    nodes: dict[int, Sequence[int]] = {}
    for path in Path(_NODES).glob("node[0-9]*"):
        on_node = {cpu.name for cpu in path.glob("cpu[0-9]*")}
        if cpus := [cpu for cpu in available if f"cpu{cpu}" in on_node]:
            nodes[int(path.name.removeprefix("node"))] = cpus
    return nodes if sum(map(len, nodes.values())) == len(available) else {0: available}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
