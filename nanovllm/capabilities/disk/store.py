"""DiskStore: extents, of KV and of states of sequences, as files, shared by any number of processes.

    PATH/lock                        locked while files are added or removed; contains the number of bytes in use
    PATH/<fingerprint>/model.json    the data that the fingerprint is a hash of
    PATH/<fingerprint>/<key>.kv      an extent: a header, then the payload
    PATH/<fingerprint>/<n>.tmp       an extent that a process is writing; the process holds a lock on the file

The directory is the index. A file gets its final name only after its data is on the disk, and a rename is atomic. So
even if a process is killed at any time, every file with a final name is whole. Opening needs no repair: it only removes
the temporary files of processes that have ended. A process that reads a file while another process removes the file
still gets all of its data.

Every file is checked before it is used. The header repeats the fingerprint, the key, the parent's key and the token
ids, and both header and payload have a checksum (xxhash). If a file differs in any way from what its reader expects,
the file is a miss: it is logged and removed, and its tokens are computed.

The fingerprint is a hash of everything besides the tokens that K and V depend on: the weights, the model's config, the
dtype, the layout, the version of the package, and FORMAT. Each rank has a different fingerprint, because each rank has
different weights.

The limit applies to all files below the path together. A process that needs room removes the files that were used least
recently, regardless of which process wrote them. The time of last use is a file's mtime.
"""

import errno
import fcntl
import json
import logging
import math
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from nanovllm.capabilities.disk.disk_moves import (
    DISK_GRAIN_TOKENS,
    DISK_HEADER_BYTES,
    KEY_BYTES,
    PAUSE_S,
    Extent,
    is_state_key,
)
from nanovllm.errors import ConfigError
from nanovllm.utils.arithmetic import format_bytes

FORMAT = 3  # the files' format, part of the fingerprint
FINGERPRINT_BYTES = 16
REFRESH_S = 2.0  # interval at which to look for files of other processes
EVICTED_SHARE = 0.05  # share of the limit that is freed at once, because eviction has to list all files
_MAGIC = b"NANOVKV\n"
_FIELDS = struct.Struct(f"<8sIQ{FINGERPRINT_BYTES}s{KEY_BYTES}s{KEY_BYTES}s16sI")
_CHECKSUM_BYTES = 8
_TOTAL_BYTES = 8
_FOLDER = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")
_EXTENT = re.compile(r"((?:[0-9a-f]{2})+)\.kv")  # files of any format, so that files of old formats are evicted
_TEMPORARY = re.compile(r"[0-9]+-[0-9]+\.tmp")
_MAX_PARTS = 512  # in one call of preadv or pwritev; Linux allows 1024

logger = logging.getLogger("nanovllm")


class MissError(Exception):
    """An extent cannot be used. The message says why."""


class Header(NamedTuple):
    """The header of an extent's file."""

    payload_bytes: int
    fingerprint: bytes
    key: bytes
    parent: bytes
    checksum: bytes  # xxh3_128 of the payload
    token_ids: bytes  # int64

    def pack(self) -> bytes:
        fields = (_MAGIC, FORMAT, *self[:-1], len(self.token_ids) // 8)
        content = (_FIELDS.pack(*fields) + self.token_ids).ljust(DISK_HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
        return content + xxhash.xxh3_64_digest(content)

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Parse a header. Raises MissError for anything but a whole header."""
        if len(data) != DISK_HEADER_BYTES or not data.startswith(_MAGIC):
            raise MissError("it is not an extent")
        _, version, num_bytes, fingerprint, key, parent, checksum, num_tokens = _FIELDS.unpack_from(data)
        if version != FORMAT:
            raise MissError(f"it has format {version} instead of {FORMAT}")
        if xxhash.xxh3_64_digest(data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:]:
            raise MissError("its header is damaged")
        token_ids = data[_FIELDS.size : _FIELDS.size + 8 * num_tokens]
        return cls(num_bytes, fingerprint, key, parent, checksum, token_ids)


def fingerprint_of(identity: Mapping[str, Any]) -> bytes:
    text = json.dumps([FORMAT, identity], sort_keys=True)
    digest: bytes = xxhash.xxh3_128_digest(text.encode())
    return digest


def _checksum(parts: Seq[memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    digest: bytes = state.digest()
    return digest


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, parts: Seq[memoryview]) -> int:
    """Read or write all parts from the start of the file. Returns the number of transferred bytes.

    call: os.preadv or os.pwritev. Stops early at the end of the file.
    """
    left, position = list(parts), 0
    while left:
        num_bytes = call(fd, left[:_MAX_PARTS], position)
        if not num_bytes:
            break
        position += num_bytes
        while left and num_bytes >= len(left[0]):
            num_bytes -= len(left.pop(0))
        if num_bytes:
            left[0] = left[0][num_bytes:]
    return position


class DiskStore:
    """The extents of one fingerprint below a path, and the limit on the size of all files below the path.

    One thread at a time may write. Any thread may ask whether a key is known, but a known file may turn out to be
    damaged, or to have been removed by another process.
    """

    def __init__(self, path: Path, limit_bytes: int, least_bytes: int, identity: Mapping[str, Any], model: str) -> None:
        """Open the extents of `identity`: JSON data with everything besides the tokens that K and V depend on.

        least_bytes: size of the files of DISK_GRAIN_TOKENS tokens. model: a name for people, not part of the identity.

        Raises ConfigError if the path cannot be used, or if the limit is below `least_bytes`. A read-only path is used
        for reading only.
        """
        self.path, self.limit_bytes = path, limit_bytes
        if limit_bytes < least_bytes:
            raise ConfigError(
                f"kv_disk_gb={limit_bytes / 2**30:g} is too small for {DISK_GRAIN_TOKENS} tokens of this model, which "
                f"take {format_bytes(least_bytes)}; raise kv_disk_gb"
            )
        self.fingerprint = fingerprint_of(identity)
        self.folder = path / self.fingerprint.hex()
        self.num_evicted = 0
        self._known: set[bytes] = set()
        self._cannot_write_until: float = 0.0  # by time.monotonic
        self._listed_mtime_ns = -1  # the folder's mtime when its files were last listed
        self._lock = Lock(path)
        self._read_error_at_s = -math.inf  # by time.monotonic: time at which a read error was last logged
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._make_folder({"model": model, **identity})
        except OSError as error:
            if not path.is_dir():
                raise ConfigError(
                    f"kv_disk_path={str(path)!r} cannot be used ({error.strerror}); give a folder that can be written"
                ) from error
            logger.warning("%s cannot be written (%s); KV is only read from it", path, error.strerror)
            self._cannot_write_until = float("inf")
        self.refresh()

    def _make_folder(self, description: Mapping[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        with self._lock:
            self._lock.total = list_extents(self.path, removes_left_over=True).num_bytes
            about = self.folder / "model.json"
            if not about.is_file():
                written = self.folder / f"{os.getpid()}-{time.time_ns()}.tmp"
                written.write_text(json.dumps(description, indent=1), encoding="utf-8")
                written.rename(about)

    # -- known extents -------------------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def refresh(self) -> None:
        """Look for extents that other processes have written or removed."""
        self._lock.read_total()
        with suppress(OSError):
            mtime_ns = os.stat(self.folder).st_mtime_ns
            if mtime_ns != self._listed_mtime_ns:
                names = os.listdir(self.folder)
                self._known = {bytes.fromhex(match[1]) for name in names if (match := _EXTENT.fullmatch(name))}
                is_settled = time.time() - mtime_ns / 1e9 > REFRESH_S  # a very new mtime may not show a later change
                self._listed_mtime_ns = mtime_ns if is_settled else -1

    @property
    def total_bytes(self) -> int:
        """Return the bytes in use below the path when this process last read them. Does not access the disk, which may
        hang.
        """
        return self._lock.last_total

    def _file(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.kv"

    def sample(self, num_extents: int) -> list[Path]:
        """Return the paths of up to `num_extents` extents."""
        return [self._file(key) for key in islice(self._known, num_extents)]

    def touch(self, extent: Extent) -> None:
        """Record the time at which an extent was used, as the file's mtime."""
        with suppress(OSError):
            os.utime(self._file(extent.key), (extent.used_s, extent.used_s))

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, extent: Extent, payload: Seq[memoryview]) -> bool:
        """Fill `payload` with an extent. Any number of threads may read.

        Returns False, and logs why, if the extent cannot be used. The content of `payload` is then undefined.
        """
        path = self._file(extent.key)
        try:
            with open(path, "rb", buffering=0) as file:
                head = bytearray(DISK_HEADER_BYTES)
                size = len(head) + sum(map(len, payload))
                if (found := os.fstat(file.fileno()).st_size) != size:
                    raise MissError(f"it has {found} bytes instead of {size}")
                os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_SEQUENTIAL)
                if _transfer(os.preadv, file.fileno(), [memoryview(head), *payload]) != size:
                    raise MissError("it was truncated while it was read")
            header = Header.unpack(bytes(head))
            if header.fingerprint != self.fingerprint:
                raise MissError("it belongs to another model")
            if (header.key, header.parent, header.token_ids) != (extent.key, extent.parent, extent.token_ids):
                raise MissError("it belongs to other tokens")
            if header.checksum != _checksum(payload):
                raise MissError("its content is damaged")
        except FileNotFoundError:
            logger.warning("KV on disk: %s has been removed; its tokens are computed", path)
        except MissError as error:
            logger.warning("KV on disk: %s cannot be used: %s; its tokens are computed", path, error)
            remove_file(path, self._lock)
        except OSError as error:
            if time.monotonic() > self._read_error_at_s + PAUSE_S:
                about = f"{path} cannot be read ({error.strerror})"
                logger.warning(
                    "KV on disk: %s; its tokens are computed. For %.0f s, further read errors are not logged",
                    *(about, PAUSE_S),
                )
                self._read_error_at_s = time.monotonic()
        else:
            self.touch(extent)
            return True
        self._known.discard(extent.key)
        return False

    # -- writing -------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Return True if nothing is written now, because the disk was full or failed, or because it is read-only."""
        return time.monotonic() < self._cannot_write_until

    def write(self, extent: Extent, payload: Seq[memoryview], is_valid: Callable[[], bool]) -> bool:
        """Store an extent durably: if `write` returns True, the extent survives even a power failure.

        is_valid: called after the payload has been read; returns False if the payload may have changed meanwhile.

        Returns False, and stores nothing, if the payload is not valid, if only removing more recently used extents
        could make room, or if the disk is full or fails. A failure is logged, and writing pauses.
        """
        if self.is_paused:
            return False
        header = Header(
            payload_bytes=sum(map(len, payload)),
            fingerprint=self.fingerprint,
            key=extent.key,
            parent=extent.parent,
            checksum=_checksum(payload),
            token_ids=extent.token_ids,
        )
        parts = [memoryview(header.pack()), *payload]
        size, path = sum(map(len, parts)), self._file(extent.key)
        try:
            reserved = self._reserve(size, extent.used_s)
            if reserved is None:
                return False
            fd, temporary = reserved
            try:
                if _transfer(os.pwritev, fd, parts) != size:
                    raise OSError(errno.EIO, "the file could not be written to its end")
                if not is_valid():
                    return False
                os.fdatasync(fd)
                with self._lock:
                    if path.exists():  # another process has written the same extent
                        self._lock.total -= size
                    temporary.rename(path)
            finally:
                self._give_back(temporary, size)
                os.close(fd)
            _sync(self.folder)
        except OSError as error:
            self._cannot_write_until = time.monotonic() + PAUSE_S
            about = f"{self.path} cannot be written ({error.strerror})"
            logger.warning("KV on disk: %s; nothing is stored for %.0f s", about, PAUSE_S)
            return False
        self._known.add(extent.key)
        self.touch(extent)
        return True

    def _reserve(self, num_bytes: int, used_s: float) -> tuple[int, Path] | None:
        """Make room, and create a locked temporary file of this size. Returns the file's descriptor and path.

        Returns None if only removing extents that were used after `used_s` could make room.
        """
        path = self.folder / f"{os.getpid()}-{time.time_ns()}.tmp"
        with self._lock:
            total = self._lock.total
            if total + num_bytes > self.limit_bytes:
                total = self._lock.total = self._evict(self.limit_bytes - num_bytes, used_s)
                if total + num_bytes > self.limit_bytes:
                    return None
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, num_bytes)
            except OSError:
                os.close(fd)
                path.unlink()
                raise
            self._lock.total = total + num_bytes
        return fd, path

    def _give_back(self, temporary: Path, num_bytes: int) -> None:
        """Remove the temporary file, which is still locked, unless it has been renamed."""
        with suppress(OSError), self._lock:
            if temporary.exists():
                temporary.unlink()
                self._lock.total -= num_bytes

    def _evict(self, most_bytes: int, used_s: float) -> int:
        """Remove extents that were used before `used_s`, until less than `most_bytes` are in use.

        Returns the bytes in use, which are more if too few extents are that old.
        """
        listing = list_extents(self.path, removes_left_over=True)
        removed = prune(listing, most_bytes - int(EVICTED_SHARE * self.limit_bytes), used_s)
        self.num_evicted += len(removed)
        self._known.difference_update(extent.key for extent in removed if extent.path.parent == self.folder)
        return listing.num_bytes - sum(extent.num_bytes for extent in removed)

    def close(self) -> None:
        self._lock.close()


def _sync(folder: Path) -> None:
    """Make new file names in a folder survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Lock:
    """Excludes other threads and processes while files are added or removed. The lock's file holds the bytes in use.

    If a process is killed after it has added or removed a file and before it has written the new total, the total is
    wrong until a process opens the cache or makes room in it, because both list all files.
    """

    def __init__(self, path: Path) -> None:
        self._file = path / "lock"
        self._threads = threading.Lock()
        self._fd = -1
        self.last_total = 0  # bytes in use when this object last read or wrote the total

    def __enter__(self) -> None:
        """Take the lock. Raises OSError if the path is read-only."""
        self._threads.acquire()
        try:
            if self._fd < 0:
                self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    @property
    def total(self) -> int:
        """The bytes in use. Only for the owner of the lock."""
        self.last_total = int.from_bytes(os.pread(self._fd, _TOTAL_BYTES, 0), "little")
        return self.last_total

    @total.setter
    def total(self, num_bytes: int) -> None:
        self.last_total = max(0, num_bytes)
        os.pwrite(self._fd, self.last_total.to_bytes(_TOTAL_BYTES, "little"), 0)

    def read_total(self) -> int:
        """Return the bytes in use, without taking the lock."""
        try:
            self.last_total = int.from_bytes(self._file.read_bytes()[:_TOTAL_BYTES], "little")
        except OSError:
            self.last_total = 0
        return self.last_total

    def close(self) -> None:
        with self._threads:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


# -- all files below a path ------------------------------------------------------------------------------------------


class StoredExtent(NamedTuple):
    """The path, size and time of use of an extent's file, which has not been opened."""

    path: Path
    num_bytes: int
    used_s: float  # time of last use

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.path.stem)

    @property
    def is_state(self) -> bool:
        return is_state_key(self.key)


class Listing(NamedTuple):
    extents: list[StoredExtent]
    busy_bytes: int = 0  # size of files that are being written

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents) + self.busy_bytes


def list_folders(path: Path) -> list[Path]:
    """Return the folders of all fingerprints. Raises ConfigError if the path is not a folder."""
    try:
        names = sorted(name for name in os.listdir(path) if _FOLDER.fullmatch(name))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} is not a folder with KV ({error.strerror}); give kv_disk_path") from error
    return [folder for name in names if (folder := path / name).is_dir()]


def list_extents(path: Path, folders: Seq[Path] | None = None, *, removes_left_over: bool = False) -> Listing:
    """List the extents below the path, or in some of its folders.

    removes_left_over: remove the temporary files of processes that have ended. The caller must then hold the lock.
    """
    extents, busy_bytes = [], 0
    for folder in list_folders(path) if folders is None else folders:
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):  # removed by another process meanwhile
                if _EXTENT.fullmatch(entry.name):
                    about = entry.stat()
                    extents.append(StoredExtent(Path(entry.path), about.st_size, about.st_mtime))
                elif _TEMPORARY.fullmatch(entry.name) and not (removes_left_over and _remove_left_over(entry.path)):
                    busy_bytes += entry.stat().st_size
    return Listing(extents, busy_bytes)


def _remove_left_over(path: str) -> bool:
    """Remove a temporary file unless its writer is still running. Returns True if the file was removed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def prune(listing: Listing, most_bytes: int, used_s: float = math.inf) -> list[StoredExtent]:
    """Remove the least recently used extents until `most_bytes` are left. Returns the removed extents.

    used_s: do not remove extents that were used at this time or later.
    """
    num_bytes, removed = listing.num_bytes, []
    for extent in sorted(listing.extents, key=lambda extent: extent.used_s):
        if num_bytes <= most_bytes or extent.used_s >= used_s:
            break
        extent.path.unlink(missing_ok=True)
        num_bytes -= extent.num_bytes
        removed.append(extent)
    return removed


def remove_file(path: Path, lock: Lock) -> None:
    """Remove a damaged extent, so that it can be written again. Does nothing if the path is read-only."""
    with suppress(OSError), lock:
        num_bytes = path.stat().st_size
        path.unlink()
        lock.total -= num_bytes


def remove_extents(path: Path, most_bytes: int = 0, folders: Seq[Path] | None = None) -> tuple[int, int]:
    """Remove the least recently used extents in `folders` until `most_bytes` are left there.

    Returns the number of removed files and their size in bytes. Engines may use the cache meanwhile.
    """
    chosen = list_folders(path) if folders is None else folders
    lock = Lock(path)
    with lock:
        removed = prune(list_extents(path, chosen, removes_left_over=True), most_bytes)
        lock.total = list_extents(path).num_bytes
    lock.close()
    return len(removed), sum(extent.num_bytes for extent in removed)


def check_extent(path: Path) -> Header:
    """Return the header of a file. Raises MissError if any byte of the file is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MissError(f"it cannot be read ({error.strerror})") from error
    header, payload = Header.unpack(data[:DISK_HEADER_BYTES]), memoryview(data)[DISK_HEADER_BYTES:]
    if len(payload) != header.payload_bytes:
        raise MissError(f"it holds {len(payload)} bytes instead of {header.payload_bytes}")
    if _checksum([payload]) != header.checksum:
        raise MissError("its content is damaged")
    if (header.fingerprint.hex(), header.key.hex()) != (path.parent.name, path.stem):
        raise MissError("it belongs to another model or to other tokens")
    return header
