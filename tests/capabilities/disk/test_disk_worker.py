"""DiskWorker: its threads with a store, a pool and a clock that tests control."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import LIMIT_S, wait_until

from nanovllm.capabilities.disk import worker
from nanovllm.capabilities.disk.disk_moves import NUM_READERS, DiskMoves, Extent
from nanovllm.capabilities.disk.store import REFRESH_S
from nanovllm.capabilities.disk.tier import DiskBoard
from nanovllm.capabilities.disk.worker import DiskWorker

pytestmark = pytest.mark.usefixtures("patient_disk")


class NotedStore:
    """Notes calls. A write takes `write_s` of the clock. Reads wait for `may_read`, and find all extents but one."""

    is_paused, total_bytes, num_evicted = False, 0, 0

    def __init__(self, files: list[Path], write_s: float, missing: int) -> None:
        self.now_s, self.calls = 0.0, list[str]()
        self.may_read, self.reads = threading.Event(), list[Extent]()  # those that have begun
        self._files, self._write_s, self._missing = files, write_s, missing

    def __contains__(self, key: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def sample(self, num_extents: int) -> list[Path]:
        return self._files[:num_extents]

    def read(self, extent: Extent, payload: object) -> bool:
        self.reads.append(extent)
        self.may_read.wait()
        self.calls.append("read")
        return extent.key[0] != self._missing

    def write(self, *args: object) -> bool:
        self.now_s += self._write_s
        self.calls.append("written")
        return True

    def refresh(self) -> None:
        self.calls.append("refreshed")

    def close(self) -> None:
        self.calls.append("closed")


class Setting:
    """A worker with a NotedStore, and a pool whose copies are the functions `payload` and `copy_in`."""

    def __init__(
        self,
        payload: Callable[..., Any] = lambda *args: None,
        copy_in: Callable[..., Any] = lambda *args: None,
        files: list[Path] | None = None,
        write_s: float = 0.0,
        missing: int = -1,
    ) -> None:
        self.board = DiskBoard(1, 4)
        self.store = NotedStore(files or [], write_s, missing)
        self.device_is_done = threading.Event()
        self.device_is_done.set()
        self.pool = SimpleNamespace(
            fence=list,
            is_over=lambda fence: self.device_is_done.is_set(),
            num_bytes=lambda extent: 1,
            buffer_bytes=0,
            is_closed=False,
            buffer=lambda extent: None,
            payload=payload,
            copy_in=copy_in,
            close=self._close_pool,
        )
        self.worker = DiskWorker(self.store, self.pool, self.board, rank=0, clock=lambda: self.store.now_s)  # type: ignore[arg-type]

    def _close_pool(self) -> None:
        self.pool.is_closed = True

    def submit(self, num_stores: int = 0, num_loads: int = 0, load_number: int = 0) -> None:
        extents = [Extent(bytes([i, 0]), b"", b"", 0.0, place=0, start=0, version=0) for i in range(64)]
        self.worker.submit(DiskMoves(extents[:num_stores], extents[:num_loads], load_number))

    def wait_for_end(self, load_number: int) -> None:
        wait_until(lambda: self.board.ended_load[0] == load_number)


def fail(*args: object) -> None:
    raise RuntimeError("the driver refuses the copy")


@pytest.fixture
def settings() -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(**options: Any) -> Setting:
        made.append(Setting(**options))
        return made[-1]

    yield make
    for setting in made:
        setting.store.may_read.set()
        setting.worker.close()
        setting.board.close()


def test_worker_touches_nothing_before_the_device_has_done_what_it_was_given(settings: Callable[..., Setting]) -> None:
    """The edges E13 and E14. On a CPU everything is done at once, so engines cannot tell."""
    setting = settings()
    setting.device_is_done.clear()
    setting.store.may_read.set()
    setting.submit(num_stores=1, num_loads=1, load_number=1)
    time.sleep(0.05)  # none of the threads may do anything
    assert setting.store.calls == []
    setting.device_is_done.set()
    wait_until(lambda: sorted(setting.store.calls) == ["read", "written"])


@pytest.mark.parametrize("num_submissions", [1, 32])
def test_worker_that_is_never_idle_looks_for_files_of_others(
    settings: Callable[..., Setting], num_submissions: int
) -> None:
    """It did so only after two seconds without work, and a busy engine never saw what others wrote or removed."""
    setting = settings(write_s=REFRESH_S / 4)
    for _ in range(num_submissions):
        setting.submit(num_stores=32 // num_submissions)
    wait_until(lambda: setting.store.calls.count("written") == 32 and setting.store.calls.count("refreshed") == 8)
    times = [i for i, call in enumerate(setting.store.calls) if call == "refreshed"]
    assert times == [4, 9, 14, 19, 24, 29, 34, 39], "after every four writes"


def test_load_that_is_cancelled_ends_while_the_disk_hangs(settings: Callable[..., Setting]) -> None:
    """Its blocks were held until the disk answered. Data that is read afterwards must not get into the blocks."""
    copied: list[Extent] = []
    setting = settings(copy_in=copied.append)
    setting.submit(num_loads=9, load_number=1)
    wait_until(lambda: len(setting.store.reads) == NUM_READERS)
    assert setting.board.ended_load[0] == 0
    setting.board.cancelled_load[0] = 1
    setting.wait_for_end(1)
    assert not setting.store.calls and setting.board.num_loaded[0] == 0
    setting.submit(num_loads=9, load_number=2)
    setting.store.may_read.set()
    setting.wait_for_end(2)
    wait_until(lambda: len(setting.store.calls) == NUM_READERS + 9)  # the reads of the first load end, too
    setting.worker.close()
    assert setting.board.num_loaded[0] == len(copied) == 9
    assert setting.store.calls == ["read"] * (NUM_READERS + 9) + ["closed"]


def test_cancelled_load_ends_after_the_copies_that_have_begun(settings: Callable[..., Setting]) -> None:
    may_copy, has_begun = threading.Event(), threading.Event()

    def copy(*args: object) -> None:
        has_begun.set()
        may_copy.wait()

    setting = settings(copy_in=copy)
    setting.store.may_read.set()
    setting.submit(num_loads=9, load_number=1)
    has_begun.wait()
    setting.board.cancelled_load[0] = 1
    time.sleep(0.02)
    assert setting.board.ended_load[0] == 0
    may_copy.set()
    setting.wait_for_end(1)


def test_load_that_lacks_an_extent_ends_and_names_it(settings: Callable[..., Setting]) -> None:
    """The extents after the missing one are not read."""
    setting = settings(missing=3)
    setting.store.may_read.set()
    setting.submit(num_loads=60, load_number=1)
    setting.wait_for_end(1)
    assert setting.board.missing[0] == 3 and setting.board.num_loaded[0] < 60
    assert setting.worker.stats()["num_disk_misses"] == 1
    setting.submit(num_loads=3, load_number=2)
    setting.wait_for_end(2)
    assert (setting.board.missing[0], setting.board.num_loaded[0]) == (-1, 3)


def test_start_up_measures_the_disk_and_does_not_wait_for_one_that_hangs(
    settings: Callable[..., Setting], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement that never returned let no load begin or end after it."""
    files, pipes = ([tmp_path / f"{name}{i}" for i in range(NUM_READERS)] for name in ("file", "pipe"))
    for file, pipe in zip(files, pipes, strict=True):
        file.write_bytes(bytes(100_000))
        os.mkfifo(pipe)  # opening it waits for a writer
    assert settings().worker.measure() == 0, "there are no files"
    assert settings(files=files).worker.measure() > 0
    monkeypatch.setattr(worker, "MEASURE_S", 0.05)
    setting = settings(files=pipes)
    assert setting.worker.measure() == 0
    setting.submit(num_loads=3, load_number=1)
    setting.board.cancelled_load[0] = 1
    setting.wait_for_end(1)
    writers = [os.open(pipe, os.O_RDWR) for pipe in pipes]  # the threads that wait for a writer go on
    for pipe, writer in zip(pipes, writers, strict=True):
        pipe.unlink()  # no thread that comes later waits
        os.close(writer)


def test_copies_that_always_fail_are_logged_once_and_counted(
    settings: Callable[..., Setting], caplog: pytest.LogCaptureFixture
) -> None:
    """Each failed copy put a traceback into the log, and no counter showed that nothing was ever stored."""
    setting = settings(payload=fail, copy_in=fail)
    setting.store.may_read.set()
    setting.submit(num_stores=20, num_loads=20, load_number=1)
    setting.wait_for_end(1)
    wait_until(lambda: setting.board.num_stored[0] == 20)
    setting.worker.close()  # a reading thread may still be about to log what it has counted
    num_failures = setting.worker.stats()["num_disk_failures"]
    assert num_failures is not None and num_failures > 20, "each store, and the first loads"
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None
    assert "leave out kv_disk_path" in caplog.text and "num_disk_failures" in caplog.text


@pytest.mark.slow
def test_closing_releases_the_pool_although_the_disk_hangs(
    settings: Callable[..., Setting], caplog: pytest.LogCaptureFixture
) -> None:
    setting = settings()
    setting.submit(num_loads=1, load_number=1)
    wait_until(lambda: setting.store.reads)
    setting.worker.close(timeout_s=0.01)
    assert setting.pool.is_closed and "the disk does not answer" in caplog.text


def test_abandoned_worker_ends_its_threads_and_releases_the_pool(settings: Callable[..., Setting]) -> None:
    setting = settings()
    setting.worker.abandon()
    assert setting.pool.is_closed
    for thread in setting.worker._threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
