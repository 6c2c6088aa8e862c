"""The order in which the parts of a layer are started and finished, and how long their results live."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from nanovllm.attention.backends.torch_backend import TorchBackend
from nanovllm.attention.base import PartialAttention
from nanovllm.attention.parts import AttentionPart, finish_parts
from nanovllm.attention.streamed import MergedAttention

Q_THD = torch.zeros(3, 2, 4)


class LoggingStream:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def begin_layer(self, layer: int) -> None:
        self.log.append(f"begin layer {layer}")

    def stored(self, layer: int) -> None:
        self.log.append(f"stored {layer}")

    def attended(self) -> None: ...

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(())


class LoggingPart:
    """A part whose results weigh the same and are its `value`."""

    def __init__(self, name: str, num_partials: int, log: list[str], value: float = 0.0) -> None:
        self.name, self.num_partials, self.log, self.value = name, num_partials, log, value

    def start(self, layer: int, q_THD: torch.Tensor) -> None:
        self.log.append(f"start {self.name}")

    def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[PartialAttention]:
        for i in range(self.num_partials):
            self.log.append(f"{self.name} {i}")
            num_rows, num_heads, _ = q_THD.shape
            yield PartialAttention(torch.full_like(q_THD, self.value), torch.zeros(num_heads, num_rows))

    def skip(self, layer: int) -> None:
        self.log.append(f"skip {self.name}")


def merged_attention(log: list[str], parts: list[LoggingPart], last_parts: list[LoggingPart]) -> MergedAttention:
    cache, cells = torch.zeros(2, 1, 1, 2, 4), torch.zeros(len(Q_THD), dtype=torch.int64)
    return MergedAttention(
        stream=LoggingStream(log),
        k_cache=cache,
        v_cache=cache,
        slot_mapping_T=cells,
        merge=TorchBackend().merge,
        parts=parts,
        last_parts=last_parts,
    )


def test_merged_attention_starts_all_parts_then_finishes_them_in_order() -> None:
    """A part that computes on the CPU works while the others do, and is waited for last."""
    log: list[str] = []
    parts = [LoggingPart("paged", 1, log, 1.0), LoggingPart("streamed", 2, log, 2.0), LoggingPart("cpu", 1, log, 7.0)]
    attention = merged_attention(log, parts, [])
    attention.cells(0)
    out_THD = attention.attend(0, Q_THD)
    assert log[:5] == ["begin layer 0", "stored 0", "start paged", "start streamed", "start cpu"]
    assert log[5:] == ["paged 0", "streamed 0", "streamed 1", "cpu 0"]
    torch.testing.assert_close(out_THD, torch.full_like(Q_THD, (1 + 2 + 2 + 7) / 4))


def test_merged_attention_last_layer_uses_the_parts_of_the_rows_that_sample() -> None:
    log: list[str] = []
    attention = merged_attention(log, [LoggingPart("all", 1, log)], [LoggingPart("last", 1, log)])
    attention.attend(0, Q_THD)
    attention.attend(1, Q_THD[:1])
    assert log == ["stored 0", "start all", "all 0", "stored 1", "start last", "last 0"]


def test_merged_attention_without_queries_skips_every_part() -> None:
    log: list[str] = []
    parts = [LoggingPart("paged", 1, log), LoggingPart("streamed", 2, log)]
    assert len(merged_attention(log, [], parts).attend(1, Q_THD[:0])) == 0
    assert log == ["stored 1", "skip paged", "skip streamed"]


@pytest.mark.parametrize("num_partials", [1, 4])
def test_finish_parts_keeps_no_result_while_the_next_is_computed(num_partials: int) -> None:
    """A result of a long chunk takes 64 MiB and more."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class WatchingPart(LoggingPart):
        def finish(self, layer: int, q_THD: torch.Tensor) -> Iterator[PartialAttention]:
            for _ in range(self.num_partials):
                assert all(reference() is None for reference in alive)
                yield self.watched(torch.empty_like(q_THD))

        def watched(self, out_THD: torch.Tensor) -> PartialAttention:
            alive.append(weakref.ref(out_THD))
            return PartialAttention(out_THD, torch.zeros(2, 3))

    parts: list[AttentionPart[PartialAttention]] = [WatchingPart("a", num_partials, []), WatchingPart("b", 1, [])]
    finish_parts(parts, 0, Q_THD, lambda partial: None)
    assert len(alive) == num_partials + 1
