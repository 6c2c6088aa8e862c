"""The host memory that is left: the machine's or the container's, whichever is less."""

from pathlib import Path

import pytest

from nanovllm.capacity import machine as memory
from nanovllm.capacity.machine import available_host_bytes
from nanovllm.utils.arithmetic import format_bytes


def cgroup(directory: Path, limit: str, usage: int, inactive: int | None = 0) -> tuple[str, str]:
    directory.mkdir()
    (directory / "memory.max").write_text(limit + "\n")
    (directory / "memory.current").write_text(f"{usage}\n")
    if inactive is not None:
        (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return str(directory / "memory.max"), str(directory / "memory.current")


def test_no_container_is_what_the_machine_has() -> None:
    of_the_machine = memory._meminfo_bytes("MemAvailable")
    assert of_the_machine > 2**20
    assert available_host_bytes(()) == pytest.approx(of_the_machine, rel=0.2)


@pytest.mark.parametrize(("inactive", "expected"), [(0, 700), (250, 950), (None, 700)])
def test_container_limit_counts_and_its_page_cache_can_be_given_back(
    tmp_path: Path, inactive: int | None, expected: int
) -> None:
    files = cgroup(tmp_path / "group", "1000", 300, inactive)
    assert available_host_bytes([("/nowhere/max", "/nowhere/current"), files]) == expected


def test_container_without_a_limit_or_over_it(tmp_path: Path) -> None:
    assert available_host_bytes([cgroup(tmp_path / "free", "max", 300)]) > 2**20
    assert available_host_bytes([cgroup(tmp_path / "full", "1000", 1300)]) == 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (28 * 2**20, "28.00 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (4.7 * 2**30, "4.70 GiB"),
        (2**50, "1048576.00 GiB"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
