"""KVPool: extents between files' buffers and their places in the cache, at the sizes of real models on a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.capabilities.disk.disk_moves import DISK_GRAIN_TOKENS, Extent, state_key
from nanovllm.capabilities.disk.worker import KVPool
from nanovllm.device.devices import use_expandable_segments
from nanovllm.offload.streams import make_streams

KEY = bytes(21)
# device, layers, blocks, tokens per block, kv heads, head dim. A block of 256 tokens of Qwen3-0.6B has 28 MiB, and
# torch maps a pool on a GPU from pieces of 20 MiB, which nothing smaller could notice.
SIZES = [
    ("cpu", 3, 5, 256, 2, 16),
    ("cpu", 2, 3, 512, 1, 8),
    *(pytest.param(("cuda", 28, n, 256, 8, 128), marks=pytest.mark.gpu) for n in (30, 100, 250)),
    pytest.param(("cuda", 28, 16, 4096, 8, 128), marks=pytest.mark.gpu),
    pytest.param(("cuda", 36, 7, 4096, 8, 128), marks=pytest.mark.gpu),
]


def make_pool(size: tuple[Any, ...], **options: Any) -> tuple[KVPool, tuple[torch.Tensor, torch.Tensor]]:
    device, num_layers, num_blocks, block_size, num_heads, head_dim = size
    if device == "cuda":
        use_expandable_segments()  # as an engine does
    shape, dtype = (num_layers, num_blocks, block_size, num_heads, head_dim), torch.bfloat16
    block_bytes = 2 * num_layers * block_size * num_heads * head_dim * dtype.itemsize
    spec = SimpleNamespace(
        num_layers=num_layers, num_kv_heads=num_heads, head_dim=head_dim, block_size=block_size, block_bytes=block_bytes
    )
    caches = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    return KVPool(spec, *caches, make_streams(torch.device(device)), **options), caches  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_extents_go_out_and_in_and_nothing_else_changes(size: tuple[Any, ...]) -> None:
    """The driver refused to copy an extent as rows of all layers at once, for every pool of real size."""
    pool, caches = make_pool(size, needs_buffers=True)
    num_blocks, block_size = size[2:4]
    starts = range(0, block_size, DISK_GRAIN_TOKENS)
    places = [(0, 0), (num_blocks // 2, starts[-1]), (num_blocks - 1, starts[len(starts) // 2])]
    generator = torch.Generator(size[0]).manual_seed(0)
    for i, (block_id, start) in enumerate(places):
        extent = Extent(KEY, b"", b"", 0.0, block_id, start, 0)
        target = extent._replace(place=places[i - 1][0], start=places[i - 1][1])
        rows = (slice(None), block_id, slice(start, start + DISK_GRAIN_TOKENS))
        for cache in caches:
            cache[rows] = torch.randn(cache[rows].shape, device=size[0], generator=generator).bfloat16()
        if size[0] == "cuda":
            torch.cuda.synchronize()  # the pool copies on a separate stream, which waits for fences only
        stored = b"".join(pool.payload(extent))
        expected = [cache[rows].cpu().clone() for cache in caches]
        assert stored == b"".join(each.view(torch.uint8).numpy().tobytes() for each in expected)
        (buffer,) = pool.buffer(target)
        buffer[:] = stored
        for cache in caches:
            cache.zero_()
        if size[0] == "cuda":
            torch.cuda.synchronize()
        pool.copy_in(target)
        to_rows = (slice(None), target.place, slice(target.start, target.start + DISK_GRAIN_TOKENS))
        for cache, each in zip(caches, expected, strict=True):
            assert torch.equal(cache[to_rows].cpu(), each)
            cache[to_rows] = 0
            assert not cache.any(), "something else was written, too"
    pool.close()


def test_states_go_through_a_buffer_that_may_be_larger_than_an_extents() -> None:
    parts = torch.randn(4, 30, 7), torch.randn(4, 500, 100)
    pool, _ = make_pool(SIZES[0], snapshots=parts)  # type: ignore[arg-type]
    assert pool.state_bytes > pool.extent_bytes
    before, source = [part.clone() for part in parts], 5 + 1  # blocks come first
    stored = b"".join(bytes(part) for part in pool.payload(Extent(state_key(KEY), b"", b"", 0.0, source, 0, 0)))
    target = Extent(state_key(KEY), b"", b"", 0.0, source + 2, 0, 0)
    (buffer,) = pool.buffer(target)
    buffer[:] = stored
    pool.copy_in(target)
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part, torch.stack([old[0], old[1], old[2], old[1]]))
    pool.close()
