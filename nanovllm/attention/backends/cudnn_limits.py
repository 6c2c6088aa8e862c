"""The few sizes of calls that the cudnn backend cuts attention into."""

from dataclasses import dataclass

from nanovllm.attention.backends.contiguous import GATHER_BYTES


@dataclass(frozen=True, kw_only=True)
class CudnnLimits:
    """Tests cut smaller."""

    query_sizes: tuple[int, ...] = (1024, 2048, 3072, 4096, 6144, 8192, 16384)  # of a call; multiples of the first
    max_padded_queries: int = 8192  # of a call whose queries are padded, which copies them
    min_keys: int = 4096  # of a call without a mask; a power of two
    max_keys: int = 32768  # of a call without a mask; a power of two
    gather_bytes: int = GATHER_BYTES  # keys that are copied together, but always min_keys

    @property
    def min_queries(self) -> int:
        """Shorter sequences go to the paged backend."""
        return self.query_sizes[0]

    def sizes_of_pieces(self, num_queries: int) -> list[int]:
        """What pieces of `num_queries` queries can have, in ascending order. A size beyond `num_queries` is padded.

        At least half of the last `min_queries` queries of a piece are real ones.
        """
        rounded = (num_queries + self.min_queries // 2) // self.min_queries * self.min_queries
        return [n for n in self.query_sizes if n <= max(num_queries, min(rounded, self.max_padded_queries))]

    def key_sizes(self, max_context_len: int) -> list[int]:
        """The sizes of calls without a mask for sequences of up to that length, the largest first."""
        exponents = range(self.min_keys.bit_length() - 1, min(self.max_keys, max_context_len).bit_length())
        return [1 << exponent for exponent in reversed(exponents)]


DEFAULT_LIMITS = CudnnLimits()
