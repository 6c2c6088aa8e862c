"""TokenMask: a set of token ids, as the bits of an array."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nanovllm.utils.arithmetic import ceil_div

# One position: bit i % 32 of word i // 32 is set if token i is allowed; int32 [ceil(vocab_size / 32)], read-only
TokenMask: TypeAlias = npt.NDArray[np.int32]


def token_mask(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    """Return the mask with the bits of these tokens."""
    bits = np.zeros(vocab_size, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return packed_mask(bits)


def packed_mask(bits: npt.NDArray[np.bool_]) -> TokenMask:
    """Return the mask of the tokens whose entry is True. `bits`: bool [vocab_size]."""
    packed = np.zeros(ceil_div(len(bits), 32) * 4, np.uint8)
    packed[: ceil_div(len(bits), 8)] = np.packbits(bits, bitorder="little")
    mask: TokenMask = packed.view(np.int32)
    mask.flags.writeable = False
    return mask
