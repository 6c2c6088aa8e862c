"""OffloadEngine: the KV cache in CPU memory, its slots on the GPU, and every copy between them.

Legend: L layers, N blocks of a cache, P tokens per block, K kv heads, D head dim.

The engine does what a plan's KVMoves say, one layer at a time, and chooses nothing. Two kinds of GPU memory:
- ring slots `[L, N, P, K, D]`: blocks of all layers, written by the model, or loaded to stay;
- staging groups `[N, P, K, D]`: a few blocks of *one* layer, filled, attended and refilled, layer after layer. One
  group serves all layers, so a few of them let copies run ahead of the compute, across layers and into the next step,
  while every slot stays resident.

Loads are enqueued in the order in which the model will use them, as far ahead as staging has room (`_pump`).

Stream edges, each commented where it is made:
  E1  loaded -> read or written         h2d -> compute   ring_slot_ready
  E2  last used -> overwritten by load  compute -> h2d   ring_slot_compute_done
  E3  stored -> copied out              compute -> d2h   ring_slot_compute_done, or this layer's own event
  E4  copied out -> slot written        d2h -> compute   ring_slot_offload_done
  E5  copied out -> slot loaded over    d2h -> h2d       ring_slot_offload_done
  E6  copied out -> CPU block loaded    d2h -> h2d       cpu_block_offload_done
  E7  staged -> attended                h2d -> compute   staging_ready
  E8  attended -> staging refilled      compute -> h2d   staging_compute_done
E4 to E6 are left out where the host has seen that the copy is done (StreamLog).
No edge is needed from a load to a later write of the CPU block it read: compute waits for every load of a step within
that step (E1, E7), and a block is only written (E3) from what compute stored in a later one.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from nanovllm.config import NUM_STAGING_GROUPS, KVCacheSpec
from nanovllm.engine.batch import KVMoves, SlotLoad, StreamedGroup
from nanovllm.kvcache.link import measure_link
from nanovllm.kvcache.pinned_memory import HostBuffer
from nanovllm.kvcache.stream_log import StreamLog
from nanovllm.kvcache.streams import Event, Stream, Streams, make_streams


class OffloadEngine:
    """One rank's KV cache with offload. Per step: begin_step; per layer begin_layer, stored, attended, groups;
    end_step.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_cpu_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the CPU pool and the staging groups; `allocate_slots` the rest."""
        self.spec, self.dtype, self.device = spec, dtype, device
        self.streams: Streams = make_streams(device)
        block_shape = (spec.block_size, spec.num_kv_heads, spec.head_dim)
        host_bytes = spec.block_bytes // 2 * num_cpu_blocks
        pinned_for = device if device.type == "cuda" else None
        self._host_buffers = [HostBuffer(host_bytes, pinned_for) for _ in ("k", "v")]
        self.k_cache_cpu, self.v_cache_cpu = (
            buffer.tensor.view(dtype).view(spec.num_layers, num_cpu_blocks, *block_shape)
            for buffer in self._host_buffers
        )
        staging_shape = (NUM_STAGING_GROUPS, spec.staging_group_blocks, *block_shape)
        self.k_staging, self.v_staging = (torch.zeros(staging_shape, dtype=dtype, device=device) for _ in "kv")
        # Copies on d2h are known by the numbers of their events, since there are many CPU blocks and most were copied
        # out long ago. The newest copy into each CPU block, in each layer:
        self._d2h_log = StreamLog()
        self.cpu_block_offload_done = np.zeros((num_cpu_blocks, spec.num_layers), dtype=np.int64)
        self.staging_ready: list[Event | None] = [None] * NUM_STAGING_GROUPS
        self.staging_compute_done: list[Event | None] = [None] * NUM_STAGING_GROUPS

        self._moves = KVMoves()
        self._slots_in_use: list[int] = []
        self._queue: deque[tuple[int, SlotLoad | StreamedGroup]] = deque()  # loads not enqueued yet, with their layer
        self._num_filled = 0  # staging groups filled since the start, and those released; both in turn
        self._num_released = 0
        self.link_byte_per_s = measure_link(self.streams, self.k_cache_cpu, self.k_staging)  # None on a CPU

    def allocate_slots(self, num_ring_slots: int) -> None:
        """Make the slots on the GPU and start counting bytes. Before the first step, or after `drop_slots`."""
        self.num_ring_slots = num_ring_slots
        self.ring_slots = range(num_ring_slots)
        spec = self.spec
        shape = (spec.num_layers, num_ring_slots, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.k_cache_gpu, self.v_cache_gpu = (
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in ("k", "v")
        )
        # Which event stands for the newest work of a kind on a slot and layer. Slots may share one.
        per_slot_and_layer = (num_ring_slots, spec.num_layers)
        self.ring_slot_ready = np.full(per_slot_and_layer, None)
        self.ring_slot_compute_done = np.full(per_slot_and_layer, None)
        self.ring_slot_offload_done = np.zeros(per_slot_and_layer, dtype=np.int64)  # number of an event, as above
        self.num_loaded_bytes = 0
        self.num_offloaded_bytes = 0

    def drop_slots(self) -> None:
        """Finish all copies and let go of the slots, before others are allocated."""
        self.streams.synchronize()
        del self.k_cache_gpu, self.v_cache_gpu

    # -- one step ------------------------------------------------------------------------------------------------

    def begin_step(self, moves: KVMoves, slots_in_use: Iterable[int]) -> None:
        """Copy out the slots that are given up, start the first loads. `slots_in_use`: those of all block tables."""
        assert not self._queue, "the previous step did not use all it loaded"
        self._d2h_log.forget_done(self.streams.is_done)
        self._moves = moves
        self._slots_in_use = sorted({*slots_in_use, *(copy.src_slot for copy in moves.copies)})
        for flush in moves.flushes:
            for layer in range(self.spec.num_layers):
                self.offload_slot_layer(*flush, layer, self.ring_slot_compute_done[flush.ring_slot, layer])
        per_layer: tuple[SlotLoad | StreamedGroup, ...] = (*moves.loads, *moves.streamed)
        self._queue.extend((layer, load) for layer in range(self.spec.num_layers) for load in per_layer)
        self._pump()

    def begin_layer(self, layer: int) -> None:
        """Compute may write the layer's slots from here on. Hot: once per layer."""
        for load in self._moves.loads:
            self.wait_slot_layer(load.ring_slot, layer)
        for ring_slot in self._moves.taken_slots:
            offloaded = self._d2h_log.find(self.ring_slot_offload_done[ring_slot, layer])
            self._wait(self.streams.compute, offloaded)  # E4: copied out -> written

    def stored(self, layer: int) -> None:
        """The layer's new K and V are in their slots: make the copies that need them. Hot: once per layer."""
        for copy in self._moves.copies:
            for cache in (self.k_cache_gpu[layer], self.v_cache_gpu[layer]):
                self.streams.compute.copy(
                    cache[copy.dst_slot, : copy.num_tokens], cache[copy.src_slot, : copy.num_tokens]
                )
        if self._moves.offloads:
            stored = self._record(self.streams.compute)
            for offload in self._moves.offloads:
                self.offload_slot_layer(*offload, layer, stored)

    def attended(self, layer: int) -> None:
        """The paged call of the layer is enqueued. Hot: once per layer."""
        self.record_slot_compute_done(self._slots_in_use, layer)

    def staged_buffers(self, layer: int) -> Iterator[int]:
        """The staging buffer of each of the layer's streamed groups, in the order of the plan, filled when yielded.

        It is released when the next one is asked for. Hot: once per layer.
        """
        for _ in self._moves.streamed:
            buffer = self._num_released % NUM_STAGING_GROUPS
            self._wait(self.streams.compute, self.staging_ready[buffer])  # E7: staged -> attended
            yield buffer
            self.staging_compute_done[buffer] = self._record(self.streams.compute)  # E8: attended -> refilled
            self._num_released += 1
            self._pump()

    def groups(self, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V `[N, P, K, D]` of the same, whose N the plan's tables index."""
        for buffer in self.staged_buffers(layer):
            yield self.k_staging[buffer], self.v_staging[buffer]

    def begin_all_layers(self) -> None:
        """begin_layer for a step that loads nothing and is enqueued at once (a CUDA graph)."""
        for layer in range(self.spec.num_layers if self._moves.taken_slots else 0):
            self.begin_layer(layer)

    def ran_all_layers(self) -> None:
        """stored and attended for such a step."""
        self.record_slot_compute_done(self._slots_in_use, slice(None))
        for offload in self._moves.offloads:
            for layer in range(self.spec.num_layers):
                self.offload_slot_layer(*offload, layer, self.ring_slot_compute_done[offload.ring_slot, layer])

    def end_step(self) -> None:
        assert not self._queue and self._num_filled == self._num_released, "the step left loads unused"

    # -- single moves --------------------------------------------------------------------------------------------

    def load_to_slot_layer(self, ring_slot: int, layer: int, cpu_block_id: int, num_tokens: int) -> None:
        """Enqueue CPU block -> slot for one layer."""
        h2d, find = self.streams.h2d, self._d2h_log.find
        self._wait(h2d, self.ring_slot_compute_done[ring_slot, layer])  # E2: last used -> overwritten
        self._wait(h2d, find(self.ring_slot_offload_done[ring_slot, layer]))  # E5: copied out -> overwritten
        self._wait(h2d, find(self.cpu_block_offload_done[cpu_block_id, layer]))  # E6: copied out -> loaded again
        h2d.copy(self.k_cache_gpu[layer, ring_slot, :num_tokens], self.k_cache_cpu[layer, cpu_block_id, :num_tokens])
        h2d.copy(self.v_cache_gpu[layer, ring_slot, :num_tokens], self.v_cache_cpu[layer, cpu_block_id, :num_tokens])
        self.ring_slot_ready[ring_slot, layer] = self._record(h2d)  # E1: loaded -> used
        self.num_loaded_bytes += self.spec.layer_block_bytes * num_tokens // self.spec.block_size

    def wait_slot_layer(self, ring_slot: int, layer: int) -> None:
        """Compute goes on once the newest load of this slot and layer is done."""
        self._wait(self.streams.compute, self.ring_slot_ready[ring_slot, layer])  # E1: loaded -> used

    def record_slot_compute_done(self, ring_slots: list[int], layer: int | slice) -> None:
        """Compute has enqueued its last use of these slots in this layer, or in several."""
        self.ring_slot_compute_done[ring_slots, layer] = self._record(self.streams.compute)  # E2, E3

    def offload_slot_layer(
        self, ring_slot: int, cpu_block_id: int, start: int, end: int, layer: int, stored: Event | None
    ) -> None:
        """Enqueue tokens start..end-1 of a slot -> CPU block for one layer, once `stored` is done."""
        d2h = self.streams.d2h
        self._wait(d2h, stored)  # E3: stored -> copied out
        d2h.copy(self.k_cache_cpu[layer, cpu_block_id, start:end], self.k_cache_gpu[layer, ring_slot, start:end])
        d2h.copy(self.v_cache_cpu[layer, cpu_block_id, start:end], self.v_cache_gpu[layer, ring_slot, start:end])
        number = self._d2h_log.add(self._record(d2h))
        self.ring_slot_offload_done[ring_slot, layer] = number  # E4, E5
        self.cpu_block_offload_done[cpu_block_id, layer] = number  # E6
        self.num_offloaded_bytes += self.spec.layer_block_bytes * (end - start) // self.spec.block_size

    def _pump(self) -> None:
        """Enqueue loads in order until staging is full. Hot."""
        while self._queue:
            layer, load = self._queue[0]
            if isinstance(load, SlotLoad):
                self.load_to_slot_layer(load.ring_slot, layer, load.cpu_block_id, load.num_tokens)
            elif self._num_filled - self._num_released < NUM_STAGING_GROUPS:
                self._fill_staging(layer, load)
            else:
                return
            self._queue.popleft()

    def _fill_staging(self, layer: int, streamed: StreamedGroup) -> None:
        h2d, group = self.streams.h2d, self._num_filled % NUM_STAGING_GROUPS
        self._wait(h2d, self.staging_compute_done[group])  # E8: attended -> refilled
        for i, cpu_block_id in enumerate(streamed.cpu_block_ids):
            offloaded = self._d2h_log.find(self.cpu_block_offload_done[cpu_block_id, layer])
            self._wait(h2d, offloaded)  # E6: copied out -> loaded again
            h2d.copy(self.k_staging[group, i], self.k_cache_cpu[layer, cpu_block_id])
            h2d.copy(self.v_staging[group, i], self.v_cache_cpu[layer, cpu_block_id])
        self.staging_ready[group] = self._record(h2d)  # E7: staged -> attended
        self._num_filled += 1
        self.num_loaded_bytes += self.spec.layer_block_bytes * len(streamed.cpu_block_ids)

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
        """Finish all copies and unpin the CPU pool; the caches must not be used after this."""
        try:
            self.streams.synchronize()
        finally:  # a GPU that has failed finishes nothing; the memory is unpinned all the same
            for buffer in self._host_buffers:
                buffer.close()
