"""DiskStore: it returns what was written, or nothing, after kills, with damaged files, and on a full disk."""

import errno
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_engines import damage
from disk_kills import PAYLOAD_BYTES, make_extent, open_store, payload_of

import nanovllm
from nanovllm.capabilities.disk import store as store_module
from nanovllm.capabilities.disk.disk_moves import DISK_HEADER_BYTES, Extent
from nanovllm.capabilities.disk.store import (
    DiskStore,
    MissError,
    check_extent,
    list_extents,
    list_folders,
    remove_extents,
)
from nanovllm.errors import ConfigError

FILE_BYTES = PAYLOAD_BYTES + DISK_HEADER_BYTES


def write(store: DiskStore, extent: Extent) -> bool:
    return store.write(extent, payload_of(extent), lambda: True)


def read(store: DiskStore, extent: Extent) -> bytes | None:
    """The payload; None for a miss."""
    payload = bytearray(PAYLOAD_BYTES)
    is_hit = store.read(extent, [memoryview(payload)[:1], memoryview(payload)[1:]])
    return bytes(payload) if is_hit else None


def content(extent: Extent) -> bytes:
    return b"".join(payload_of(extent))


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return open_store(tmp_path / "kv")


@pytest.fixture
def extent() -> Extent:
    return make_extent(random.Random(0))


def file_of(store: DiskStore, extent: Extent) -> Path:
    return store.folder / f"{extent.key.hex()}.kv"


# -- what is written is read -------------------------------------------------------------------------------------------


def test_extent_survives_its_process(store: DiskStore, extent: Extent) -> None:
    assert write(store, extent)
    assert read(store, extent) == content(extent)
    again = open_store(store.path)
    assert extent.key in again
    assert read(again, extent) == content(extent)
    check_extent(file_of(store, extent))


def test_payload_of_many_parts_is_whole(tmp_path: Path, extent: Extent) -> None:
    """More parts than one call of the system takes, some of them empty."""
    sizes = [i % 7 for i in range(3000)]
    store = DiskStore(tmp_path, 10**9, sum(sizes), {}, "m")
    data = random.Random(0).randbytes(sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [memoryview(data)[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert store.write(extent, parts, lambda: True)
    found = memoryview(bytearray(len(data)))
    found_parts = [found[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert store.read(extent, found_parts)
    assert found == data


def test_payload_that_changed_while_it_was_read_is_not_stored(store: DiskStore, extent: Extent) -> None:
    assert not store.write(extent, payload_of(extent), lambda: False)
    assert extent.key not in store
    assert (list_extents(store.path).num_bytes, store.total_bytes) == (0, 0)
    assert not store.is_paused


def test_models_share_a_path_and_nothing_else(store: DiskStore, extent: Extent) -> None:
    other = DiskStore(store.path, 10**9, PAYLOAD_BYTES, {"weights": "others"}, "a model")
    assert write(store, extent)
    other.refresh()
    assert extent.key not in other
    assert read(other, extent) is None
    assert other.total_bytes == store.total_bytes == FILE_BYTES


# -- nothing in a file is trusted --------------------------------------------------------------------------------------


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return damage


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"bit of byte {i}": flip(i) for i in (0, 8, 12, 16, 24, 40, 60, 80, 96, 100, 2147, 2148, 4000)},
    **{
        f"bit of byte {i}": flip(i) for i in (DISK_HEADER_BYTES - 1, DISK_HEADER_BYTES, FILE_BYTES // 2, FILE_BYTES - 1)
    },
    **{f"cut to {i}": cut(i) for i in (0, 1, 99, DISK_HEADER_BYTES, DISK_HEADER_BYTES + 1, FILE_BYTES - 1)},
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(FILE_BYTES)),
    "vanished": lambda path: path.unlink(),
    "a folder": replace_by_folder,
}


def test_damaged_file_is_a_miss_with_one_line_and_written_again(
    store: DiskStore, extent: Extent, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(store, extent)
    for name, change in DAMAGES.items():
        caplog.clear()
        assert write(store, extent), name
        change(path)
        if path.is_file():
            with pytest.raises(MissError):
                check_extent(path)
        with caplog.at_level(logging.WARNING, "nanovllm"):
            assert read(store, extent) is None, name
        assert len(caplog.records) == 1 and str(path) in caplog.text, name
        assert extent.key not in store, name
        if path.is_dir():  # nothing is written in its place
            path.rmdir()
    assert write(store, extent) and read(store, extent) == content(extent)


def test_file_of_other_tokens_is_a_miss(store: DiskStore, extent: Extent) -> None:
    """Hashes alone would not tell: the file has the right name and is whole."""
    assert write(store, extent)
    for other in (
        extent._replace(token_ids=extent.token_ids[:-1] + b"\1"),
        extent._replace(parent=bytes(len(extent.parent))),
    ):
        assert write(store, extent)
        assert read(store, other) is None


def test_file_of_another_extent_or_model_is_a_miss(store: DiskStore, extent: Extent) -> None:
    second, other = make_extent(random.Random(1)), DiskStore(store.path, 10**9, PAYLOAD_BYTES, {}, "m")
    for owner, foreign in ((store, second), (other, extent)):
        assert write(store, extent) and write(owner, foreign)
        file_of(owner, foreign).rename(file_of(store, extent))
        with pytest.raises(MissError, match="another model or to other tokens"):
            check_extent(file_of(store, extent))
        assert read(store, extent) is None


@pytest.mark.parametrize("num_files", [30, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_damage_is_never_read(store: DiskStore, num_files: int) -> None:
    rng, num_misses = random.Random(num_files), 0
    for _ in range(num_files):
        extent = make_extent(rng)
        assert write(store, extent)
        path = file_of(store, extent)
        for _ in range(rng.choice([1, 1, 3])):
            if path.exists():
                damage(path, rng)
        size = path.stat().st_size if path.exists() else 0
        found = read(store, extent)
        num_misses += found is None
        assert found is None or (found == content(extent) and size == FILE_BYTES)
        path.unlink(missing_ok=True)
    assert num_misses > 0.9 * num_files


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kills", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_killed_writers_lose_nothing_that_was_stored(tmp_path: Path, num_kills: int) -> None:
    script = Path(__file__).parents[2] / "support" / "disk_kills.py"
    package = str(Path(nanovllm.__file__).parents[1])
    command = [sys.executable, str(script), str(tmp_path / "kv"), str(num_kills), "0"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": package}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -- limits, and disks that fail ---------------------------------------------------------------------------------------


def test_limit_evicts_what_was_used_least_recently(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10 * FILE_BYTES, PAYLOAD_BYTES, {}, "m")
    rng = random.Random(0)
    extents = [make_extent(rng)._replace(used_s=1000.0 + i) for i in range(10)]
    assert all(write(store, extent) for extent in extents)
    assert len(store) == 10 and store.num_evicted == 0
    store.touch(extents[0]._replace(used_s=2000.0))
    assert write(store, make_extent(rng))
    kept = [extent.key in store for extent in extents]
    assert kept[0] and not kept[1] and kept[-1]
    assert store.num_evicted == kept.count(False)
    assert store.total_bytes == list_extents(tmp_path).num_bytes <= 10 * FILE_BYTES


def test_limit_holds_for_several_writers(tmp_path: Path) -> None:
    """They write at the same time, to folders of their own and to a common one."""
    limit = 12 * FILE_BYTES
    stores = [DiskStore(tmp_path, limit, PAYLOAD_BYTES, {"model": i // 2}, "m") for i in range(4)]
    most = 0

    def write_some(seed: int) -> None:
        nonlocal most
        rng = random.Random(seed)
        for _ in range(30):
            assert write(stores[seed], make_extent(rng))
            with stores[seed]._lock:
                most = max(most, list_extents(tmp_path).num_bytes)

    threads = [threading.Thread(target=write_some, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < most <= limit
    stores[0].refresh()  # others have written since it looked
    assert stores[0].total_bytes == list_extents(tmp_path).num_bytes


def test_two_writers_of_the_same_extent_keep_one(store: DiskStore, extent: Extent) -> None:
    other = open_store(store.path)
    assert write(store, extent) and write(other, extent)
    assert store.total_bytes == list_extents(store.path).num_bytes == FILE_BYTES


def test_extent_of_another_process_is_found_and_its_eviction_is_a_miss(store: DiskStore, extent: Extent) -> None:
    other = open_store(store.path)
    assert write(other, extent)
    assert extent.key not in store
    store.refresh()
    assert read(store, extent) == content(extent)
    remove_extents(store.path)
    assert read(other, extent) is None


def test_limit_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_disk_gb=.* is too small for 256 tokens of this model.*raise kv_disk_gb"):
        DiskStore(tmp_path, FILE_BYTES - 1, FILE_BYTES, {}, "m")
    with pytest.raises(ConfigError, match=r"kv_disk_path=.* cannot be used \(Not a directory\)"):
        open_store(Path("/dev/null/kv"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_disk_that_cannot_be_written_is_logged_once_and_tried_again_later(
    store: DiskStore, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(0)
    first, second = make_extent(rng), make_extent(rng)
    assert write(store, first)

    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "nanovllm"):
        patched.setattr(os, "pwritev", fail)
        assert not write(store, second)
        assert not write(store, second)
        assert store.is_paused and len(caplog.records) == 1 and os.strerror(code) in caplog.text
        assert read(store, first) == content(first)
    assert store.total_bytes == list_extents(store.path).num_bytes == FILE_BYTES
    now_s += store_module.PAUSE_S + 1
    assert write(store, second)


def test_file_that_cannot_be_read_is_a_miss(
    store: DiskStore, extent: Extent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert write(store, extent)
    monkeypatch.setattr(os, "preadv", fail)
    assert read(store, extent) is None
    assert "Input/output error" in caplog.text


def test_path_without_permission_to_write_is_read_from(
    store: DiskStore, extent: Extent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root may write anywhere, so the system's answer is simulated."""
    assert write(store, extent)
    open_file = os.open

    def open_for_reading(path: str, flags: int, *args: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_file(path, flags, *args)

    monkeypatch.setattr(os, "open", open_for_reading)
    again = open_store(store.path)
    assert "KV is only read from it" in caplog.text
    assert read(again, extent) == content(extent)
    assert not write(again, make_extent(random.Random(1)))
    again.close()


# -- what the command line does ----------------------------------------------------------------------------------------


def test_remove_extents_leaves_what_is_not_ours(store: DiskStore, extent: Extent) -> None:
    others = [store.path / "notes.txt", store.folder / "notes.txt", store.path / "abc" / "x.kv"]
    others[2].parent.mkdir()
    for other in others:
        other.write_text("mine")
    write(store, extent)
    assert len(list_folders(store.path)) == 1
    assert remove_extents(store.path) == (1, FILE_BYTES)
    assert all(other.read_text() == "mine" for other in others)
    store.refresh()
    assert store.total_bytes == 0
    with pytest.raises(ConfigError, match="is not a folder with KV"):
        remove_extents(store.path / "nowhere")


def test_files_of_an_older_format_count_and_can_be_removed(store: DiskStore) -> None:
    """Their names were shorter. Nobody reads them any more, so they must not stay for ever."""
    (store.folder / f"{'ab' * 20}.kv").write_bytes(bytes(100))
    assert list_extents(store.path).num_bytes == 100
    assert remove_extents(store.path) == (1, 100)
