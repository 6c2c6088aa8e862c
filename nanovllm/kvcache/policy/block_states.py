"""The state of every block, as one byte each (BlockState). Computed only when somebody wants to look.

Another thread may change the blocks meanwhile. So these functions only read, take no lock, and rely on nothing that
must be consistent between two blocks: the result may show some blocks before and others after a change. `moves` is
frozen, and the list of blocks never changes.
"""

from collections.abc import Sequence

from nanovllm.core.block_state import BlockState
from nanovllm.core.step_plan import KVMoves
from nanovllm.kvcache.policy.block_pool import Block
from nanovllm.kvcache.policy.step_slots import HybridBlock


def gpu_block_states(blocks: Sequence[Block], has_index: bool) -> bytes:
    """Without offload. `has_index`: with prefix caching, when a block without a hash is not full yet."""
    owned = bytes([BlockState.WRITTEN if has_index else BlockState.RESIDENT, BlockState.RESIDENT])
    unowned = bytes([BlockState.FREE, BlockState.CACHED])
    return bytes([(owned if block.ref_count else unowned)[bool(block.grain_hashes)] for block in blocks])


def offloaded_block_states(blocks: Sequence[HybridBlock], moves: KVMoves) -> bytes:
    """With offload. `moves`: those of the last step."""
    states = bytearray([_state_between_steps(block) for block in blocks])

    def mark(block_id: int, state: BlockState) -> None:
        if blocks[block_id].ref_count:  # not if its request has ended since
            states[block_id] = state

    for spans in moves.cpu_spans:
        for span in spans:
            mark(span.cpu_block_id, BlockState.CPU_ATTENDED)
    for group in moves.streamed:
        for block_id in group.cpu_block_ids:
            mark(block_id, BlockState.STREAMED)
    for offload in moves.offloads:  # the blocks that the step filled
        mark(offload.cpu_block_id, BlockState.WRITTEN)
    return bytes(states)


def _state_between_steps(block: HybridBlock) -> BlockState:
    if not (block.num_tokens if block.ref_count else block.grain_hashes):
        return BlockState.FREE
    if block.being_written:
        return BlockState.WRITTEN
    if block.ring_slot >= 0:
        return BlockState.RESIDENT
    return BlockState.WAITING if block.ref_count else BlockState.CACHED
