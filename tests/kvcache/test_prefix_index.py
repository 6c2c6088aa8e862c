"""The prefix index and the block pool, call by call; then what conversations find again. See also test_properties."""

import itertools
import random
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import xxhash
from content_model import Simulation, longest_prefix_left, tokens

from nanovllm.kvcache.block_manager import BlockManager
from nanovllm.kvcache.block_pool import HASH_BYTES, BlockPool, KVCacheBlock, PrefixIndex, PrefixMatch, contiguous_ranges
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def make_sequence(token_ids: list[int], max_tokens: int = 4, seq_id: int = 0, hash_salt: int = 0) -> Sequence:
    return Sequence(seq_id, token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0, hash_salt)


def filled_pool(seq: Sequence, num_blocks: int = 8, block_size: int = 4, grain: int = 2) -> BlockPool:
    """A pool in which `seq` holds blocks for all its tokens."""
    pool = BlockPool([KVCacheBlock(i) for i in range(num_blocks)], block_size, grain, enable_prefix_caching=True)
    hold_all(pool, seq, block_size)
    return pool


def hold_all(pool: BlockPool, seq: Sequence, block_size: int = 4) -> None:
    seq.block_table += [pool.allocate().block_id for _ in range(-(-len(seq.token_ids) // block_size))]
    pool.register(seq, len(seq.token_ids))


def release_all(pool: BlockPool, seq: Sequence) -> None:
    for block_id in reversed(seq.block_table):
        pool.release(pool.blocks[block_id])


def test_hash_is_xxh64_of_the_parents_hash_and_the_token_ids() -> None:
    seq = make_sequence([7, 8, 9, 10, 11])
    pool = filled_pool(seq)
    first = xxhash.xxh64_intdigest((0).to_bytes(8, "little") + np.array([7, 8], dtype=np.int64).tobytes())
    second = xxhash.xxh64_intdigest(first.to_bytes(8, "little") + np.array([9, 10], dtype=np.int64).tobytes())
    block = pool.blocks[seq.block_table[0]]
    assert block.grain_hashes == [first, second] and block.hash == second
    assert block.token_ids.tolist() == [7, 8, 9, 10]
    assert pool.blocks[seq.block_table[1]].hash == -1  # one token does not fill a grain


def test_match_finds_whole_blocks_then_a_part_of_one() -> None:
    seq = make_sequence(tokens(15))
    pool = filled_pool(seq)
    a, b, c, _ = seq.block_table
    assert pool.match(make_sequence(tokens(15))) == PrefixMatch((a, b, c), seq.block_table[3], 2)
    assert pool.match(make_sequence([*tokens(11), 5000])) == PrefixMatch((a, b), c, 2)
    assert pool.match(make_sequence([*tokens(9), 5000, 5000])) == PrefixMatch((a, b))
    assert pool.match(make_sequence([5000, *tokens(14)])) == PrefixMatch()


# The index's own hash, and hashes that lead to wrong prefixes
HASHES: dict[str, Callable[[bytes], int]] = {
    "xxh64": xxhash.xxh64_intdigest,
    "always the same": lambda data: 42,
    "of two bits": lambda data: xxhash.xxh64_intdigest(data) % 4,
    "of the grain alone": lambda data: xxhash.xxh64_intdigest(data[HASH_BYTES:]),
}


def test_take_hands_out_the_least_recently_used_block_and_the_tail_of_a_prompt_before_its_head() -> None:
    first, second = make_sequence(tokens(8)), make_sequence(tokens(12, start=2000), seq_id=1)
    pool = filled_pool(first, num_blocks=6)
    hold_all(pool, second)
    release_all(pool, second)
    release_all(pool, first)
    unused = [5]
    expected = unused + second.block_table[::-1] + first.block_table[::-1]
    assert [pool.allocate().block_id for _ in range(6)] == expected


def test_retain_counts_and_only_the_last_release_frees() -> None:
    pool = BlockPool([KVCacheBlock(0)], 4, 4, enable_prefix_caching=True)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert (block.ref_count, pool.num_free) == (1, 0)
    pool.release(block)
    assert (block.ref_count, pool.num_free) == (0, 1)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_take_without_a_free_block_is_refused() -> None:
    pool = BlockPool([KVCacheBlock(0)], 4, 4, enable_prefix_caching=True)
    pool.allocate()
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()


def test_index_block_size_that_is_not_a_multiple_of_the_grain_is_refused() -> None:
    with pytest.raises(AssertionError, match="not a multiple"):
        PrefixIndex(block_size=6, grain=4)


def test_prefix_caching_off_registers_and_matches_nothing() -> None:
    pool = BlockPool([KVCacheBlock(i) for i in range(4)], 4, 2, enable_prefix_caching=False)
    hold_all(pool, make_sequence(tokens(9)))
    assert len(pool.index) == 0
    assert pool.match(make_sequence(tokens(9))) == PrefixMatch()


def drop_behind_the_search(pool: BlockPool, block_id: int) -> None:
    """What is remembered of the last search stays."""
    with mock.patch.object(PrefixIndex, "_invalidate_search"):
        pool.index.drop(pool.blocks[block_id])


# Each is given the pool and the blocks of two equal sequences
POOL_FAULTS: dict[str, Callable[[BlockPool, list[int], list[int]], object]] = {
    "lost": lambda pool, ids, _: ids.pop(),
    "shared": lambda pool, ids, _: pool.spare_ids.update({ids[0]: None}),
    "twice": lambda pool, ids, _: ids.__setitem__(1, ids[0]),
    "count": lambda pool, ids, _: pool.retain(pool.blocks[ids[0]]),
    "tokens": lambda pool, ids, _: pool.blocks[ids[0]].token_ids.pop(),
    "grain": lambda pool, *_: pool.index._newest.popitem(),
    "holder": lambda pool, *_: pool.index._older.popitem(),
    "search": lambda pool, _, ids: drop_behind_the_search(pool, ids[1]),
}


@pytest.mark.parametrize("fault", POOL_FAULTS)
def test_pool_check_integrity_notices(fault: str) -> None:
    seq, other = make_sequence(tokens(9)), make_sequence(tokens(9), seq_id=1)
    pool = filled_pool(seq)
    hold_all(pool, other)
    pool.match(make_sequence(tokens(13)))
    pool.check_integrity([seq, other])
    POOL_FAULTS[fault](pool, seq.block_table, other.block_table)
    with pytest.raises(AssertionError):
        pool.check_integrity([seq, other])


# -- grains that several blocks hold ---------------------------------------------------------------------------------


def two_holders(num_tokens: int, num_more_tokens: int) -> tuple[BlockPool, Sequence, Sequence]:
    """Two sequences that begin alike, each with blocks of its own, the first one with `num_tokens`."""
    first, second = make_sequence(tokens(num_tokens)), make_sequence(tokens(num_tokens + num_more_tokens), seq_id=1)
    pool = filled_pool(first)
    hold_all(pool, second)
    return pool, first, second


class PrefixOracle:
    """What the index should find: for each known prefix, with all its tokens and its salt, the blocks that end it."""

    def __init__(self) -> None:
        self.holders: dict[tuple[int, ...], list[int]] = {}  # newest last
        self.contents: dict[int, tuple[int, ...]] = {}  # by block id: all tokens up to the block's end

    def register(self, seq: Sequence, block_size: int, grain: int) -> None:
        salted = (seq.hash_salt, *seq.token_ids)
        for end in range(grain, len(seq.token_ids) + 1, grain):
            block_id = seq.block_table[(end - 1) // block_size]
            self.contents[block_id] = salted[: 1 + end]
            if block_id not in (holders := self.holders.setdefault(salted[: 1 + end], [])):
                holders.append(block_id)

    def drop(self, block_id: int) -> None:
        """Forget the block. With the last holder of a prefix go all prefixes that continue it."""
        content = self.contents.pop(block_id, ())
        lost = [prefix for prefix, holders in self.holders.items() if holders == [block_id]]
        for prefix in list(self.holders):
            if any(prefix[: len(start)] == start for start in lost):
                del self.holders[prefix]
            elif block_id in self.holders[prefix]:
                self.holders[prefix].remove(block_id)
                assert prefix == content[: len(prefix)]

    def match(self, seq: Sequence, block_size: int, grain: int) -> PrefixMatch:
        salted, found = (seq.hash_salt, *seq.token_ids), []
        end = (len(seq.token_ids) - 1) // grain * grain
        while end and salted[: 1 + end] not in self.holders:
            end -= grain
        for block_end in range(block_size, end + block_size, block_size):
            found.append(self.holders[salted[: 1 + min(block_end, end)]][-1])
        num_full, num_partial_tokens = divmod(end, block_size)
        return PrefixMatch(tuple(found[:num_full]), found[num_full] if num_partial_tokens else None, num_partial_tokens)


@pytest.mark.parametrize("name", HASHES)
def test_index_matches_an_oracle_of_whole_prefixes_whatever_the_hash(name: str) -> None:
    """Sequences share what they match, as the managers let them, and blocks are evicted in any order."""
    rng = random.Random(0)
    for block_size, grain in ((4, 2), (2, 2), (6, 2)):
        pool = BlockPool([KVCacheBlock(i) for i in range(12)], block_size, grain, enable_prefix_caching=True)
        pool.index = PrefixIndex(block_size, grain, hash_bytes=HASHES[name])
        oracle = PrefixOracle()
        held: list[Sequence] = []
        num_matched = 0
        for seq_id in range(800):
            prompt = [int(rng.random() < 0.2) for _ in range(rng.randint(1, 12))]
            seq = make_sequence(prompt, seq_id=seq_id, hash_salt=rng.choice([0, 0, 1]))
            match = pool.match(seq)
            assert match == oracle.match(seq, block_size, grain)
            num_matched += len(match.full_blocks) * block_size + match.num_partial_tokens
            seq.block_table = list(match.full_blocks)
            seq.num_registered_tokens = len(seq.block_table) * block_size
            for block_id in seq.block_table:
                pool.retain(pool.blocks[block_id])
            for _ in range(-(-len(prompt) // block_size) - len(seq.block_table)):
                while not pool.num_free:
                    release_all(pool, held.pop(rng.randrange(len(held))))
                block = pool.allocate(pool.blocks[rng.choice([*pool.spare_ids, *pool.cached_ids])])
                oracle.drop(block.block_id)
                seq.block_table.append(block.block_id)
            pool.register(seq, len(prompt))
            oracle.register(seq, block_size, grain)
            held.append(seq)
            pool.check_integrity(held)
        assert num_matched > 1000


# -- which block is handed out next ----------------------------------------------------------------------------------


def test_release_block_without_a_whole_grain_is_handed_out_first() -> None:
    first, second = make_sequence(tokens(8)), make_sequence(tokens(1, start=2000), seq_id=1)
    pool = filled_pool(first, num_blocks=4)
    hold_all(pool, second)
    release_all(pool, first)
    release_all(pool, second)
    assert pool.next_free_block.block_id == second.block_table[0]


def test_release_block_whose_grains_another_one_holds_is_handed_out_first() -> None:
    pool, first, second = two_holders(num_tokens=3, num_more_tokens=4)
    release_all(pool, first)
    assert pool.next_free_block.block_id == first.block_table[0]
    assert pool.allocate().block_id == first.block_table[0]
    assert pool.match(make_sequence(tokens(20))) == PrefixMatch((second.block_table[0],), second.block_table[1], 2)


def test_release_last_of_two_equal_blocks_keeps_one_of_them_as_the_most_recently_used() -> None:
    pool, first, second = two_holders(num_tokens=3, num_more_tokens=0)
    release_all(pool, first)
    release_all(pool, second)
    order = [pool.allocate().block_id for _ in range(8)]
    assert (order[0], order[-1]) == (second.block_table[0], first.block_table[0])


def test_discard_forgets_the_content_and_hands_the_block_out_next() -> None:
    seq = make_sequence(tokens(8))
    pool = filled_pool(seq)
    with pytest.raises(AssertionError, match="discarded while it has 1 references"):
        pool.discard(pool.blocks[seq.block_table[0]])
    release_all(pool, seq)
    pool.discard(pool.blocks[seq.block_table[1]])
    assert pool.next_free_block.block_id == seq.block_table[1]
    assert pool.match(make_sequence(tokens(20))).full_blocks == (seq.block_table[0],)


def pool_with_gaps() -> tuple[BlockPool, list[Sequence]]:
    """40 blocks of 4 tokens: those of four sequences in turn, of two blocks each time; the last 8 are unused."""
    pool = BlockPool([KVCacheBlock(i) for i in range(40)], 4, 4, enable_prefix_caching=True)
    sequences = [make_sequence(tokens(32, start=2000 * i), seq_id=i) for i in range(4)]
    for _ in range(4):
        for seq in sequences:
            seq.block_table += [pool.allocate().block_id for _ in range(2)]
    for seq in sequences:
        pool.register(seq, 32)
    return pool, sequences


def test_choose_chunk_gets_spare_blocks_and_then_the_least_recently_used() -> None:
    """Regression: a chunk of 16 blocks took cached ones, even the newest but a quarter, while others were unused."""
    pool, sequences = pool_with_gaps()
    for seq in (sequences[2], sequences[0], sequences[1], sequences[3]):
        release_all(pool, seq)
    assert [block.block_id for block in pool.choose_free_blocks(8)] == list(range(32, 40))
    assert [block.block_id for block in pool.choose_free_blocks(11)] == [21, 28, 29, *range(32, 40)]
    assert [block.block_id for block in pool.choose_free_blocks(16)] == sorted(
        [*sequences[2].block_table, *range(32, 40)]
    )
    least = {*sequences[2].block_table, *sequences[0].block_table, *range(32, 40)}
    assert [block.block_id for block in pool.choose_free_blocks(24)] == sorted(least)
    assert [block.block_id for block in pool.choose_free_blocks(40)] == list(range(40))
    assert pool.num_free == 40  # nothing is taken yet
    with pytest.raises(AssertionError, match="41 blocks needed, 40 free"):
        pool.choose_free_blocks(41)


def test_choose_long_chunk_gets_the_longest_stretches_of_spare_blocks() -> None:
    """Regression: a 131K prompt after 256 short requests got their blocks, hardly two of which are neighbours."""
    pool = BlockPool([KVCacheBlock(i) for i in range(80)], 4, 4, enable_prefix_caching=True)
    taken = [pool.allocate() for _ in range(40)]
    for block in taken[::2]:
        pool.release(block)
    assert [block.block_id for block in pool.choose_free_blocks(4)] == [32, 34, 36, 38]
    assert [block.block_id for block in pool.choose_free_blocks(16)] == list(range(40, 56))
    assert [block.block_id for block in pool.choose_free_blocks(42)] == [0, 2, *range(40, 80)]


def test_stretches_are_of_consecutive_numbers() -> None:
    assert contiguous_ranges([3]) == [range(3, 4)]
    assert contiguous_ranges([1, 2, 4, 5, 6, 9]) == [range(4, 7), range(1, 3), range(9, 10)]


# -- the search that is remembered -----------------------------------------------------------------------------------


def num_searches(pool: BlockPool, seq: Sequence) -> int:
    with mock.patch.object(PrefixIndex, "_search", autospec=True, side_effect=PrefixIndex._search) as search:
        pool.match(seq)
    return search.call_count


@pytest.mark.parametrize(
    ("event", "can_change"),
    [
        ("other grain", False),
        ("next grain", True),
        ("matched block dropped", True),
        ("other block dropped", False),
        ("newer holder", True),
        ("own token", True),
    ],
)
def test_match_asked_again_searches_only_after_what_can_change_the_result(event: str, can_change: bool) -> None:
    known, unknown = make_sequence(tokens(9)), make_sequence(tokens(9, start=3000), seq_id=1)
    pool = filled_pool(known, num_blocks=20)
    hold_all(pool, unknown)
    asking = make_sequence([*tokens(15)], seq_id=2)
    assert num_searches(pool, asking) == 1
    assert num_searches(pool, asking) == 0
    if event == "other grain":
        hold_all(pool, make_sequence(tokens(9, start=5000), seq_id=3))
    elif event == "next grain":
        hold_all(pool, make_sequence(tokens(13), seq_id=3))
    elif event == "matched block dropped":
        pool.index.drop(pool.blocks[known.block_table[1]])
    elif event == "other block dropped":
        pool.index.drop(pool.blocks[unknown.block_table[1]])
    elif event == "newer holder":
        hold_all(pool, make_sequence(tokens(4), seq_id=3))
    else:
        asking.token_ids.append(7)
    assert num_searches(pool, asking) == can_change
    assert pool.match(asking) == pool.index._search(asking).match


@pytest.mark.parametrize("kind", ["all GPU", "hybrid"])
def test_admission_searches_once(kind: str) -> None:
    """Regression: can_admit and admit searched the index, both of them."""
    kv = BlockManager(12, 256) if kind == "all GPU" else HybridKVCacheManager(12, 4, 256, 2)
    seq = make_sequence(tokens(1500))
    kv.begin_step([])
    with mock.patch.object(PrefixIndex, "_search", autospec=True, side_effect=PrefixIndex._search) as search:
        assert kv.can_admit(seq)
        kv.admit(seq)
    assert search.call_count == 1


@pytest.mark.parametrize("kind", ["all GPU", "hybrid"])
def test_head_of_the_queue_without_room_is_matched_once(kind: str) -> None:
    """Regression: it was matched in every step, which took 5 ms at a million cached tokens."""
    kv = BlockManager(12, 256) if kind == "all GPU" else HybridKVCacheManager(12, 4, 256, 2)
    simulation = Simulation(kv, max_num_batched_tokens=4000)
    document = tokens(1500)
    simulation.add(document)
    simulation.run()
    simulation.add(tokens(2310, start=20_000), max_tokens=120)
    simulation.step()
    waiting = simulation.add([*document, 7], max_tokens=2)
    with (
        mock.patch.object(PrefixIndex, "_search", autospec=True, side_effect=PrefixIndex._search) as search,
        mock.patch.object(PrefixIndex, "check_integrity"),  # which searches too
        mock.patch("content_model.longest_prefix_left"),
    ):
        for _ in range(100):
            simulation.step()
        assert simulation.scheduler.waiting[0] is waiting
        assert (
            search.call_count <= 2
        )  # besides the one on arrival; the second after the prompt before it has evicted hits
    simulation.run()
    assert waiting.num_hit_tokens == 512


# -- documents and conversations -------------------------------------------------------------------------------------


def check_found_shrinks_only_with_the_blocks(simulation: Simulation, prompt: list[int], num_requests: int) -> None:
    """Run unrelated requests, one after another; what is found of `prompt` is what is left of it, until it is gone."""
    asking = Sequence(10_000, prompt, SamplingParams(max_tokens=1), seed=0)
    found = []
    for i in range(num_requests):
        match = simulation.pool.match(asking)
        found.append(256 * len(match.full_blocks) + match.num_partial_tokens)
        assert found[-1] == longest_prefix_left(simulation.pool, asking)
        simulation.add(tokens(20, start=100_000 + 2000 * i))
        simulation.run()
    assert found[0] > 0 and found[-1] == 0
    assert all(before - after <= 256 for before, after in itertools.pairwise(found)), found


def test_document_whose_first_block_began_as_a_copy_is_found_until_its_blocks_are_taken() -> None:
    """Regression: the first three grains were indexed under the first message's block alone. With that block went the
    whole document, all of whose blocks were still there.
    """
    simulation = Simulation(HybridKVCacheManager(20, 8, 256, 2, grain=16), max_num_batched_tokens=1024)
    first_message, document = tokens(62), tokens(2438)
    simulation.add(first_message)
    simulation.run()
    simulation.add(document)
    simulation.run()
    again = simulation.add(document)
    simulation.run()
    assert again.num_hit_tokens == 2432
    for i in range(9):
        simulation.add(tokens(20, start=50_000 + 2000 * i))
        simulation.run()
    later = simulation.add(document, max_tokens=1)
    simulation.run()
    assert later.num_hit_tokens == 2432
    check_found_shrinks_only_with_the_blocks(simulation, document, 25)


def test_conversation_is_found_in_its_newest_block_when_those_of_earlier_turns_are_gone() -> None:
    """Regression: each turn copied the block of the turn before, and the index knew each grain in the oldest only."""
    simulation = Simulation(HybridKVCacheManager(12, 4, 4096, 2), max_num_batched_tokens=4096)
    for num_tokens in (500, 1100, 1700, 2310):
        simulation.add(tokens(num_tokens), max_tokens=1)
        simulation.run()
    newest = [block for block in simulation.pool.blocks if len(block.token_ids) == 2304]
    assert len(newest) == 1
    while sum(bool(block.token_ids) for block in simulation.pool.blocks) < 12 or len(newest[0].token_ids) == 2304:
        asking = simulation.add(tokens(2400), max_tokens=1)
        assert simulation.pool.match(asking).num_partial_tokens == 2304
        simulation.abort(asking)
        simulation.add(tokens(300, start=50_000 + 2000 * len(simulation.sequences)), max_tokens=1)
        simulation.run()
    asking = simulation.add(tokens(2400), max_tokens=1)
    assert simulation.pool.match(asking) == PrefixMatch()


def test_requests_that_begin_alike_leave_a_document_in_the_pool_and_copy_nothing_out() -> None:
    """Each of them ends with a block that holds the same grains: it is reused first, and its slot needs no flush."""
    simulation = Simulation(HybridKVCacheManager(14, 3, 256, 2, grain=16), max_num_batched_tokens=1024)
    document, examples = tokens(2438), tokens(116, start=50_000)
    simulation.add(document)
    simulation.run()
    for i in range(40):
        seq = simulation.add([*examples, 7, i, 7], max_tokens=2)
        simulation.run()
        assert seq.num_hit_tokens == (112 if i else 0)
    flushes = [flush for plan in simulation.plans for flush in plan.moves.flushes]
    assert len(flushes) <= 2  # the document's last block, and one block that holds the examples
    again = simulation.add(document)
    simulation.run()
    assert again.num_hit_tokens == 2432
