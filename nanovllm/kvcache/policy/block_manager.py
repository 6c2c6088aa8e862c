"""BlockManager: the KV cache without offload, all on the GPU.

A sequence holds blocks for all its tokens. When no block is free, the newest running sequence is preempted, loses its
blocks, and is computed again later.
"""

from collections.abc import Sequence as Seq

from nanovllm.core.kv_spec import BlockState
from nanovllm.core.sequence import Sequence
from nanovllm.core.step_plan import KVMoves
from nanovllm.errors import RequestError
from nanovllm.kvcache.policy.base import WATERMARK, KVCacheManager, PagedKeys
from nanovllm.kvcache.policy.block_pool import Block, BlockPool
from nanovllm.utils.arithmetic import ceil_div

_NO_MOVES = KVMoves()


class BlockManager(KVCacheManager):
    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, *, watermark: float = WATERMARK
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool([Block(i) for i in range(num_blocks)], block_size, block_size, enable_prefix_caching)
        self.num_watermark_blocks = int(watermark * num_blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def check_fits(self, seq: Sequence) -> None:
        needed, have = self._num_blocks(seq.max_kv_tokens), len(self.pool.blocks)
        if needed > have:
            raise RequestError(
                f"prompt of {seq.num_prompt_tokens} tokens + max_tokens={seq.params.max_tokens} needs {needed} KV "
                f"blocks of {self.block_size} tokens, but the cache has {have}; shorten the prompt, lower max_tokens, "
                "raise gpu_memory_utilization or num_kvcache_blocks, or use enable_cpu_offload=True"
            )

    def num_known_tokens(self, seq: Sequence) -> int:
        return len(self.pool.match(seq).full_blocks) * self.block_size

    def can_admit(self, seq: Sequence) -> bool:
        return self.pool.has_room_for(seq, self.num_watermark_blocks)

    def admit(self, seq: Sequence) -> None:
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        for block_id in self.pool.match(seq).full_blocks:
            self.pool.retain(self.pool.blocks[block_id])
            seq.block_table.append(block_id)
        seq.num_computed_tokens = seq.num_registered_tokens = len(seq.block_table) * self.block_size
        if seq.num_hit_tokens is None:
            seq.num_hit_tokens = seq.num_computed_tokens
        self._grow(seq, seq.num_tokens)

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        while len(seq.block_table) < self._num_blocks(num_tokens):
            seq.block_table.append(self.pool.allocate().block_id)

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        room = (len(seq.block_table) + self.pool.num_free) * self.block_size - seq.num_computed_tokens
        return min(num_tokens, room)

    def place(self, seq: Sequence, num_tokens: int, num_guesses: int = 0) -> None:
        self._grow(seq, seq.num_computed_tokens + num_tokens)
        self.pool.register(seq, seq.num_computed_tokens + num_tokens - num_guesses)

    def accept(self, seq: Sequence) -> None:
        seq.num_computed_tokens += 1

    def preempt(self, seq: Sequence) -> None:
        self.free(seq)
        seq.num_computed_tokens = seq.num_registered_tokens = 0

    def free(self, seq: Sequence) -> None:
        self.pool.register(seq, seq.num_computed_tokens)
        for block_id in reversed(seq.block_table):  # so that the tail of a prefix is evicted before its head
            self.pool.release(self.pool.blocks[block_id])
        seq.block_table.clear()

    def finish_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        keys = []
        for seq, num_tokens in placed:
            num_keys = seq.num_computed_tokens + num_tokens
            keys.append(PagedKeys(tuple(seq.block_table[: self._num_blocks(num_keys)]), num_keys))
        return keys, _NO_MOVES

    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        self.pool.check_integrity(list(sequences))

    def block_states(self) -> bytes:
        # With prefix caching, a block without a hash is not full yet
        has_index = self.pool.enable_prefix_caching
        owned = bytes([BlockState.WRITTEN if has_index else BlockState.RESIDENT, BlockState.RESIDENT])
        unowned = bytes([BlockState.FREE, BlockState.CACHED])
        return bytes([(owned if block.ref_count else unowned)[bool(block.grain_hashes)] for block in self.pool.blocks])

    def stats(self) -> dict[str, float | None]:
        return {"num_gpu_blocks": len(self.pool.blocks), "num_free_gpu_blocks": self.pool.num_free}
