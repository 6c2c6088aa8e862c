"""DiskWorker: one rank's threads that move extents between the memory of the KV cache and files.

Legend: L layers, N blocks, P tokens per block, G tokens per extent, K kv heads, D head dim.

A payload is the extent's K in all layers, then its V: [2, L, G, K, D]. Where the cache lies in CPU memory, files are
read into it and written from it directly, without a buffer. Where it lies on the GPU, an extent goes through a pinned
buffer, one for each thread. States of recurrent layers are read into snapshots and written from them, which are always
in CPU memory: the inputs of the convolution, then the matrices.

The engine's thread only puts work into queues. A thread that takes some waits, on the host, until the work that was
enqueued on the device before it is done, so it sees what that work has written, and overwrites nothing that it uses:
  E13  written -> stored on disk         compute, d2h -> host   the event that comes with each submission
  E14  last used -> loaded from disk     compute, d2h -> host   the same
A block may be given to another sequence while it is being written to a file. Then its version has changed by the time
it has been read, and the extent is dropped. What is loaded counts only when rank 0 has been told. Both edges and the
versions serve snapshots, too, which the compute stream writes and reads.

`weights_identity` makes the part of the fingerprint that says which weights these are.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import xxhash

from nanovllm.core.disk_moves import (
    DISK_GRAIN_TOKENS,
    NUM_READERS,
    DiskMoves,
    DiskSetup,
    Extent,
    document_disk_bytes,
    prefix_key,
)
from nanovllm.core.kv_spec import KVCacheSpec
from nanovllm.device.devices import current_device
from nanovllm.kvcache.disk.store import REFRESH_S, DiskStore
from nanovllm.kvcache.disk.tier import DiskBoard
from nanovllm.kvcache.transfer.pinned_memory import HostBuffer
from nanovllm.kvcache.transfer.streams import Event, Stream, Streams

CLOSE_S = 5.0  # time that `close` gives extents that are still to be written
POLL_S = 0.5e-3
WRITER_NICENESS = 15
MAX_STORES = 8192  # extents that wait to be written; more are dropped
_HASHED_WORDS = 2**22  # words of 4 bytes that are folded into one number, for weights on the GPU

logger = logging.getLogger("nanovllm")


class KVPool:
    """The places of extents: the caches [L, N, P, K, D] of a rank that hold all blocks, in CPU memory or on the GPU,
    and the snapshots of states.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        k_LNPKD: torch.Tensor,
        v_LNPKD: torch.Tensor,
        streams: Streams,
        needs_buffers: bool | None = None,
        snapshots: Seq[torch.Tensor] = (),
        device: torch.device | None = None,
    ) -> None:
        """`needs_buffers`: by default, if the caches are on a GPU. `snapshots`: the parts of all snapshots, in CPU
        memory; none if no layer is recurrent. `device`: the rank's own; by default, where the caches are.
        """
        self._snapshots, self._num_blocks = tuple(snapshots), k_LNPKD.shape[1]
        self.state_bytes = sum(part[0].nbytes for part in snapshots)
        self._caches: tuple[torch.Tensor, ...] = k_LNPKD, v_LNPKD
        self._streams, self._device = streams, device or k_LNPKD.device
        self._shape = (2, spec.num_layers, DISK_GRAIN_TOKENS, spec.num_kv_heads, spec.head_dim)
        self.extent_bytes = DISK_GRAIN_TOKENS * spec.block_bytes // spec.block_size
        self.needs_buffers = k_LNPKD.is_cuda if needs_buffers is None else needs_buffers
        pinned_for = self._device if self._device.type == "cuda" else None
        num_buffers = 1 + NUM_READERS if self.needs_buffers else 0
        self._buffers = [HostBuffer(self.extent_bytes, pinned_for) for _ in range(num_buffers)]
        self.buffer_bytes = num_buffers * self.extent_bytes
        self._unused = deque(buffer.tensor.view(k_LNPKD.dtype).view(self._shape) for buffer in self._buffers)
        self._of_thread = threading.local()

    def fence(self) -> list[Event]:
        """Events that stand for all that the device was given so far. Called by the engine's thread."""
        events = []
        for stream in (self._streams.compute, self._streams.d2h):
            events.append(self._streams.event())
            stream.record(events[-1])
        return events

    def is_over(self, fence: Iterable[Event]) -> bool:
        """On the rank's own GPU: in a new thread another one may be current, where a call would take memory."""
        with current_device(self._device):
            return all(self._streams.is_done(event) for event in fence)

    def _parts(self, extent: Extent) -> Iterator[torch.Tensor]:
        """The extent in K and in V, each [L, G, K, D]."""
        for cache in self._caches:
            yield cache[:, extent.block_id, extent.start : extent.start + DISK_GRAIN_TOKENS]

    def num_bytes(self, extent: Extent) -> int:
        """Size of an extent's payload."""
        return self.state_bytes if extent.is_state else self.extent_bytes

    @property
    def least_bytes(self) -> int:
        """Size of the files without which nothing can be reused."""
        return document_disk_bytes(DISK_GRAIN_TOKENS + 1, self.extent_bytes // DISK_GRAIN_TOKENS, self.state_bytes)

    def payload(self, extent: Extent) -> list[memoryview]:
        """The memory that a file is read into or written from: the extent's own, or this thread's buffer."""
        if extent.is_state:
            return [_bytes_of(part[extent.block_id - self._num_blocks]) for part in self._snapshots]
        parts = self._buffer() if self.needs_buffers else self._parts(extent)
        return [_bytes_of(layer) for part in parts for layer in part]

    def copy_out(self, extent: Extent) -> None:
        """Fill this thread's buffer from the GPU. Does nothing for what is in CPU memory."""
        if self.needs_buffers and not extent.is_state:
            self._copy(self._streams.d2h, self._buffer(), self._parts(extent))

    def copy_in(self, extent: Extent) -> None:
        """Copy this thread's buffer to the GPU. Does nothing for what is in CPU memory."""
        if self.needs_buffers and not extent.is_state:
            self._copy(self._streams.h2d, self._parts(extent), self._buffer())

    def _copy(self, stream: Stream, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        with current_device(self._device), torch.inference_mode():
            for target, source in zip(targets, sources, strict=True):
                stream.copy_rows(target, source)
            done = self._streams.event()
            stream.record(done)
            while not self._streams.is_done(done):
                time.sleep(POLL_S)

    def _buffer(self) -> torch.Tensor:
        """Return this thread's buffer, [2, L, G, K, D]."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = self._unused.popleft()
        buffer: torch.Tensor = self._of_thread.buffer
        return buffer

    def close(self) -> None:
        """Release the buffers and let go of the caches, which an engine that is closed must not keep."""
        self._caches = self._snapshots = ()
        for buffer in self._buffers:
            buffer.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _Submitted(NamedTuple):
    extents: tuple[Extent, ...]
    fence: list[Event]
    load_number: int = 0


class DiskWorker:
    """Any number of submissions may be open. They are worked on in order, stores and loads apart."""

    def __init__(self, store: DiskStore, pool: KVPool, board: DiskBoard, rank: int) -> None:
        self.store, self._pool, self._board, self._rank = store, pool, board, rank
        self._changed = threading.Condition()  # guards the queues
        self._stores: deque[_Submitted] = deque()
        self._loads: deque[_Submitted] = deque()
        self._num_to_store = 0
        self._close_at_s: float | None = None  # by time.monotonic; None: not yet
        self._byte_per_s = 0.0  # rate of reading
        self._write_s = 0.0
        self.num_stored_bytes = self.num_loaded_bytes = self.num_misses = self.num_dropped = 0
        self._readers = ThreadPoolExecutor(NUM_READERS, "nanovllm-disk-read")
        sample = store.sample(4 * NUM_READERS)
        self._threads = [
            threading.Thread(target=self._write, name="nanovllm-disk-write", daemon=True),
            threading.Thread(target=self._read, args=(sample,), name="nanovllm-disk-load", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, moves: DiskMoves) -> None:
        """Called by the engine's thread, when all planned steps have been launched. Does not wait."""
        fence = self._pool.fence()
        with self._changed:
            stores = tuple(moves.stores[: MAX_STORES - self._num_to_store])
            self.num_dropped += len(moves.stores) - len(stores)
            if stores:
                self._stores.append(_Submitted(stores, fence))
                self._num_to_store += len(stores)
                self._board.post_pending(self._rank, self._num_to_store)
            self._board.post_moves(self._rank, moves.number)
            if moves.loads:
                self._loads.append(_Submitted(tuple(moves.loads), fence, moves.load_number))
            self._changed.notify_all()

    def stats(self) -> dict[str, float | None]:
        return {
            "num_disk_extents": len(self.store),
            "num_disk_bytes": self.store.total_bytes,
            "num_disk_stored_bytes": self.num_stored_bytes,
            "num_disk_loaded_bytes": self.num_loaded_bytes,
            "num_disk_misses": self.num_misses,
            "num_disk_evictions": self.store.num_evicted,
            "num_extents_to_store": self._num_to_store,
            "num_dropped_extents": self.num_dropped,
            "disk_write_byte_per_s": self.num_stored_bytes / self._write_s if self._write_s else None,
            "disk_buffer_bytes": self._pool.buffer_bytes,
        }

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is still to be written, as far as there is time, and end the threads."""
        with self._changed:
            self._close_at_s = time.monotonic() + timeout_s
            self._loads.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s + 1)
        if self._num_to_store:
            logger.warning("KV on disk: %d extents were not written before the end", self._num_to_store)
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("KV on disk: the disk does not answer")
            return
        self._readers.shutdown()
        self._pool.close()
        self.store.close()

    def _next(self, queue: deque[_Submitted], timeout_s: float | None) -> _Submitted | None:
        """Wait for the next submission. None after the timeout, or if the worker is closing and there is none."""
        with self._changed:
            self._changed.wait_for(lambda: queue or self._close_at_s is not None, timeout_s)
            return queue.popleft() if queue else None

    def _wait_for(self, fence: list[Event]) -> None:
        while not self._pool.is_over(fence):
            time.sleep(POLL_S)

    # -- the writing thread --------------------------------------------------------------------------------------

    def _write(self) -> None:
        with suppress(OSError):  # a thread has a priority of its own on Linux; steps go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        while (submitted := self._next(self._stores, REFRESH_S)) or self._close_at_s is None:
            if submitted is None:
                self.store.refresh()
                continue
            self._wait_for(submitted.fence)  # E13: written -> stored on disk
            for extent in submitted.extents:
                if self._close_at_s is not None and time.monotonic() > self._close_at_s:
                    return
                try:
                    self._store(extent)
                except Exception:  # a bug; the engine must not notice
                    logger.exception("KV on disk: %s could not be stored", extent.key.hex())
                with self._changed:
                    self._num_to_store -= 1
                    self._board.post_pending(self._rank, self._num_to_store)

    def _store(self, extent: Extent) -> None:
        def is_valid() -> bool:
            return bool(self._board.versions[extent.block_id] == extent.version)

        if extent.key in self.store:
            self.store.touch(extent)
            return
        begun_s = time.perf_counter()
        is_stored = False
        is_useful = not extent.is_state or prefix_key(extent.key) in self.store  # it may have found no room
        if is_useful and is_valid() and not self.store.is_paused:
            self._pool.copy_out(extent)
            is_stored = self.store.write(extent, self._pool.payload(extent), is_valid)
        if is_stored:
            self.num_stored_bytes += self._pool.num_bytes(extent)
            self._write_s += time.perf_counter() - begun_s
        else:
            self.num_dropped += 1

    # -- the threads that read -----------------------------------------------------------------------------------

    def _read(self, sample: list[Path]) -> None:
        self._measure(sample)
        while (submitted := self._next(self._loads, None)) is not None:
            self._wait_for(submitted.fence)  # E14: last used -> loaded from disk
            self._load(submitted)
            self._board.post_end(self._rank, submitted.load_number)

    def _measure(self, sample: list[Path]) -> None:
        """Read a few files, if there are any, so that the first load can be compared with computing."""
        begun_s = time.perf_counter()
        num_bytes = sum(self._readers.map(_read_file, sample))
        if num_bytes:
            self._byte_per_s = num_bytes / (time.perf_counter() - begun_s)
            self._board.post_progress(self._rank, 0, 0, self._byte_per_s)

    def _load(self, load: _Submitted) -> None:
        """Read the extents, a few at a time, until one is missing or nobody wants them any more."""
        first_missing = len(load.extents)  # as far as is known

        def read(place: int, extent: Extent) -> bool:
            nonlocal first_missing
            is_wanted = self._close_at_s is None and not self._board.is_cancelled(load.load_number)
            if place < first_missing and is_wanted and self._load_extent(extent):
                return True
            first_missing = min(first_missing, place)
            return False

        begun_s = time.perf_counter()
        self._board.post_progress(self._rank, load.load_number, 0, self._byte_per_s)
        num_loaded = num_bytes = 0
        was_read = self._readers.map(read, range(first_missing), load.extents)
        for extent, is_there in zip(load.extents, was_read, strict=True):
            if not is_there:
                continue  # let all threads end, because the blocks are free then
            self.num_loaded_bytes += self._pool.num_bytes(extent)
            if num_loaded < first_missing:
                num_loaded, num_bytes = num_loaded + 1, num_bytes + self._pool.num_bytes(extent)
                self._byte_per_s = num_bytes / (time.perf_counter() - begun_s)
                self._board.post_progress(self._rank, load.load_number, num_loaded, self._byte_per_s)

    def _load_extent(self, extent: Extent) -> bool:
        try:
            if self.store.read(extent, self._pool.payload(extent)):
                self._pool.copy_in(extent)
                return True
        except Exception:  # a bug; the engine must not notice
            logger.exception("KV on disk: %s could not be loaded", extent.key.hex())
        self.num_misses += 1
        return False


def _read_file(path: Path) -> int:
    """Return the size of a file that can be read, after reading it."""
    piece, num_bytes = bytearray(2**20), 0
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            num_bytes += size
    return num_bytes


def open_worker(
    setup: DiskSetup, pool: KVPool, identity: Mapping[str, object], rank: int, num_ranks: int
) -> DiskWorker:
    """Open the cache and start the threads. `identity`: all that K and V depend on, in words and numbers."""
    board = DiskBoard(num_ranks, setup.num_places, setup.board)
    store = DiskStore(Path(setup.path), setup.limit_bytes, pool.least_bytes, identity, setup.model)
    return DiskWorker(store, pool, board, rank)


# -- which weights ---------------------------------------------------------------------------------------------------


def weights_identity(model: torch.nn.Module) -> str:
    """A hash of a rank's parameters and packed weights, as they are on its device. Reads them once."""
    state = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        state.update(_bytes_of(_folded(data) if data.is_cuda else data))
    digest: str = state.hexdigest()
    return digest


def _folded(data: torch.Tensor) -> torch.Tensor:
    """Bytes as one number for each part of them: a sum modulo 2^64, in which each word has an odd factor of its own.

    Read by the GPU, this takes no longer than a step. Parts that differ have the same sum with a probability of 2^-64.
    """
    words = (F.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data).view(torch.int32)
    generator = torch.Generator(data.device).manual_seed(0)
    factors = torch.empty(_HASHED_WORDS, dtype=torch.int64, device=data.device).random_(generator=generator) | 1
    sums = [(part * factors[: len(part)]).sum() for part in words.split(_HASHED_WORDS)]
    return torch.stack(sums).cpu() if sums else torch.zeros(0)
