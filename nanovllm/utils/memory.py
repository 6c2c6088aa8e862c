"""The host memory that this process can still use."""

from collections.abc import Sequence
from pathlib import Path

# The limit and the usage of the container that this process runs in
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),  # v2
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),  # v1
)


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # v2 writes "max" for no limit


def available_host_bytes(cgroup_files: Sequence[tuple[str, str]] = CGROUP_FILES) -> int:
    """Return the bytes that can still be allocated: the lesser of the machine's free memory and the room below the
    container's limit.

    A container's usage includes its page cache. Inactive pages can be reclaimed, so they count as available.
    """
    available = _meminfo_bytes("MemAvailable")
    for limit_file, usage_file in cgroup_files:
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, limit - usage + _reclaimable_bytes(Path(usage_file).parent))
    return max(available, 0)


def _meminfo_bytes(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {key}")


def _reclaimable_bytes(cgroup: Path) -> int:
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    return int(stat.get("inactive_file", 0))
