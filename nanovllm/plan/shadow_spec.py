"""ShadowSpec: a copy of the KV in 2 to 4 bits, which stays on the GPU and serves drafts only.

A page of the shadow holds one full KV block. Keys are quantized per channel, in groups of 64 tokens, because their
outliers are in a few channels. Values are quantized per token, in groups of channels (KIVI, arXiv 2402.02750). With 3
bits, keys have 4 and values 2, because errors of keys matter more. A number is (2^bits + code) * scale + offset, with
scale and offset in fp16.
"""

from dataclasses import dataclass

from nanovllm.plan.kv_spec import KVCacheSpec

SHADOW_BITS = (4, 3, 2)
KEY_GROUP = 64  # tokens of a channel that share a scale
SLICE_TOKENS = 16  # tokens whose codes have the same place in their words


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
    def key_bits(self) -> int:
        return 2 if self.bits == 2 else 4

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
        return self.page_size * self.head_dim * self.key_bits // 32

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
