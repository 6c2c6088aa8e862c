"""Times the work of the host in each step. `make bench-micro` runs this; it is not part of the tests.

pytest-benchmark's table shows the time of a call. The time per item is printed with -s, and is in the JSON's
extra_info.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.server_process import make_tokenizer
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.block_pool import Block, BlockPool, PrefixMatch
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.runner import inputs
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.text.detokenizer import Detokenizer, StopStrings, TokenDecoder
from nanovllm.utils.arithmetic import ceil_div

VOCAB_SIZE = 151_936
DOCUMENTS = sorted(Path(__file__).parents[2].glob("docs/*.md"))
_rng = random.Random(0)


def make_sequence(seq_id: int, num_tokens: int, max_tokens: int = 50_000) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(seq_id, [_rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)], params, seed=seq_id)


def decoding_scheduler(
    kv: KVCacheManager, prompt_lens: list[int], max_num_batched_tokens: int, max_tokens: int = 50_000
) -> Scheduler:
    """A scheduler whose sequences have finished their prompts."""
    scheduler = Scheduler(kv, max_num_seqs=len(prompt_lens), max_num_batched_tokens=max_num_batched_tokens)
    for seq_id, num_tokens in enumerate(prompt_lens):
        scheduler.add(make_sequence(seq_id, num_tokens, max_tokens))
    while any(seq.num_uncomputed_tokens > 1 or not seq.output_token_ids for seq in scheduler.sequences.values()):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> StepPlan:
    """Plan a step and process its tokens."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, [7] * sum(step.sampling is not None for step in plan.sequences))
    return plan


def timed(benchmark: Any, num_items: int, item: str, call: Callable[[], Any]) -> Any:
    """Benchmark `call`, and print and record the median time per item."""
    result = benchmark(call)
    note(benchmark, num_items, item)
    return result


def note(benchmark: Any, num_items: int, item: str) -> None:
    if benchmark.stats is None:
        return  # --benchmark-disable
    per_item_us = benchmark.stats.stats.median * 1e6 / num_items
    benchmark.extra_info |= {"num_items": num_items, "item": item, "median_us_per_item": per_item_us}
    print(f"\n{benchmark.name}: {per_item_us * num_items:,.1f} us a call, {per_item_us:.3f} us a {item}")


@pytest.mark.parametrize("hybrid", [False, True])
def test_scheduler_step_256_running_sequences(benchmark: Any, hybrid: bool) -> None:
    kv: KVCacheManager = BlockManager(256 * 450, 256)
    if hybrid:  # everything resident
        kv = HybridKVCacheManager(256 * 30, 1024, 4096, 2)
    scheduler = decoding_scheduler(kv, [_rng.randint(100, 1024) for _ in range(256)], 16384)
    plan = timed(benchmark, 256, "sequence", lambda: step(scheduler))
    assert len(plan.sequences) == 256 and plan.is_decode


@pytest.mark.parametrize("hashed", [False, True], ids=["first lookup", "hashes known"])
def test_prefix_lookup_40k_prompt(benchmark: Any, hashed: bool) -> None:
    """The prefix has grains of 256 tokens, all of which hit."""
    kv = BlockManager(200, 256)
    known = make_sequence(0, 40_960, max_tokens=1)
    decode = Scheduler(kv, max_num_seqs=1, max_num_batched_tokens=65_536)
    decode.add(known)
    step(decode)
    token_ids, params = known.token_ids[:40_960], SamplingParams(max_tokens=1)
    asking = Sequence(1, token_ids, params, seed=0)

    def lookup() -> PrefixMatch:
        if not hashed:
            asking.grain_hashes.clear()
        return kv.pool.index._search(asking).match  # not match(), which caches the result

    match = timed(benchmark, 40_960, "token", lookup)
    assert len(match.full_blocks) == 159  # at least one token must be computed


@pytest.mark.parametrize("num_blocks", [5_000, 80_000])
def test_take_all_blocks_of_a_pool_full_of_prefixes(benchmark: Any, num_blocks: int) -> None:
    """Blocks are allocated least recently used first. The cost per block does not depend on the number of blocks."""
    seq = make_sequence(0, num_blocks, max_tokens=1)

    def full_pool() -> tuple[tuple[BlockPool], dict[str, Any]]:
        pool = BlockPool([Block(i) for i in range(num_blocks)], 1, 1, enable_prefix_caching=True)
        seq.block_table, seq.num_registered_tokens = [pool.allocate().block_id for _ in range(num_blocks)], 0
        pool.register(seq, num_blocks)
        for block in pool.blocks:
            pool.release(block)
        return (pool,), {}

    def take_all(pool: BlockPool) -> None:
        for _ in range(num_blocks):
            pool.allocate()

    benchmark.pedantic(take_all, setup=full_pool, rounds=5)
    note(benchmark, num_blocks, "block")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on this repository's documents."""
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(8000, 8000, sorted(map(str, DOCUMENTS))))


@pytest.mark.parametrize("stop", [(), ("\n\nUser:", "END")], ids=["no stop strings", "stop strings"])
@pytest.mark.parametrize("text", ["documents", "\ufffd"], ids=["text", "replacement characters"])
def test_detokenize_a_step_of_512_answers(benchmark: Any, tokenizer: Any, text: str, stop: tuple[str, ...]) -> None:
    """Each call decodes one token after an answer of 8K tokens."""
    if text == "documents":
        text = "".join(path.read_text() for path in DOCUMENTS)
    token_ids = tokenizer.encode(text)
    decoder = TokenDecoder(tokenizer)
    detokenizers = [Detokenizer(decoder, StopStrings(stop)) for _ in range(512)]
    for seq_id, detokenizer in enumerate(detokenizers):
        detokenizer.update([token_ids[(seq_id * 11 + i) % len(token_ids)] for i in range(8192)], False)
    position = itertools.count(8192)

    def step_of_all() -> None:
        i = next(position)
        for seq_id, detokenizer in enumerate(detokenizers):
            detokenizer.update([token_ids[(seq_id * 11 + i) % len(token_ids)]], False)

    timed(benchmark, 512, "answer", step_of_all)
    assert all(len(detokenizer.text) > 2000 for detokenizer in detokenizers)


def chunk_plan(num_chunks: int, num_tokens: int, num_decodes: int) -> StepPlan:
    """Chunks of `num_tokens` tokens each, 24K into their prompts, and decodes at 1K."""
    sampling = SamplingRow()
    steps = []
    for seq_id in range(num_chunks + num_decodes):
        length, position = (num_tokens, 24_576) if seq_id < num_chunks else (1, 1023)
        context_len = position + length
        blocks = tuple(range(seq_id, seq_id + ceil_div(context_len, 256)))
        ids = np.arange(length, dtype=np.int64)
        steps.append(SequenceStep(seq_id, ids, position, context_len, blocks, context_len, sampling))
    return StepPlan(tuple(steps), KVMoves())


@pytest.mark.parametrize(
    ("num_chunks", "num_tokens", "num_decodes"),
    [(1, 16_384, 0), (1, 16_128, 256), (0, 0, 256)],
    ids=["16K chunk", "chunk and 256 decodes", "256 decodes"],
)
def test_build_inputs(benchmark: Any, num_chunks: int, num_tokens: int, num_decodes: int) -> None:
    plan = chunk_plan(num_chunks, num_tokens, num_decodes)
    arrays = timed(benchmark, plan.num_tokens, "token", lambda: inputs.build_inputs(plan, 256, 0))
    assert len(arrays.positions) == plan.num_tokens


def plan_decode(kv: KVCacheManager, running: list[Sequence]) -> KVMoves:
    """Plan a decode step of all `running` sequences. Repeated calls plan the same step, because no
    sequence advances.
    """
    kv.begin_step(running)
    for seq in running:
        kv.place(seq, kv.num_placeable(seq, 1))
    return kv.finish_step([(seq, 1) for seq in running])[1]


@pytest.mark.parametrize("slots", ["all GPU", "slots to spare", "slots all taken"])
def test_plan_decode_step_of_256_short_sequences(benchmark: Any, slots: str) -> None:
    """Sequences of 1,100 tokens in blocks of 256, all resident. The rest of the 4,500 slots are free, or hold blocks
    that no sequence reads.
    """
    kv: KVCacheManager = BlockManager(6000, 256)
    if slots != "all GPU":
        kv = HybridKVCacheManager(6000, 4500, 256, 32)
    if slots == "slots all taken":
        earlier = Scheduler(kv, max_num_seqs=1, max_num_batched_tokens=16384)
        earlier.add(make_sequence(256, 4500 * 256 - 1, max_tokens=1))
        while earlier.has_unfinished:
            step(earlier)
    scheduler = decoding_scheduler(kv, [1100] * 256, 16384, max_tokens=200)
    moves = timed(benchmark, 256, "sequence", lambda: plan_decode(kv, scheduler.running))
    assert len(scheduler.running) == 256 and moves == KVMoves()


def test_plan_decode_step_of_a_131k_sequence(benchmark: Any) -> None:
    """512 blocks of 256 tokens, 384 of them streamed."""
    kv = HybridKVCacheManager(1030, 128, 256, 32)
    scheduler = decoding_scheduler(kv, [2**17 - 200], 16384, max_tokens=100)
    moves = timed(benchmark, 512, "block", lambda: plan_decode(kv, scheduler.running))
    assert sum(len(group.cpu_block_ids) for group in moves.streamed) == 511 - 127


@pytest.mark.parametrize("shared", [0, 3000, 100_000], ids=["nothing shared", "system prompt", "document"])
def test_plan_step_of_a_prompt_with_255_waiting(benchmark: Any, shared: int) -> None:
    """Prompts with a common prefix look for a prompt that is being computed. The first has 200,000 more tokens."""
    beginning = [_rng.randrange(VOCAB_SIZE) for _ in range(shared)]
    params = SamplingParams(max_tokens=9)

    def scheduler_with_waiting() -> tuple[tuple[Scheduler], dict[str, Any]]:
        scheduler = Scheduler(BlockManager(20_000, 256), max_num_seqs=256, max_num_batched_tokens=2048)
        for seq_id in range(256):
            own = [_rng.randrange(VOCAB_SIZE) for _ in range(200_000 if seq_id == 0 else 400)]
            scheduler.add(Sequence(seq_id, beginning + own, params, seed=0))
            if seq_id == 0:
                scheduler.schedule()
        scheduler.schedule()
        return (scheduler,), {}

    benchmark.pedantic(lambda scheduler: scheduler.schedule(), setup=scheduler_with_waiting, rounds=7)
    note(benchmark, 255, "waiting prompt")
