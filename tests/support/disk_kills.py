"""Kill writers of one path at random moments, and look at what they leave: python disk_kills.py PATH KILLS SEED.

Each round forks two writers, which say which extents are stored, and kills them when they have said so of a random
number, or milliseconds later. Then the path is
opened as an engine would. Exits with 1 if something that was said to be stored is gone, if a file is wrong, if a
temporary file is left, or if the bytes in use differ from the size of the files.
"""

import os
import random
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from nanovllm.capabilities.disk.disk_moves import KEY_BYTES, Extent
from nanovllm.capabilities.disk.store import DiskStore, check_extent, list_extents

PAYLOAD_BYTES = 40_000
LIMIT_BYTES = 10**9  # more than a round writes, so that nothing is evicted
ROUNDS_PER_FOLDER = 20


def make_extent(rng: random.Random) -> Extent:
    return Extent(rng.randbytes(KEY_BYTES), rng.randbytes(KEY_BYTES), rng.randbytes(2048), time.time(), 0, 0, 0)


def open_store(path: Path) -> DiskStore:
    return DiskStore(path, LIMIT_BYTES, PAYLOAD_BYTES, {"weights": "some"}, "a model")


def payload_of(extent: Extent) -> list[memoryview]:
    """Bytes that follow from the key, in two parts."""
    data = random.Random(extent.key).randbytes(PAYLOAD_BYTES)
    return [memoryview(data)[: PAYLOAD_BYTES // 3], memoryview(data)[PAYLOAD_BYTES // 3 :]]


def write_until_killed(path: Path, report: int, seed: int) -> None:
    """Opening the path is among the moments at which this is killed."""
    rng, store = random.Random(seed), open_store(path)
    while True:
        extent = make_extent(rng)
        assert store.write(extent, payload_of(extent), lambda: True)
        os.write(report, extent.key)  # shorter than PIPE_BUF, so it arrives as a whole


def start_writer(path: Path, seed: int) -> tuple[int, int]:
    """Returns the process and the pipe of what it stored."""
    told, report = os.pipe()
    if pid := os.fork():
        os.close(report)
        return pid, told
    try:
        os.close(told)
        write_until_killed(path, report, seed)
    finally:
        os._exit(3)


def kill(writer: tuple[int, int], num_stored: int) -> set[bytes]:
    """Kill a writer when it has stored so many extents. Returns the keys that it said to be stored."""
    pid, told = writer
    said = b""
    while len(said) < num_stored * KEY_BYTES and (part := os.read(told, KEY_BYTES)):
        said += part
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"a writer ended by itself, with status {status}"
    while select.select([told], [], [], 0)[0] and (part := os.read(told, 2**16)):
        said += part
    os.close(told)
    return {said[i : i + KEY_BYTES] for i in range(0, len(said) - KEY_BYTES + 1, KEY_BYTES)}


def check(path: Path, stored: set[bytes]) -> int:
    """Open the path and look at every file. Returns how many there are."""
    store = open_store(path)
    assert all(key in store for key in stored), "something that was stored is lost"
    extents = list_extents(path).extents
    for extent in extents:
        header = check_extent(extent.path)
        expected = b"".join(payload_of(Extent(header.key, b"", b"", 0, 0, 0, 0)))
        assert extent.path.read_bytes().endswith(expected), f"{extent.path} holds other bytes than were written"
    assert store.total_bytes == sum(extent.num_bytes for extent in extents), "the bytes in use are wrong"
    left_over = [file for folder in path.iterdir() if folder.is_dir() for file in folder.glob("*.tmp")]
    assert not left_over, f"{left_over} were left over"
    store.close()
    return len(extents)


def main(path: Path, num_kills: int, seed: int) -> int:
    rng = random.Random(seed)
    stored: set[bytes] = set()
    num_killed = num_stored = num_files = 0
    while num_killed < num_kills:
        if num_killed % (2 * ROUNDS_PER_FOLDER) == 0:
            num_stored += len(stored)
            shutil.rmtree(path, ignore_errors=True)
            stored.clear()
        writers = [start_writer(path, rng.randrange(2**32)) for _ in range(2)]
        num_each = rng.randrange(6)
        time.sleep(rng.random() * (0.001 if num_each else 0.02))
        for writer in writers:
            stored |= kill(writer, num_each)
            num_killed += 1
        num_files += check(path, stored)
    print(f"{num_killed} kills, {num_stored + len(stored)} extents stored, {num_files} files checked")
    return num_stored + len(stored)


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])) else 1)
