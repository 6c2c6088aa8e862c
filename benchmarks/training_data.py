"""What benchmarks/train_small_lm.py trains on: first short pieces of text, then long ones in which much is repeated."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.python_sources import END_TOKEN_ID, TokenArray, file_tokens, join_files, line_start, rename_words

COPY_SHARE, QUOTE_SHARE = 0.25, 0.25  # of the pieces of a long sequence
MIN_QUOTE_TOKENS, MAX_QUOTE_TOKENS = 200, 2000


class Crops:
    """Pieces of the files, cut out anywhere. The files are in random order."""

    def __init__(self, files: Sequence[bytes], seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokens = join_files(self._rng.sample(files, len(files)))

    def batch(self, num_seqs: int, num_tokens: int) -> torch.Tensor:
        """Token ids [num_seqs, num_tokens], int16."""
        starts = [self._rng.randrange(len(self._tokens) - num_tokens + 1) for _ in range(num_seqs)]
        return torch.from_numpy(np.stack([self._tokens[start : start + num_tokens] for start in starts]))


class LongSequences:
    """Files of the same package one after another, and in between what makes attention to distant tokens worthwhile:
    copies of an earlier piece in which words are renamed, and quotes from one.
    """

    def __init__(self, files: Sequence[bytes], seed: int) -> None:
        """`files`: in the order of their paths, so that neighbours belong together."""
        self._files, self._rng = files, random.Random(seed)

    def batch(self, num_seqs: int, num_tokens: int) -> torch.Tensor:
        """Token ids [num_seqs, num_tokens], int16."""
        return torch.from_numpy(np.stack([self.sequence(num_tokens) for _ in range(num_seqs)]))

    def sequence(self, num_tokens: int) -> TokenArray:
        rng, file_idx = self._rng, self._rng.randrange(len(self._files))
        originals: list[bytes] = []
        pieces: list[TokenArray] = []
        missing = num_tokens
        while missing > 0:
            kind = rng.random()
            if originals and kind < COPY_SHARE:
                piece = rename_words(rng, rng.choice(originals))
            elif originals and kind < COPY_SHARE + QUOTE_SHARE:
                piece = self._quote(rng.choice(originals))
            else:
                piece = self._excerpt(self._files[file_idx % len(self._files)], max(num_tokens // 4, 1))
                originals.append(piece)
                file_idx += 1
            pieces.append(np.append(file_tokens(piece), np.int16(END_TOKEN_ID)))
            missing -= len(pieces[-1])
        return np.concatenate(pieces)[:num_tokens]

    def _excerpt(self, content: bytes, max_tokens: int) -> bytes:
        """The file, or some of its lines if it is longer than `max_tokens`."""
        start = line_start(content, self._rng.randrange(max(len(content) - max_tokens, 0) + 1))
        return content[start : start + max_tokens]

    def _quote(self, content: bytes) -> bytes:
        start = line_start(content, self._rng.randrange(len(content)))
        return content[start : start + self._rng.randint(MIN_QUOTE_TOKENS, MAX_QUOTE_TOKENS)]
