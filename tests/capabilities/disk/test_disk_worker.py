"""DiskWorker: its threads with a store and a pool that do as they are told, and a clock of the test's own."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.capabilities.disk.disk_moves import DiskMoves, Extent
from nanovllm.capabilities.disk.store import REFRESH_S
from nanovllm.capabilities.disk.tier import DiskBoard
from nanovllm.capabilities.disk.worker import DiskWorker


class NotedStore:
    """Notes calls. A write takes `write_s` of the clock. Reads wait for `may_read`."""

    is_paused, total_bytes, num_evicted = False, 0, 0

    def __init__(self, sample: list[Path], write_s: float = 0.0) -> None:
        self.now_s, self.calls = 0.0, list[str]()
        self.may_read = threading.Event()
        self._sample, self._write_s = sample, write_s

    def __contains__(self, key: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def sample(self, num_extents: int) -> list[Path]:
        return self._sample

    def read(self, *args: object) -> bool:
        self.may_read.wait()
        self.calls.append("read")
        return True

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

    def __init__(self, payload: Callable[..., Any], copy_in: Callable[..., Any], **options: Any) -> None:
        self.board = DiskBoard(1, 4)
        self.store = NotedStore(**options)
        self.pool = SimpleNamespace(
            fence=list,
            is_over=lambda fence: True,
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

    def submit(self, number: int, num_stores: int = 0, num_loads: int = 0) -> None:
        """A load has the number of its moves."""
        extents = [Extent(bytes([i, 0]), b"", b"", 0.0, block_id=0, start=0, version=0) for i in range(64)]
        self.worker.submit(DiskMoves(number, extents[:num_stores], extents[:num_loads], number))


def nothing(*args: object) -> None:
    pass


def fail(*args: object) -> None:
    raise RuntimeError("the driver refuses the copy")


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition. The time limit of the test ends a wait that would last for ever."""
    while not condition():
        time.sleep(0.001)


@pytest.fixture
def settings() -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(
        payload: Any = nothing, copy_in: Any = nothing, sample: list[Path] | None = None, **options: Any
    ) -> Setting:
        made.append(Setting(payload, copy_in, sample=sample or [], **options))
        return made[-1]

    yield make
    for setting in made:
        setting.store.may_read.set()
        setting.worker.close()
        setting.board.close()


@pytest.mark.parametrize("num_submissions", [1, 32])
def test_worker_that_is_never_idle_looks_for_files_of_others(
    settings: Callable[..., Setting], num_submissions: int
) -> None:
    """It did so only after two seconds without work, and a busy engine never saw what others wrote or removed."""
    setting = settings(write_s=REFRESH_S / 4)
    for i in range(num_submissions):
        setting.submit(i + 1, num_stores=32 // num_submissions)
    until(lambda: setting.store.calls.count("written") == 32 and setting.store.calls.count("refreshed") == 8)
    times = [i for i, call in enumerate(setting.store.calls) if call == "refreshed"]
    assert times == [4, 9, 14, 19, 24, 29, 34, 39], "after every four writes"


def test_load_that_is_cancelled_ends_while_the_disk_hangs(settings: Callable[..., Setting]) -> None:
    """Its blocks were held until the disk answered. What is read then must not get into them."""
    copied: list[Extent] = []
    setting = settings(copy_in=copied.append)
    setting.submit(1, num_loads=9)
    until(lambda: setting.worker._num_reading == 4)
    assert not setting.board.progress(1).has_ended
    setting.board.cancel(1)
    until(lambda: setting.board.progress(1).has_ended)
    assert setting.board.is_stuck and not setting.store.calls
    setting.store.may_read.set()
    until(lambda: not setting.board.is_stuck)
    assert setting.store.calls == ["read"] * 4 and not copied
    setting.submit(2, num_loads=9)
    until(lambda: setting.board.progress(2).has_ended)
    assert setting.board.progress(2).num_loaded == len(copied) == 9 and not setting.board.is_stuck


def test_cancelled_load_ends_after_the_copies_that_have_begun(settings: Callable[..., Setting]) -> None:
    may_copy, has_begun = threading.Event(), threading.Event()

    def copy(*args: object) -> None:
        has_begun.set()
        may_copy.wait()

    setting = settings(copy_in=copy)
    setting.store.may_read.set()
    setting.submit(1, num_loads=9)
    has_begun.wait()
    setting.board.cancel(1)
    time.sleep(0.02)
    assert not setting.board.progress(1).has_ended
    may_copy.set()
    until(lambda: setting.board.progress(1).has_ended)


def test_disk_that_hangs_from_the_start_holds_no_load(settings: Callable[..., Setting], tmp_path: Path) -> None:
    """The measurement at the start read a file and never returned, and no load began or ended after that."""
    pipes = [tmp_path / str(i) for i in range(4)]
    for pipe in pipes:
        os.mkfifo(pipe)  # opening it waits for a writer
    setting = settings(sample=pipes)
    until(lambda: setting.worker._num_reading == len(pipes))
    setting.submit(1, num_loads=3)
    setting.board.cancel(1)
    until(lambda: setting.board.progress(1).has_ended)
    assert setting.board.is_stuck
    for pipe in pipes:
        os.close(os.open(pipe, os.O_WRONLY))
    until(lambda: not setting.board.is_stuck)


def test_copies_that_always_fail_are_logged_once_and_counted(
    settings: Callable[..., Setting], caplog: pytest.LogCaptureFixture
) -> None:
    """Each failed copy put a traceback into the log, and no counter showed that nothing was ever stored."""
    setting = settings(payload=fail, copy_in=fail)
    setting.store.may_read.set()
    setting.submit(1, num_stores=20, num_loads=20)
    until(lambda: setting.board.progress(1).has_ended and not setting.board.num_pending(1))
    num_failures = setting.worker.stats()["num_disk_failures"]
    assert num_failures is not None and num_failures > 20, "each store, and the first loads"
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None
    assert "leave out kv_disk_path" in caplog.text and "num_disk_failures" in caplog.text


@pytest.mark.slow
def test_closing_releases_the_pool_although_the_disk_hangs(
    settings: Callable[..., Setting], caplog: pytest.LogCaptureFixture
) -> None:
    setting = settings()
    setting.submit(1, num_loads=1)
    until(lambda: setting.worker._num_reading)
    setting.worker.close(timeout_s=0.01)
    assert setting.pool.is_closed and "the disk does not answer" in caplog.text


def test_abandoned_worker_ends_its_threads_and_releases_the_pool(settings: Callable[..., Setting]) -> None:
    setting = settings()
    setting.worker.abandon()
    assert setting.pool.is_closed
    for thread in setting.worker._threads:
        thread.join(30)
        assert not thread.is_alive()
