"""The sizes that graphs are captured for. One that is missing costs padding in every step that it would have run."""

import itertools

from nanovllm.plan.step_limits import (
    graph_sizes,
    mixed_graph_sizes,
    streamed_graph_sizes,
    streamed_verifying_graph_sizes,
    verifying_graph_sizes,
)


def test_graph_sizes_are_exact_and_end_with_the_largest_step() -> None:
    """Regression: ten powers of two for streamed steps of 512 sequences were 290 graphs, one per layer each."""
    every_8, every_16 = list(range(8, 129, 8)), list(range(144, 513, 16))
    for sizes_of, expected in (
        (graph_sizes, {1: [1], 3: [1, 2, 3], 8: [1, 2, 4, 8], 13: [1, 2, 4, 8, 13], 128: [1, 2, 4, *every_8]}),
        (graph_sizes, {130: [1, 2, 4, *every_8, 130], 512: [1, 2, 4, *every_8, *every_16]}),
        (streamed_graph_sizes, {1: [1], 2: [1, 2], 4: [1, 4], 8: [1, 4, 8], 512: [1, 4, 16, 64, 256, 512]}),
        (verifying_graph_sizes, {1: [1], 6: [4, 6], 64: [4, 8, 16, 32, 64], 512: [4, 8, 16, 32, 64]}),
        (streamed_verifying_graph_sizes, {1: [1], 17: [16, 17], 512: [16, 64]}),
    ):
        assert {max_num_rows: sizes_of(max_num_rows) for max_num_rows in expected} == expected


def test_mixed_graph_sizes_are_exact_however_small_the_limits_are() -> None:
    assert mixed_graph_sizes(1, 1) == [(1, 1)]
    assert mixed_graph_sizes(64, 64) == [(4, 64), (32, 64), (64, 64)]
    assert mixed_graph_sizes(16384, 300) == list(itertools.product((4, 32, 300), (64, 128, 256, 512, 1024)))
