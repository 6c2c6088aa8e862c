import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.capabilities.cpu_attention import threads
from nanovllm.capabilities.cpu_attention.threads import attention_cpus, available_cpus
from nanovllm.errors import ConfigError


class Machine:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        monkeypatch.setattr(threads, "_CGROUP_V2", str(root / "cpu.max"))
        monkeypatch.setattr(threads, "_CGROUP_V1", (str(root / "quota"), str(root / "period")))
        monkeypatch.setattr(threads, "_NODES", str(root / "node"))

    def has_cpus(self, *cpus: int) -> None:
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))

    def has_nodes(self, *nodes: Iterable[int]) -> None:
        for i, cpus in enumerate(nodes):
            for name in ("cpulist", *(f"cpu{cpu}" for cpu in cpus)):
                (self.root / "node" / f"node{i}" / name).mkdir(parents=True)

    def writes(self, **files: str) -> None:
        for name, text in files.items():
            (self.root / name.replace("_", ".")).write_text(text + "\n")


def taken(*arguments: Any, **options: Any) -> list[int]:
    return list(attention_cpus(*arguments, **options).cpus)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path, monkeypatch)
    machine.has_cpus(*range(16))
    return machine


def test_available_cpus_are_those_of_the_process(machine: Machine) -> None:
    machine.has_cpus(9, 3, 5)
    assert available_cpus() == [3, 5, 9]


def test_attention_cpus_are_no_more_than_the_quota(machine: Machine) -> None:
    of_quota = {"400000 100000": 4, "450000 100000": 4, "50000 100000": 1}
    of_quota |= {"max 100000": 16, "1600000 100000": 16, "9900000 100000": 16}
    cases = [({"cpu_max": text}, num_cpus) for text, num_cpus in of_quota.items()]
    cases += [({"cpu_max": "", "quota": quota, "period": "100000"}, n) for quota, n in (("300000", 3), ("-1", 16))]
    for files, num_cpus in cases:
        machine.writes(**files)
        with pytest.raises(ConfigError, match=f"may use {num_cpus} cpus"):
            attention_cpus(num_cpus + 1, 0, 1)
        assert len(attention_cpus(num_cpus, 0, 1).cpus) == num_cpus


def test_attention_cpus_with_a_quota_are_not_pinned(machine: Machine) -> None:
    """Every container took the machine's first cpus."""
    assert attention_cpus(None, 0, 1).is_pinned
    machine.writes(cpu_max="1600000 100000")
    assert attention_cpus(None, 0, 1).is_pinned
    machine.writes(cpu_max="1000000 100000")
    cpus = attention_cpus(None, 0, 1)
    assert len(cpus.cpus) == 8 and not cpus.is_pinned


def test_attention_cpus_quota_is_divided_among_the_ranks(machine: Machine) -> None:
    machine.writes(cpu_max="700000 100000")
    assert [len(attention_cpus(None, rank, 3).cpus) for rank in range(3)] == [1, 1, 2]
    assert [len(attention_cpus(None, rank, 16).cpus) for rank in range(16)] == [1] * 16


def test_attention_cpus_choose_the_node_before_the_quota_cuts(machine: Machine) -> None:
    """The quota left the first 8 cpus, which are all on node 0."""
    machine.has_nodes(range(8), range(8, 16))
    machine.writes(cpu_max="800000 100000")
    assert taken(6, 0, 1, numa_node=1) == list(range(10, 16))


def test_attention_cpus_leave_some_to_other_threads(machine: Machine) -> None:
    for num_cpus, num_threads in {1: 1, 2: 1, 3: 2, 7: 6, 8: 6, 16: 14}.items():
        machine.has_cpus(*range(num_cpus))
        assert taken(None, 0, 1) == list(range(num_cpus))[-num_threads:]


@pytest.mark.parametrize("nodes", [[range(16)], [(*range(4), *range(8, 12)), (*range(4, 8), *range(12, 16))]])
def test_attention_cpus_of_ranks_are_disjoint(machine: Machine, nodes: list[Iterable[int]]) -> None:
    machine.has_nodes(*nodes)
    for num_ranks, share in itertools.product((1, 2, 3, 4, 8, 16), (None, 1, 16)):
        num_threads = share and max(1, share // num_ranks)
        if num_threads is None or (num_threads * num_ranks <= 16 and 8 % num_ranks == 0):
            of_ranks = [taken(num_threads, rank, num_ranks, rank % len(nodes)) for rank in range(num_ranks)]
            cpus = [cpu for rank_cpus in of_ranks for cpu in rank_cpus]
            assert all(of_ranks) and len(set(cpus)) == len(cpus) and set(cpus) <= set(range(16))


def test_attention_cpus_more_ranks_than_cpus_share_them(machine: Machine) -> None:
    machine.has_cpus(4, 6)
    of_ranks = [taken(None, rank, 4) for rank in range(4)]
    assert {cpu for cpus in of_ranks for cpu in cpus} == {4, 6} and all(len(cpus) == 1 for cpus in of_ranks)


def test_attention_cpus_are_those_of_the_node_if_it_has_enough(machine: Machine) -> None:
    machine.has_nodes(range(8), range(8, 16))
    assert taken(6, 0, 1, numa_node=0) == list(range(2, 8))
    assert taken(6, 0, 1, numa_node=1) == list(range(10, 16))
    assert taken(6, 0, 1, numa_node=7) == taken(6, 0, 1)  # a node of memory only


def test_attention_cpus_leave_cpus_of_the_gpus_node(machine: Machine) -> None:
    """All cpus of the GPU's node were taken, so the threads that drive the GPU were on the other one."""
    machine.has_nodes(range(8), range(8, 16))
    assert taken(None, 0, 1, numa_node=1) == [*range(8), *range(10, 16)]
    assert taken(None, 0, 1, numa_node=0) == list(range(2, 16))
    assert taken(8, 0, 1, numa_node=1) == [6, 7, *range(10, 16)]
    assert taken(15, 0, 1, numa_node=1) == [*range(8), *range(9, 16)]
    assert taken(None, 1, 2, numa_node=1) == [4, 5, 6, 7, 14, 15]


def test_attention_cpus_more_than_there_are_is_refused(machine: Machine) -> None:
    assert len(taken(16, 0, 1)) == 16
    with pytest.raises(ConfigError, match=r"17 threads.*may use 16 cpus; set 1 to 16 threads, or allow it more cpus"):
        attention_cpus(17, 0, 1)
    with pytest.raises(ConfigError, match=r"9 threads.*may use 8 cpus for each of its 2 ranks; set 1 to 8 threads"):
        attention_cpus(9, 1, 2)
    with pytest.raises(ConfigError, match="0 threads"):
        attention_cpus(0, 0, 1)


def test_attention_cpus_of_this_machine() -> None:
    assert set(taken(None, 0, 1)) <= os.sched_getaffinity(0)
