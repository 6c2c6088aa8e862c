"""ShadowSpec: a copy of the KV in 3 or 4 bits, which stays on the GPU and serves drafts only.

A page of the shadow holds one full KV block. Keys are quantized per channel, in groups of 64 tokens, because their
outliers are in a few channels. Values are quantized per token, in groups of channels (KIVI, arXiv 2402.02750). With 3
bits, keys have 4 and values 2, because errors of keys matter more. A number is (2^bits + code) * scale + offset, with
scale and offset in fp16.

The first tokens of a sequence attract much attention (attention sinks, arXiv 2309.17453). So a sequence's first block
also has a sink: its first SINK_TOKENS tokens in fp16, which drafts read in place of the same tokens of the page. The
first block of a sequence is the first block of every sequence that shares it, so a sink belongs to its block, too.
"""

from dataclasses import dataclass

from nanovllm.plan.kv_spec import KVCacheSpec
from nanovllm.utils.arithmetic import ceil_div

SHADOW_BITS = (4, 3)
KEY_BITS = 4
KEY_GROUP = 64  # tokens of a channel that share a scale
SLICE_TOKENS = 16  # tokens whose codes have the same place in their words
SINK_TOKENS = 64  # a multiple of SLICE_TOKENS
MAX_SHADOW_HEAD_DIM = 256  # with more, the kernels take minutes to compile and spill registers
TOKENS_PER_SINK = 8192  # all sequences of this length or more have sinks


@dataclass(frozen=True, kw_only=True)
class ShadowSpec:
    """Shape of the shadow of one rank."""

    bits: int
    page_size: int  # tokens, as many as a KV block has
    num_layers: int
    num_kv_heads: int  # on this rank
    head_dim: int

    @classmethod
    def of(cls, spec: KVCacheSpec, bits: int) -> "ShadowSpec":
        return cls(
            bits=bits,
            page_size=spec.block_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )

    @property
    def value_bits(self) -> int:
        return 4 if self.bits == 4 else 2

    @property
    def value_group(self) -> int:
        """Channels of a token that share a scale. Kernels for many small groups take a minute to compile."""
        return 64 if self.value_bits == 4 or self.head_dim > 128 else 32

    @property
    def num_value_groups(self) -> int:
        return -(-self.head_dim // self.value_group)

    @property
    def key_words(self) -> int:
        """int32 words for the codes of a page's keys in one layer and head."""
        return self.page_size * self.head_dim * KEY_BITS // 32

    @property
    def value_words(self) -> int:
        return self.page_size * self.head_dim * self.value_bits // 32

    @property
    def key_scale_words(self) -> int:
        """Words for the scales of a page's keys. Their offsets take as many."""
        return self.page_size // KEY_GROUP * self.head_dim // 2

    @property
    def value_scale_words(self) -> int:
        return self.num_value_groups * self.page_size // 2

    @property
    def head_words(self) -> int:
        """Words of a page in one layer and head: codes of K and of V, and their scales and offsets."""
        return self.key_words + self.value_words + 2 * (self.key_scale_words + self.value_scale_words)

    @property
    def page_bytes(self) -> int:
        """A page in all layers."""
        return self.num_layers * self.num_kv_heads * self.head_words * 4

    @property
    def sink_bytes(self) -> int:
        """A sink in all layers: K and V in fp16."""
        return self.num_layers * 2 * SINK_TOKENS * self.num_kv_heads * self.head_dim * 2

    def num_sinks(self, num_pages: int) -> int:
        """Return the number of sinks of a shadow with `num_pages` pages."""
        return min(num_pages, ceil_div(num_pages * self.page_size, TOKENS_PER_SINK))

    def num_bytes(self, num_pages: int) -> int:
        """Return the size of a shadow."""
        return num_pages * self.page_bytes + self.num_sinks(num_pages) * self.sink_bytes

    def num_pages_in(self, num_bytes: int, block_bytes: int = 0) -> int:
        """Return the number of pages of the largest shadow that fits, if each page also needs `block_bytes`."""
        sink_share = self.sink_bytes * min(self.page_size, TOKENS_PER_SINK) // TOKENS_PER_SINK  # of a page
        num_pages = max(0, num_bytes) // (block_bytes + self.page_bytes + sink_share)
        while num_pages and self.num_bytes(num_pages) + num_pages * block_bytes > num_bytes:  # sinks are rounded up
            num_pages -= 1
        return num_pages
