"""OffloadEngine: the KV cache in CPU memory, its slots on the GPU, and every copy between CPU and GPU.

Legend: L layers, N blocks of a cache, P tokens per block, K kv heads, D head dim.

The engine makes the copies that a plan's KVMoves name, one layer at a time, and decides nothing. It has two kinds of
GPU memory:
- Ring slots `[L, N, P, K, D]` hold blocks in all layers. The model writes new tokens to ring slots, and blocks that
  several steps read are loaded into ring slots.
- Staging groups `[N, P, K, D]` hold a few blocks in *one* layer. They are filled, attended to and refilled, layer
  after layer. All layers share the staging groups, so a few groups are enough for copies to run ahead of the compute,
  across layers and into the next step, without evicting a block from a ring slot.

Loads are enqueued in the order in which the model will use them, until the staging groups are full (`_pump`). One copy
transfers a *run* of tokens that are contiguous on both sides. After a step that is a single CUDA graph, one copy to CPU
memory transfers a run in all layers. `begin_step` finds out which copies a step makes and which earlier work each copy
must wait for. After that, the host's work per layer depends only on the number of runs, and not on the number of slots
or blocks.

Stream edges, each commented where the wait is made. Each line says what must be done before what, which stream is
waited for by which stream, and where the engine stores the event or the batch number to wait for:
  E1  loaded -> read or written         h2d -> compute   ring_slot_ready, of this step and layer
  E2  last used -> overwritten by load  compute -> h2d   ring_slot_compute_done
  E3  stored -> copied out              compute -> d2h   ring_slot_compute_done, or this layer's own event
  E4  copied out -> slot written        d2h -> compute   ring_slot_offload_done
  E5  copied out -> slot loaded over    d2h -> h2d       ring_slot_offload_done
  E6  copied out -> CPU block loaded    d2h -> h2d       cpu_block_offload_done
  E7  staged -> attended                h2d -> compute   staging_ready
  E8  attended -> staging refilled      compute -> h2d   staging_compute_done
For E2 to E6 the engine records, for each slot and CPU block, the number of the last batch of work that used it. A step
makes up to three batches: its work on compute, its flushes on d2h, and its offloads on d2h. A stream runs its work in
order. So the copies of a layer wait only for the newest batch among all the slots and blocks that they touch, and once
the host has seen that this batch is done, the copies wait for nothing (StreamLog).
A load of a CPU block and a later write of the same block need no edge. Compute waits for every load of a step within
the step (E1, E7), and a CPU block is only written (E3) from what compute stored in a later step.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.offload.streams import Event, Stream, StreamLog, Streams, WorkTimer
from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.plan.step_plan import KVMoves, SlotLoad, SlotOffload, StreamedGroup

COPY_BYTES = 8 * 2**20  # size of one copy; smaller copies do not reach the link's full rate
TOTAL_BYTES = 2**30  # 20 ms at 54.6 GB/s, which is long compared with the calls that are timed along with it

KV: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer or staging group, each [N * P, K, D]
LayersKV: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # K and V of all layers, each [L, N * P, K, D]
Copy: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # target and source


class Run(NamedTuple):
    """`num_tokens` tokens of each layer that are contiguous in CPU memory and on the GPU, so that one copy suffices.

    In one layer a block of 256 tokens is half a MiB for Qwen3-0.6B. A copy of half a MiB does not reach the link's full
    rate, and enqueuing the copy takes the host about as long as the transfer takes the link. The managers therefore try
    to give contiguous blocks contiguous slots, and the copies are joined once per step.

    `cpu_start` is a token index in the CPU pool, `gpu_start` one in the slot ring or in a staging group.
    """

    cpu_start: int
    gpu_start: int
    num_tokens: int


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join the runs into as few as possible, in the order of CPU memory."""
    joined: list[Run] = []
    cpu_end = gpu_end = -1
    for run in sorted(runs):
        if (run.cpu_start, run.gpu_start) == (cpu_end, gpu_end):
            joined[-1] = joined[-1]._replace(num_tokens=joined[-1].num_tokens + run.num_tokens)
        else:
            joined.append(run)
        cpu_end, gpu_end = run.cpu_start + run.num_tokens, run.gpu_start + run.num_tokens
    return tuple(joined)


def load_runs(loads: Iterable[SlotLoad], block_size: int) -> tuple[Run, ...]:
    return join_runs(
        Run(cpu_block_id * block_size, ring_slot * block_size, num_tokens)
        for cpu_block_id, ring_slot, num_tokens in loads
    )


def offload_runs(offloads: Iterable[SlotOffload], block_size: int) -> tuple[Run, ...]:
    return join_runs(
        Run(cpu_block_id * block_size + start, ring_slot * block_size + start, end - start)
        for ring_slot, cpu_block_id, start, end in offloads
    )


def staging_runs(group: StreamedGroup, block_size: int) -> tuple[Run, ...]:
    """Copy block i of the streamed group to place i of the staging group."""
    num_tokens = group.num_tokens(block_size)
    return join_runs(
        Run(cpu_block_id * block_size, start, min(block_size, num_tokens - start))
        for cpu_block_id, start in zip(group.cpu_block_ids, range(0, num_tokens, block_size), strict=True)
    )


def token_views(k_LNPKD: torch.Tensor, v_LNPKD: torch.Tensor) -> list[KV]:
    """Views of the caches `[L, N, P, K, D]`, one pair per layer, with the tokens of all blocks in a row.

    Make the views once and slice them for each copy: slicing takes a fraction of the time of indexing the whole cache.
    """
    return list(zip(k_LNPKD.flatten(1, 2).unbind(0), v_LNPKD.flatten(1, 2).unbind(0), strict=True))


def run_tensors(runs: tuple[Run, ...], dst: KV, src: KV, *, to_gpu: bool) -> Iterator[Copy]:
    """Yield two copies for each run: K, then V. Hot."""
    for cpu_start, gpu_start, num_tokens in runs:
        dst_start, src_start = (gpu_start, cpu_start) if to_gpu else (cpu_start, gpu_start)
        for dst_cache, src_cache in zip(dst, src, strict=True):
            yield dst_cache[dst_start : dst_start + num_tokens], src_cache[src_start : src_start + num_tokens]


def layer_run_tensors(runs: tuple[Run, ...], cpu: LayersKV, gpu: LayersKV) -> Iterator[Copy]:
    """Yield two copies to CPU memory for each run, of all layers: K, then V. Hot."""
    for cpu_start, gpu_start, num_tokens in runs:
        for cpu_cache, gpu_cache in zip(cpu, gpu, strict=True):
            yield cpu_cache[:, cpu_start : cpu_start + num_tokens], gpu_cache[:, gpu_start : gpu_start + num_tokens]


class _Loads(NamedTuple):
    """Copies to the GPU that a step makes together in each layer, and the batches of work that they wait for."""

    runs: tuple[Run, ...]
    block_offload: int  # the batch on d2h that wrote the CPU blocks
    to_slots: bool  # False: to a staging group
    slot_use: int = 0  # the batch on compute that used the slots
    slot_offload: int = 0  # the batch on d2h that copied the slots out


class OffloadEngine:
    """One rank's KV cache with offload.

    The calls of a step, in order: begin_step; for each layer begin_layer, stored, attended and groups; end_step. In a
    step that a single CUDA graph runs, begin_all_layers and ran_all_layers replace the calls for each layer.
    """

    def __init__(
        self, spec: KVCacheSpec, num_cpu_blocks: int, dtype: torch.dtype, device: torch.device, streams: Streams
    ) -> None:
        """Allocate the CPU pool and the staging groups. `allocate_slots` allocates the slots."""
        self.spec, self.dtype, self.device = spec, dtype, device
        self.streams = streams
        self.timer = WorkTimer(streams, streams.h2d)  # times the copies of streamed groups
        block_shape = (spec.block_size, spec.num_kv_heads, spec.head_dim)
        host_bytes = spec.block_bytes // 2 * num_cpu_blocks
        pinned_for = device if device.type == "cuda" else None
        self._host_buffers = [HostBuffer(host_bytes, pinned_for) for _ in ("k", "v")]
        self.k_cache_cpu, self.v_cache_cpu = (
            buffer.tensor.view(dtype).view(spec.num_layers, num_cpu_blocks, *block_shape)
            for buffer in self._host_buffers
        )
        self._layer_token_bytes = spec.layer_block_bytes // spec.block_size
        self.num_staging_groups = spec.staging.num_groups
        staging_shape = (self.num_staging_groups, spec.staging_group_blocks, *block_shape)
        self.k_staging, self.v_staging = (torch.zeros(staging_shape, dtype=dtype, device=device) for _ in ("k", "v"))
        self._cpu_tokens = token_views(self.k_cache_cpu, self.v_cache_cpu)  # one pair per layer
        self._staging_tokens = token_views(self.k_staging, self.v_staging)  # one pair per group
        self._compute_log, self._d2h_log = StreamLog(spec.num_layers), StreamLog(spec.num_layers)
        self.cpu_block_offload_done = np.zeros(num_cpu_blocks, dtype=np.int64)
        self.ring_slot_ready: list[Event | None] = [None] * spec.num_layers
        self.staging_ready: list[Event | None] = [None] * self.num_staging_groups
        self.staging_compute_done: list[Event | None] = [None] * self.num_staging_groups

        self._moves = KVMoves()
        self._offload_runs: tuple[Run, ...] = ()
        self._taken_offload = 0  # the newest batch that copies out a slot which this step writes to
        self._queue: deque[tuple[int, _Loads]] = deque()  # loads that are not enqueued yet, each with its layer
        self._num_filled = 0  # groups filled since the start; staging groups are filled in turn
        self._num_released = 0  # groups released since the start
        self.link_byte_per_s = measure_link(self.streams, self.k_cache_cpu, self.k_staging)  # None on a CPU

    def allocate_slots(self, num_ring_slots: int) -> None:
        """Allocate the slots and start counting bytes. Call this before the first step, or after `drop_slots`."""
        self.num_ring_slots = num_ring_slots
        self.ring_slots = range(num_ring_slots)
        spec = self.spec
        shape = (spec.num_layers, num_ring_slots, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.k_cache_gpu, self.v_cache_gpu = (
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in ("k", "v")
        )
        self._slot_tokens = token_views(self.k_cache_gpu, self.v_cache_gpu)  # one pair per layer
        self.ring_slot_compute_done, self.ring_slot_offload_done = np.zeros((2, num_ring_slots), dtype=np.int64)
        self.num_loaded_bytes = 0
        self.num_offloaded_bytes = 0

    def drop_slots(self) -> None:
        """Finish all copies and free the slots, so that another number of them can be allocated."""
        self.streams.synchronize()
        del self.k_cache_gpu, self.v_cache_gpu, self._slot_tokens

    # -- one step ------------------------------------------------------------------------------------------------

    def begin_step(self, moves: KVMoves, slots_in_use: Iterable[int]) -> None:
        """Copy out the slots that are evicted, and start the first loads.

        `slots_in_use`: the slots in the block tables of the step.
        """
        assert not self._queue, "the previous step did not use all of its loads"
        for log in (self._compute_log, self._d2h_log):
            log.forget_done(self.streams.is_done)
        self._moves = moves
        self._flush(moves.flushes)
        self._taken_offload = _newest(self.ring_slot_offload_done, moves.taken_slots)
        loads = [self._slot_loads(moves.loads)] if moves.loads else []
        loads += [self._group_loads(group) for group in moves.streamed]
        self._queue.extend((layer, load) for layer in range(self.spec.num_layers) for load in loads)
        # From here on the arrays describe this step, for later steps
        used = np.fromiter(slots_in_use, dtype=np.int64)
        self.ring_slot_compute_done[used] = self._compute_log.next_batch
        self.ring_slot_compute_done[[copy.src_slot for copy in moves.copies]] = self._compute_log.next_batch
        self._offload_runs = offload_runs(moves.offloads, self.spec.block_size)
        self._note_offloads(moves.offloads)
        self._pump()

    def _flush(self, flushes: tuple[SlotOffload, ...]) -> None:
        if not flushes:
            return
        runs = offload_runs(flushes, self.spec.block_size)
        last_use = _newest(self.ring_slot_compute_done, [flush.ring_slot for flush in flushes])
        self._note_offloads(flushes)
        for layer in range(self.spec.num_layers):
            self.offload_slot_layer(runs, layer, self._compute_log.find(last_use, layer))

    def _note_offloads(self, offloads: tuple[SlotOffload, ...]) -> None:
        """Note that the next batch on d2h makes these offloads."""
        batch = self._d2h_log.next_batch
        self.ring_slot_offload_done[[offload.ring_slot for offload in offloads]] = batch
        self.cpu_block_offload_done[[offload.cpu_block_id for offload in offloads]] = batch

    def _slot_loads(self, loads: tuple[SlotLoad, ...]) -> _Loads:
        slots = [load.ring_slot for load in loads]
        return _Loads(
            load_runs(loads, self.spec.block_size),
            _newest(self.cpu_block_offload_done, [load.cpu_block_id for load in loads]),
            to_slots=True,
            slot_use=_newest(self.ring_slot_compute_done, slots),
            slot_offload=_newest(self.ring_slot_offload_done, slots),
        )

    def _group_loads(self, group: StreamedGroup) -> _Loads:
        runs = staging_runs(group, self.spec.block_size)
        return _Loads(runs, _newest(self.cpu_block_offload_done, group.cpu_block_ids), to_slots=False)

    def begin_layer(self, layer: int) -> None:
        """Make compute wait until it may read and write the layer's slots. Hot: once per layer."""
        if self._moves.loads:
            self.wait_slot_layer(layer)
        self._wait(self.streams.compute, self._d2h_log.find(self._taken_offload, layer))  # E4: copied out -> written

    def stored(self, layer: int) -> None:
        """Enqueue the copies that need the layer's new K and V, which are in their slots now. Hot: once per layer."""
        for copy in self._moves.copies:
            for cache in (self.k_cache_gpu[layer], self.v_cache_gpu[layer]):
                self.streams.compute.copy(
                    cache[copy.dst_slot, : copy.num_tokens], cache[copy.src_slot, : copy.num_tokens]
                )
        if self._offload_runs:
            self.offload_slot_layer(self._offload_runs, layer, self._record(self.streams.compute))

    def attended(self) -> None:
        """Note that the layer's paged call is enqueued. Layers come in order. Hot: once per layer."""
        self.record_slot_compute_done()

    def staged_buffers(self) -> Iterator[int]:
        """Yield the staging buffer of each streamed group of a layer, in the plan's order. Layers come in order.

        Before a buffer is yielded, compute is made to wait until the buffer is filled. Asking for the next buffer
        releases the previous buffer for refilling. Hot: once per layer.
        """
        for _ in self._moves.streamed:
            buffer = self._num_released % self.num_staging_groups
            self._wait(self.streams.compute, self.staging_ready[buffer])  # E7: staged -> attended
            yield buffer
            self.staging_compute_done[buffer] = self._record(self.streams.compute)  # E8: attended -> refilled
            self._num_released += 1
            self._pump()

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield K and V `[N, P, K, D]` of each buffer of `staged_buffers`. The plan's tables index N."""
        for buffer in self.staged_buffers():
            yield self.k_staging[buffer], self.v_staging[buffer]

    def begin_all_layers(self) -> None:
        """Replaces begin_layer in a step that loads nothing and is enqueued as a single CUDA graph."""
        self.begin_layer(self.spec.num_layers - 1)  # the last layer is copied out last, so this waits for all

    def ran_all_layers(self) -> None:
        """Replaces stored and attended in a step that is enqueued as a single CUDA graph."""
        done = self.record_slot_compute_done(self.spec.num_layers)
        if self._offload_runs:
            self.offload_slots(self._offload_runs, done)

    def end_step(self) -> None:
        assert not self._queue and self._num_filled == self._num_released, "the step left loads unused"

    # -- copies ----------------------------------------------------------------------------------------------------

    def wait_slot_layer(self, layer: int) -> None:
        """Make compute wait for the step's loads into slots in this layer. Hot."""
        self._wait(self.streams.compute, self.ring_slot_ready[layer])  # E1: loaded -> used

    def record_slot_compute_done(self, num_layers: int = 1) -> Event:
        """Record that compute has enqueued its last use of the step's slots in the next `num_layers` layers. Hot."""
        done = self._record(self.streams.compute)
        self._compute_log.add(done, num_layers)  # E2, E3
        return done

    def offload_slot_layer(self, runs: tuple[Run, ...], layer: int, stored: Event | None) -> None:
        """Enqueue the copies from slots to CPU blocks in one layer. They run once `stored` is done. Hot."""
        with self._offloading(runs, 1, stored) as d2h:
            d2h.copy_all(run_tensors(runs, self._cpu_tokens[layer], self._slot_tokens[layer], to_gpu=False))

    def offload_slots(self, runs: tuple[Run, ...], stored: Event | None) -> None:
        """Copy the runs in all layers; each run is one copy. Hot."""
        cpu = self.k_cache_cpu.flatten(1, 2), self.v_cache_cpu.flatten(1, 2)
        gpu = self.k_cache_gpu.flatten(1, 2), self.v_cache_gpu.flatten(1, 2)
        with self._offloading(runs, self.spec.num_layers, stored) as d2h:
            for dst, src in layer_run_tensors(runs, cpu, gpu):
                d2h.copy_rows(dst, src)

    @contextmanager
    def _offloading(self, runs: tuple[Run, ...], num_layers: int, stored: Event | None) -> Iterator[Stream]:
        """Yield the stream on which the caller enqueues the copies of `num_layers` layers inside the context."""
        d2h = self.streams.d2h
        self._wait(d2h, stored)  # E3: stored -> copied out
        yield d2h
        self._d2h_log.add(self._record(d2h), num_layers)  # E4, E5, E6
        self.num_offloaded_bytes += self._num_bytes(runs) * num_layers

    def _pump(self) -> None:
        """Enqueue loads in order until staging is full. Hot."""
        while self._queue:
            layer, loads = self._queue[0]
            if loads.to_slots:
                self.load_to_slot_layer(layer, loads)
            elif self._num_filled - self._num_released < self.num_staging_groups:
                self._fill_staging(layer, loads)
            else:
                return
            self._queue.popleft()

    def load_to_slot_layer(self, layer: int, loads: _Loads) -> None:
        """Enqueue the copies from CPU blocks to slots in one layer. Hot."""
        h2d = self.streams.h2d
        self._wait(h2d, self._compute_log.find(loads.slot_use, layer))  # E2: last used -> overwritten
        self._wait(h2d, self._d2h_log.find(loads.slot_offload, layer))  # E5: copied out -> overwritten
        self._wait(h2d, self._d2h_log.find(loads.block_offload, layer))  # E6: copied out -> loaded again
        self._load(layer, loads, self._slot_tokens[layer])
        self.ring_slot_ready[layer] = self._record(h2d)  # E1: loaded -> used

    def _fill_staging(self, layer: int, loads: _Loads) -> None:
        """Enqueue the copies from CPU blocks to the next staging group. Hot."""
        h2d, group = self.streams.h2d, self._num_filled % self.num_staging_groups
        self._wait(h2d, self.staging_compute_done[group])  # E8: attended -> refilled
        self._wait(h2d, self._d2h_log.find(loads.block_offload, layer))  # E6: copied out -> loaded again
        start = self.timer.begin()
        self._load(layer, loads, self._staging_tokens[group])
        if start is not None:
            self.timer.end(start, sum(run.num_tokens for run in loads.runs))
        self.staging_ready[group] = self._record(h2d)  # E7: staged -> attended
        self._num_filled += 1

    def _load(self, layer: int, loads: _Loads, gpu_tokens: KV) -> None:
        self.streams.h2d.copy_all(run_tensors(loads.runs, gpu_tokens, self._cpu_tokens[layer], to_gpu=True))
        self.num_loaded_bytes += self._num_bytes(loads.runs)

    def _num_bytes(self, runs: tuple[Run, ...]) -> int:
        """Size of the runs in one layer."""
        return sum(run.num_tokens for run in runs) * self._layer_token_bytes

    def _record(self, stream: Stream) -> Event:
        event = self.streams.event()
        stream.record(event)
        return event

    @staticmethod
    def _wait(stream: Stream, event: Event | None) -> None:
        if event is not None:
            stream.wait(event)

    def stats(self) -> dict[str, float | None]:
        return {
            "num_loaded_bytes": self.num_loaded_bytes,
            "num_offloaded_bytes": self.num_offloaded_bytes,
            "link_byte_per_s": self.link_byte_per_s,
        }

    def close(self) -> None:
        """Finish all copies and unpin the CPU pool. The caches must not be used after this."""
        try:
            self.streams.synchronize()
        finally:  # waiting for a failed GPU raises; unpin the memory nevertheless
            for buffer in self._host_buffers:
                buffer.close()


def _newest(batches: np.ndarray, ids: Iterable[int]) -> int:
    """Return the newest batch recorded for these slots or blocks, or 0 if there are none."""
    return int(batches[list(ids)].max(initial=0))


def measure_link(streams: Streams, pool: torch.Tensor, staging: torch.Tensor) -> float | None:
    """Bytes per second of copies from the pinned `pool` to the `staging` buffer on the GPU, or None on a CPU.

    After a short warm-up, 1 GiB is copied through the h2d stream in pieces of 8 MiB, or of the size of the smaller
    tensor if that is less. The pool is read from end to end, repeatedly if it is small. `staging` is overwritten. Each
    rank measures its own link.
    """
    if not staging.is_cuda:
        return None
    source, target = pool.view(-1), staging.view(-1)
    size = min(COPY_BYTES // pool.element_size(), source.numel(), target.numel())
    starts = range(0, source.numel() - size + 1, size)
    num_copies = max(1, min(1024, TOTAL_BYTES // (size * pool.element_size())))
    seconds = 0.0
    for repeats in (max(1, num_copies // 16), num_copies):  # the first round is the warm-up
        streams.synchronize()
        start_s = time.perf_counter()
        for i in range(repeats):
            start = starts[i % len(starts)]
            streams.h2d.copy(target[:size], source[start : start + size])
        streams.synchronize()
        seconds = time.perf_counter() - start_s
    return num_copies * size * pool.element_size() / seconds
