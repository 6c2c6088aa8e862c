"""DiskWorker: one rank's threads that move extents between the memory of the KV cache and files.

Legend: L layers, N blocks, P tokens per block, G tokens per extent, K kv heads, D head dim.

The payload of an extent is either K in all layers followed by V in all layers, [2, L, G, K, D], or a state of a
sequence: the stored parts of a snapshot, one after another (CompanionMemory.stored_parts). Each reading thread has a
separate buffer for one payload. A reading thread reads a file into its buffer, and copies the payload to its place only
after the whole file has been read and checked. So a disk that hangs blocks buffers, but no KV block: a load that is
given up ends at once, and its blocks can be reused. Extents are written directly from a cache in CPU memory, and
through a buffer from a cache on the GPU. Buffers are pinned if the cache is on a GPU. States are always in CPU memory.

Between a buffer and the GPU, each layer is a separate copy of contiguous bytes. The driver refuses a single copy of all
layers (copy_rows in device/cuda.py) for a cache in torch's expandable segments.

The engine's thread only puts work into queues. A thread that takes work from a queue waits, on the host, until all
device work that was enqueued before the submission is done. So the thread reads completed blocks, and overwrites no
block in use:
  E13  written -> stored on disk         compute, d2h -> host   the events that come with each submission
  E14  last used -> loaded from disk     compute, d2h -> host   the same
A block may be given to another sequence while the block is being written to a file. After reading the block, the thread
then finds that its version has changed, and drops the extent. Prompts can match loaded blocks only after rank 0 has
processed the load. Both edges and the versions also protect snapshots, which the compute stream writes and reads.

The threads refer to the DiskWorker and its KVPool, but not to the engine. An engine that is dropped without `close`
calls `abandon`, which ends the threads and releases the pool.

`weights_identity` computes the part of the fingerprint that identifies the weights.
"""

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
import xxhash

from nanovllm.capabilities.disk.disk_moves import (
    DISK_GRAIN_TOKENS,
    NUM_READERS,
    DiskMoves,
    Extent,
    document_disk_bytes,
    prefix_key,
)
from nanovllm.capabilities.disk.store import REFRESH_S, DiskStore
from nanovllm.capabilities.disk.tier import DiskBoard
from nanovllm.device.devices import current_device
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.offload.streams import Event, Stream, Streams
from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.runner.seams import RankStore

CLOSE_S = 5.0  # time limit for `close` to write the remaining extents
MEASURE_S = 1.0  # time limit for measuring the disk
POLL_S = 0.5e-3  # interval at which a thread checks whether the device is done
CANCEL_POLL_S = 5e-3  # interval at which a running load checks whether it is cancelled
WRITER_NICENESS = 15
MAX_STORES = 8192  # most extents that wait to be written; further extents are dropped
_HASHED_WORDS = 2**22  # words of 4 bytes that are folded into one number when weights on the GPU are hashed

logger = logging.getLogger("nanovllm")


class KVPool:
    """The places of extents, which are a rank's caches of all blocks, [L, N, P, K, D], in CPU memory or on the GPU, and
    the snapshots of states. Also owns the buffers between files and places.
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
        """needs_buffers: True to write extents through a buffer, or None to do so if the caches are on a GPU.
        snapshots: the parts of all snapshots, in CPU memory, or () if sequences have no states. device: the rank's
        device, or None for the device of the caches.
        """
        self._snapshots, self._num_blocks = tuple(snapshots), k_LNPKD.shape[1]
        self.state_bytes = sum(part[0].nbytes for part in snapshots)
        self._caches: tuple[torch.Tensor, ...] = k_LNPKD, v_LNPKD
        self._streams, self._device = streams, device or k_LNPKD.device
        self._shape = (2, spec.num_layers, DISK_GRAIN_TOKENS, spec.num_kv_heads, spec.head_dim)
        self._dtype = k_LNPKD.dtype
        self.extent_bytes = DISK_GRAIN_TOKENS * spec.block_bytes // spec.block_size
        self.needs_buffers = k_LNPKD.is_cuda if needs_buffers is None else needs_buffers
        pinned_for = self._device if k_LNPKD.is_cuda else None
        num_buffers, size = NUM_READERS + self.needs_buffers, max(self.extent_bytes, self.state_bytes)
        self._buffers = [HostBuffer(size, pinned_for) for _ in range(num_buffers)]
        self.buffer_bytes = num_buffers * size
        self._unused = deque(buffer.tensor for buffer in self._buffers)
        self._of_thread = threading.local()

    def fence(self) -> list[Event]:
        """Return events that are over once all work enqueued so far is done. Called by the engine's thread."""
        events = []
        for stream in (self._streams.compute, self._streams.d2h):
            events.append(self._streams.event())
            stream.record(events[-1])
        return events

    def is_over(self, fence: Iterable[Event]) -> bool:
        """Return True if all events are over.

        The call makes the rank's GPU current: in a new thread, another GPU may be current, and would lose memory.
        """
        with current_device(self._device):
            return all(self._streams.is_done(event) for event in fence)

    def num_bytes(self, extent: Extent) -> int:
        """Return the size of an extent's payload."""
        return self.state_bytes if extent.is_state else self.extent_bytes

    @property
    def least_bytes(self) -> int:
        """Return the size of the smallest set of files that a prompt can use."""
        return document_disk_bytes(DISK_GRAIN_TOKENS + 1, self.extent_bytes // DISK_GRAIN_TOKENS, self.state_bytes)

    def buffer(self, extent: Extent) -> list[memoryview]:
        """Return this thread's buffer, as the target of a read."""
        return [_bytes_of(self._buffer(extent))]

    def copy_in(self, extent: Extent) -> None:
        """Copy the payload in this thread's buffer to its place."""
        buffer, parts = self._buffer(extent), self._parts(extent)
        sizes = accumulate((part.nbytes for part in parts), initial=0)
        sources = [buffer[start:end] for start, end in pairwise(sizes)]
        if parts[0].is_cuda:
            pairs = zip(parts, (source.view(self._dtype).view(self._shape[2:]) for source in sources), strict=True)
            self._copy(self._streams.h2d, list(pairs))
        else:
            for part, source in zip(parts, sources, strict=True):  # ctypes lets other threads run meanwhile
                ctypes.memmove(part.data_ptr(), source.data_ptr(), source.nbytes)

    def payload(self, extent: Extent) -> list[memoryview]:
        """Return the memory to write a file from: the extent's place, or this thread's buffer after a copy to it."""
        parts = self._parts(extent)
        if self.needs_buffers and not extent.is_state:
            layers = self._buffer(extent).view(self._dtype).view(self._shape).flatten(0, 1)
            self._copy(self._streams.d2h, list(zip(layers, parts, strict=True)))
            parts = list(layers)
        return [_bytes_of(part) for part in parts]

    def _parts(self, extent: Extent) -> list[torch.Tensor]:
        """Return the contiguous parts of an extent's place: [G, K, D] for K in each layer, then for V.

        The parts of a state are the convolution's inputs and the matrices. Raises RuntimeError after `close`.
        """
        if self.is_closed:
            raise RuntimeError("the KV cache is closed")
        if extent.is_state:
            return [part[extent.place - self._num_blocks] for part in self._snapshots]
        end = extent.start + DISK_GRAIN_TOKENS
        return [layer for cache in self._caches for layer in cache[:, extent.place, extent.start : end].unbind(0)]

    def _copy(self, stream: Stream, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (target, source) pairs between a buffer and the cache, and wait until the copies are complete."""
        with current_device(self._device), torch.inference_mode():
            stream.copy_all(pairs)
            done = self._streams.event()
            stream.record(done)
            while not self._streams.is_done(done):
                time.sleep(POLL_S)

    def _buffer(self, extent: Extent) -> torch.Tensor:
        """Return this thread's buffer for an extent: uint8 [num_bytes(extent)]."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = self._unused.popleft()
        buffer: torch.Tensor = self._of_thread.buffer
        return buffer[: self.num_bytes(extent)]

    @property
    def is_closed(self) -> bool:
        return not self._caches

    def close(self) -> None:
        """Release the buffers and the caches. A closed engine must not keep its caches alive."""
        self._caches = self._snapshots = ()
        self._unused.clear()
        for buffer in self._buffers:
            buffer.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(slots=True)
class _ExtentLoad:
    """The load that the reading threads work on. The worker's condition guards it."""

    extents: Seq[Extent]
    number: int
    num_copied: int = 0
    missing: int = -1  # index of an extent that cannot be loaded, which makes the whole load useless, or -1
    is_given_up: bool = False  # if True, no further extent is copied to its place


class DiskWorker(RankStore):
    """Executes stores in order and loads in order, both concurrently. Any number of submissions may be queued."""

    def __init__(
        self, store: DiskStore, pool: KVPool, board: DiskBoard, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: decides when to look for files of other processes."""
        self.store, self._pool, self._board, self._rank = store, pool, board, rank
        self._clock = clock
        self._changed = threading.Condition()  # guards the queues, the running load and the counters
        self._stores: deque[tuple[Seq[Extent], list[Event]]] = deque()  # extents, and the events to wait for
        self._loads: deque[tuple[_ExtentLoad, list[Event]]] = deque()
        self._reads: deque[Callable[[], None]] = deque()  # calls for the reading threads, which do not raise
        self._num_copying = 0  # threads that copy to the places of a load
        self._num_to_store = 0
        self._close_at_s: float | None = None  # by time.monotonic, or None while the worker is open
        self._read_s = self._write_s = 0.0
        self.num_stored_bytes = self.num_loaded_bytes = self.num_misses = self.num_dropped = self.num_failures = 0
        # Daemons: a thread that waits for a hung disk must not keep the process from ending
        targets = {"write": self._write, "load": self._run_loads} | {
            f"read-{i}": self._read for i in range(NUM_READERS)
        }
        self._threads = [
            threading.Thread(target=target, name=f"nanovllm-disk-{name}", daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, moves: DiskMoves) -> None:
        """Queue moves. Called by the engine's thread when all planned steps have been launched. Does not wait."""
        fence = self._pool.fence()
        with self._changed:
            stores = moves.stores[: MAX_STORES - self._num_to_store]
            self._count_stored(len(moves.stores) - len(stores), num_dropped=len(moves.stores) - len(stores))
            if stores:
                self._stores.append((stores, fence))
                self._num_to_store += len(stores)
            if moves.loads:
                self._loads.append((_ExtentLoad(moves.loads, moves.load_number), fence))
            self._changed.notify_all()

    def measure(self) -> float:
        """Read some of the known extents with the reading threads, and return the rate in bytes per second.

        Returns 0 if no extent is known, or if no file has been read within MEASURE_S.
        """
        files, num_bytes, begun_s = self.store.sample(4 * NUM_READERS), list[int](), time.perf_counter()

        def read(path: Path) -> None:
            size = _read_file(path)
            with self._changed:
                num_bytes.append(size)
                self._changed.notify_all()

        with self._changed:
            self._reads.extend(partial(read, path) for path in files)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(num_bytes) == len(files), MEASURE_S)
            self._reads.clear()
            return sum(num_bytes) / (time.perf_counter() - begun_s)

    def stats(self) -> dict[str, float | None]:
        return {
            "num_disk_extents": len(self.store),
            "num_disk_bytes": self.store.total_bytes,
            "num_disk_stored_bytes": self.num_stored_bytes,
            "num_disk_loaded_bytes": self.num_loaded_bytes,
            "num_disk_misses": self.num_misses,
            "num_disk_failures": self.num_failures,
            "num_disk_evictions": self.store.num_evicted,
            "num_extents_to_store": self._num_to_store,
            "num_dropped_extents": self.num_dropped,
            "disk_write_byte_per_s": self.num_stored_bytes / self._write_s if self._write_s else None,
            "disk_read_byte_per_s": self.num_loaded_bytes / self._read_s if self._read_s else None,
            "disk_buffer_bytes": self._pool.buffer_bytes,
        }

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the queued extents for at most `timeout_s`, end the threads and release the pool."""
        self._end_at(time.monotonic() + timeout_s)
        deadline_s = time.monotonic() + timeout_s + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._num_to_store:
            logger.warning("KV on disk: closed before %d extents were written", self._num_to_store)
        self._pool.close()
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("KV on disk: the disk does not answer")
            return
        self.store.close()

    def abandon(self) -> None:
        """Tell the threads to end, without waiting for them, and release the pool.

        Called if an engine is dropped without `close`. Extents that have not been written are lost.
        """
        self._end_at(0.0)
        self._pool.close()

    def _end_at(self, close_at_s: float) -> None:
        with self._changed:
            self._close_at_s = close_at_s
            self._loads.clear()
            self._changed.notify_all()

    def _wait_for(self, fence: list[Event]) -> None:
        while not self._pool.is_over(fence):
            time.sleep(POLL_S)

    def _count_failure(self, action: str, extent: Extent) -> None:
        """Count the exception being handled, which neither the disk nor a file has caused. Log only the first such
        exception, because every extent may fail in the same way. The engine continues without the extent.
        """
        if self._pool.is_closed:
            return  # the engine was dropped meanwhile
        with self._changed:
            self.num_failures += 1
            is_first = self.num_failures == 1
        if is_first:
            logger.exception(
                "KV on disk: %s could not be %s; its tokens are computed when they are needed. This is a bug: please "
                "report it with this traceback. Later failures are only counted, as num_disk_failures in stats(). If "
                "that number keeps growing, KV on disk does not work here: leave out kv_disk_path",
                *(extent.key.hex(), action),
            )

    # -- the writing thread --------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Store submitted extents. Every REFRESH_S, even between extents, look for files of other processes."""
        with suppress(OSError):  # on Linux each thread has its own priority; steps have a higher priority than writing
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        refresh_at_s = self._clock() + REFRESH_S

        def refresh_if_due() -> None:
            nonlocal refresh_at_s
            if self._clock() >= refresh_at_s:
                self.store.refresh()
                refresh_at_s = self._clock() + REFRESH_S

        while True:
            with self._changed:
                timeout_s = max(0.0, refresh_at_s - self._clock())
                self._changed.wait_for(lambda: self._stores or self._close_at_s is not None, timeout_s)
                if not self._stores and self._close_at_s is not None:
                    return
                submitted = self._stores.popleft() if self._stores else None
            refresh_if_due()
            if submitted is None:
                continue
            extents, fence = submitted
            self._wait_for(fence)  # E13: written -> stored on disk
            for extent in extents:
                if self._close_at_s is not None and time.monotonic() > self._close_at_s:
                    return
                refresh_if_due()
                is_done = False
                try:
                    is_done = self._store(extent)
                except Exception:  # a bug, which must not stop the engine
                    self._count_failure("stored", extent)
                with self._changed:
                    self._num_to_store -= 1
                    self._count_stored(1, num_dropped=not is_done)

    def _count_stored(self, num_extents: int, *, num_dropped: int) -> None:
        """Count extents that no longer wait to be written, because they are on disk or dropped."""
        self.num_dropped += num_dropped
        self._board.num_stored[self._rank] += num_extents

    def _store(self, extent: Extent) -> bool:
        """Write an extent that is not on disk. Returns False if the extent is dropped."""

        def is_valid() -> bool:
            return bool(self._board.versions[extent.place] == extent.version)

        if extent.key in self.store:
            self.store.touch(extent)
            return True
        begun_s = time.perf_counter()
        # A state is useless without its prefix, whose last extent may not have been stored for lack of room
        is_useful = not extent.is_state or prefix_key(extent.key) in self.store
        if not is_useful or not is_valid() or self.store.is_paused:
            return False
        if not self.store.write(extent, self._pool.payload(extent), is_valid):
            return False
        self.num_stored_bytes += self._pool.num_bytes(extent)
        self._write_s += time.perf_counter() - begun_s
        return True

    # -- the thread that runs loads ------------------------------------------------------------------------------

    def _run_loads(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._close_at_s is not None)
                if not self._loads:
                    return
                load, fence = self._loads.popleft()
            self._wait_for(fence)  # E14: last used -> loaded from disk
            begun_s = time.perf_counter()
            self._load(load)
            self._read_s += time.perf_counter() - begun_s
            self._board.ended_load[self._rank] = load.number

    def _load(self, load: _ExtentLoad) -> None:
        """Let the reading threads load all extents. Give up if an extent is missing, or if the load is cancelled.

        After this method returns, nothing is copied to the places of the load. Files that are still being read then
        stay in the buffers of the reading threads.
        """
        board, rank = self._board, self._rank
        board.num_loaded[rank], board.missing[rank] = 0, -1
        with self._changed:
            self._reads.extend(partial(self._read_extent, load, i) for i in range(len(load.extents)))
            self._changed.notify_all()
            while load.num_copied < len(load.extents) and not load.is_given_up:
                self._changed.wait(CANCEL_POLL_S)
                is_cancelled = self._close_at_s is not None or board.cancelled_load[0] >= load.number
                load.is_given_up = is_cancelled or load.missing >= 0
                board.num_loaded[rank], board.missing[rank] = load.num_copied, load.missing
            self._reads.clear()
            self._changed.wait_for(lambda: not self._num_copying)

    # -- the threads that read -----------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reads or self._close_at_s is not None)
                if self._close_at_s is not None:
                    return
                read = self._reads.popleft()
            read()
            del read  # releases the load, which `read` refers to

    def _read_extent(self, load: _ExtentLoad, extent_idx: int) -> None:
        extent, was_read, was_copied = load.extents[extent_idx], False, False
        try:
            was_read = self.store.read(extent, self._pool.buffer(extent))
            was_copied = was_read and self._copy_in(load, extent)
        except Exception:  # a bug, which must not stop the engine
            self._count_failure("loaded", extent)
        with self._changed:
            self.num_misses += not was_read
            if was_copied:
                load.num_copied += 1
                self.num_loaded_bytes += self._pool.num_bytes(extent)
            elif not load.is_given_up:
                load.missing = extent_idx
            self._changed.notify_all()

    def _copy_in(self, load: _ExtentLoad, extent: Extent) -> bool:
        """Copy this thread's buffer to the extent's place, unless the load was given up. Returns True if copied."""
        with self._changed:
            if load.is_given_up:
                return False
            self._num_copying += 1
        try:
            self._pool.copy_in(extent)
            return True
        finally:
            with self._changed:
                self._num_copying -= 1
                self._changed.notify_all()


def _read_file(path: Path) -> int:
    """Read a file. Returns the number of bytes that could be read."""
    piece, num_bytes = bytearray(2**20), 0
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        while size := file.readinto(piece):
            num_bytes += size
    return num_bytes


# -- the identity of the weights -------------------------------------------------------------------------------------


def weights_identity(model: torch.nn.Module) -> str:
    """Return a hash of a rank's parameters and packed weights, as stored on the device. Reads every weight once."""
    state = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        state.update(_bytes_of(_folded(data) if data.is_cuda else data))
    digest: str = state.hexdigest()
    return digest


def _folded(data: torch.Tensor) -> torch.Tensor:
    """Fold bytes into one number per part: a sum of the part's words modulo 2^64, each times a different odd factor.

    The device computes the sums in less time than a step. Different parts have equal sums with a probability of 2^-64.
    """
    words = (F.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data).view(torch.int32)
    generator = torch.Generator(data.device).manual_seed(0)
    factors = torch.empty(_HASHED_WORDS, dtype=torch.int64, device=data.device).random_(generator=generator) | 1
    sums = [(part * factors[: len(part)]).sum() for part in words.split(_HASHED_WORDS)]
    return torch.stack(sums).cpu() if sums else torch.zeros(0)
