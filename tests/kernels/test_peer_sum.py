"""Sums over ranks: one rank's kernel, with messages of the others that the test has written.

tests/gpu/test_multi_gpu.py has ranks that run at the same time.
"""

from types import SimpleNamespace

import pytest
import torch
from interpreter import INTERPRETED, needs_triton, on_device

pytestmark = needs_triton
MAX_WORDS = 1024


class Ranks:
    """Inboxes as those of device/tp_group.py, all in this process."""

    def __init__(self, num_ranks: int, device: str) -> None:
        self.inboxes = torch.zeros(num_ranks, 2, num_ranks, MAX_WORDS, dtype=torch.int64, device=device)
        addresses = torch.tensor([inbox.data_ptr() for inbox in self.inboxes], device=device)
        self.of_rank = [
            SimpleNamespace(
                max_words=MAX_WORDS,
                addresses=addresses,
                num_sums=torch.zeros(MAX_WORDS, dtype=torch.int32, device=device),
                gave_up=torch.zeros(1, dtype=torch.int32, device=device),
            )
            for _ in range(num_ranks)
        ]

    def write_messages(self, given: list[torch.Tensor]) -> None:
        """Let every rank's kernel write its messages, without waiting, and forget that it has run."""
        for rank, inboxes in enumerate(self.of_rank):
            num_sums = inboxes.num_sums.clone()
            inboxes.gave_up.fill_(1)
            self.sum(given[rank].clone(), rank)
            inboxes.gave_up.zero_()
            inboxes.num_sums.copy_(num_sums)

    def sum(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        from nanovllm.kernels.peer_sum import peer_sum

        return peer_sum(x, rank, len(self.of_rank), self.of_rank[rank])  # type: ignore[arg-type]


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_have_the_sum(device: str, dtype: torch.dtype, num_ranks: int) -> None:
    """Several sums, one after the other: of a program and of several, the last of which is partly filled."""
    ranks = Ranks(num_ranks, device)
    most = 40 if INTERPRETED and dtype == torch.bfloat16 else 999  # the interpreter truncates where a GPU rounds
    for num_rows in (1, 3, 3, 2, 1, 3):
        given = [(torch.randint(-most, most, (num_rows, 300), device=device) / 64).to(dtype) for _ in range(num_ranks)]
        expected = sum(x.float() for x in given).to(dtype)  # type: ignore[union-attr]
        ranks.write_messages(given)
        for rank, x in enumerate(given):
            assert torch.equal(ranks.sum(x, rank), expected) and x.data_ptr() == given[rank].data_ptr()


@on_device
def test_messages_go_to_the_other_ranks_and_the_halves_take_turns(device: str) -> None:
    ranks, x = Ranks(3, device), torch.arange(300, dtype=torch.float32, device=device)
    words = x.view(torch.int32).long() & 0xFFFFFFFF
    for number in (1, 2, 3):
        ranks.inboxes.zero_()
        ranks.of_rank[1].gave_up.fill_(1)
        ranks.sum(x.clone(), 1)
        for rank, half, sender in torch.cartesian_prod(*map(torch.arange, (3, 2, 3))).tolist():
            is_used = rank != 1 and half == number % 2 and sender == 1
            expected = words | number << 32 if is_used else 0 * words
            assert torch.equal(ranks.inboxes[rank, half, sender, :300], expected)
    assert not ranks.inboxes[..., 300:].any()


@on_device
def test_a_sum_does_not_take_what_was_sent_for_another(device: str) -> None:
    """Two sums later a half still has messages of the first. A rank that gave up ends without them."""
    ranks, x = Ranks(2, device), torch.ones(4, device=device)
    for _ in range(2):
        ranks.write_messages([x, x])
        assert all(ranks.sum(x.clone(), rank).tolist() == [2.0] * 4 for rank in range(2))
    ranks.of_rank[0].num_sums.zero_()  # the messages of both sums are there
    assert ranks.sum(x.clone(), 0).tolist() == [2.0] * 4
    ranks.of_rank[0].num_sums.fill_(2)
    ranks.of_rank[0].gave_up.fill_(1)  # or it would wait for ever
    ranks.sum(x.clone(), 0)
    assert ranks.of_rank[0].num_sums[0] == 3


@on_device
def test_what_a_message_may_have(device: str) -> None:
    from nanovllm.kernels.peer_sum import can_sum

    (inboxes,) = Ranks(1, device).of_rank
    sizes = {(1024, torch.float32): True, (1025, torch.float32): False, (2048, torch.float16): True}
    sizes |= {(2049, torch.float16): False, (3, torch.float16): False, (0, torch.float16): True}
    for (size, dtype), expected in sizes.items():
        assert can_sum(torch.zeros(size, dtype=dtype, device=device), inboxes) == expected  # type: ignore[arg-type]
