"""Sums over ranks of a few rows, in one kernel, where GPUs reach each other's memory.

Each rank writes its numbers to the inboxes of all other ranks (device/tp_group.py), 16-bit numbers two to a word, and
waits in its own inbox for the numbers of the others. A message of 64 bits has a word and the number of its sum, and is
written atomically. So a word has arrived as soon as its message has the right number, and neither side needs a barrier
or a fence. nccl calls this its LL protocol. All ranks add in the order of the ranks and in fp32, so all have the same
sums.

Programs do not wait for each other: program p of a rank exchanges its words with program p of the other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

if TYPE_CHECKING:  # compiling processes import this module without torch
    from nanovllm.device.tp_group import Inboxes

BLOCK_WORDS = 256
_POLLS = tl.constexpr(16)  # reads of messages between two reads of `gave_up`, which is slow, being in host memory


@triton.jit
def _numbers(words, dtype: tl.constexpr):
    """Unpack words [n] -> the numbers in each word, fp32 [n, 1] or [n, 2]."""
    if dtype == tl.float32:
        numbers = words.to(tl.float32, bitcast=True)[:, None]
    else:
        low, high = words.to(tl.int16).to(dtype, bitcast=True), (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        numbers = tl.join(low, high).to(tl.float32)
    return numbers


@triton.jit(do_not_specialize=["num_words"])
def _peer_sum_kernel(
    x_ptr,  # this rank's numbers, replaced by the sums
    addresses_ptr,  # int64 [RANKS]
    num_sums_ptr,  # int32 [programs]
    gave_up_ptr,  # in host memory
    num_words,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    word = program * BLOCK + tl.arange(0, BLOCK)
    is_word = word < num_words
    number = tl.load(num_sums_ptr + program) + 1
    own = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + word, is_word, other=0)
    message = (own.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    place = (number & 1) * (RANKS * MAX_WORDS) + word
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            inbox = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))
            tl.store(inbox + RANK * MAX_WORDS + place, message, is_word)
    inbox = tl.load(addresses_ptr + RANK).to(tl.pointer_type(tl.int64))
    sums = tl.zeros_like(_numbers(own, dtype))
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            words = own
        else:
            message = tl.load(inbox + rank * MAX_WORDS + place, is_word, other=0, volatile=True)
            missing = tl.sum((is_word & ((message >> 32) != number)).to(tl.int32))
            polls = 0
            while missing > 0:
                polls += 1
                # Threads may read different values, but the reduction makes all of them leave the loop together
                gave_up = tl.load(gave_up_ptr, polls % _POLLS == 0, other=0, volatile=True)
                message = tl.load(inbox + rank * MAX_WORDS + place, is_word, other=0, volatile=True)
                missing = tl.sum((is_word & (gave_up == 0) & ((message >> 32) != number)).to(tl.int32))
            words = message.to(tl.int32)
        sums += _numbers(words, dtype)
    NUMBERS: tl.constexpr = sums.shape[1]
    out = x_ptr + NUMBERS * word[:, None] + tl.arange(0, NUMBERS)[None, :]
    tl.store(out, sums.to(dtype), is_word[:, None])
    tl.store(num_sums_ptr + program, number)


def can_sum(x: torch.Tensor, inboxes: Inboxes) -> bool:
    """Return True if x consists of whole words and fits into an inbox. Hot."""
    return x.nbytes % 4 == 0 and x.nbytes <= 4 * inboxes.max_words


def peer_sum(x: torch.Tensor, rank: int, num_ranks: int, inboxes: Inboxes) -> torch.Tensor:
    """Sum contiguous numbers over ranks, in place; `can_sum` must be true. All ranks must call this with the
    same shapes and in the same order. Hot: twice per layer.
    """
    num_words = x.nbytes // 4
    assert x.is_contiguous() and can_sum(x, inboxes), f"the inboxes cannot take {x.nbytes} bytes"
    if num_words:
        on_grid(_peer_sum_kernel, (triton.cdiv(num_words, BLOCK_WORDS),))(
            x,
            inboxes.addresses,
            inboxes.num_sums,
            inboxes.gave_up,
            num_words,
            RANK=rank,
            RANKS=num_ranks,
            MAX_WORDS=inboxes.max_words,
            BLOCK=BLOCK_WORDS,
            num_warps=4,
            **pdl_options(x.device),
        )
    return x
