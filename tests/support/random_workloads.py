"""Random requests, aborts and forced preemptions for a Simulation, with prompts that share what they begin with."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from content_model import VOCAB_SIZE, ContentRunner, Simulation, next_token
from cpu_splits import RandomSplit, splitter
from odd_drafters import OddDrafter

from nanovllm.capabilities.cpu_attention.cpu_split import CpuSplit
from nanovllm.capabilities.draft_head.pages import HeadPages
from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.capabilities.shadow.pages import ShadowPages
from nanovllm.capabilities.speculation.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.block_pool import PrefixIndex
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.seams import Companion
from nanovllm.plan.sequence import Sequence
from nanovllm.schedule.step_bound import ChunkTimes, StepBound

GRAIN = 2  # tokens, instead of 256
LONG_CHUNK_BLOCKS = 3  # instead of 16, so that small workloads have long chunks
# Three documents that prompts begin with. The second one is the first up to its middle.
_rng = random.Random(0)
_first = [_rng.randrange(1, 7) for _ in range(64)]
DOCUMENTS = (_first, _first[:21] + [_rng.randrange(1, 7) for _ in range(43)], [1] * 64)


@dataclass(frozen=True)
class Add:
    document: int
    num_shared_tokens: int
    suffix: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool

    @property
    def prompt(self) -> list[int]:
        return DOCUMENTS[self.document][: self.num_shared_tokens] + list(self.suffix) or [1]


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Preempt:
    pass


Operation = Add | Steps | Abort | Preempt


def play(simulation: Simulation, operations: list[Operation]) -> int:
    """Play the operations, then run to the end. Returns how many requests were accepted."""
    accepted: list[Sequence] = []
    for operation in operations:
        match operation:
            case Add():
                with suppress(ValueError):  # larger than the pool
                    seq = simulation.add(operation.prompt, operation.max_tokens, ignore_eos=operation.ignore_eos)
                    accepted.append(seq)
            case Steps(count):
                for _ in range(count):
                    if simulation.scheduler.has_unfinished or simulation.in_flight is not None:
                        simulation.step()
            case Abort(which):
                if accepted:
                    simulation.abort(accepted[which % len(accepted)])
            case Preempt():
                simulation.preempt_next()
    num_tokens = sum(seq.num_prompt_tokens + seq.params.max_tokens for seq in accepted)
    simulation.run(max_steps=20 + 20 * num_tokens)
    return len(accepted)


# -- longer and denser than hypothesis makes them by itself; a seed repeats them ---------------------------------------


def dense_operations(rng: random.Random) -> list[Operation]:
    def add() -> Add:
        num_shared_tokens = rng.choice([0, 5, 12, 20, 21, 22, 40, rng.randint(0, 40)])
        suffix = tuple(rng.randrange(7) for _ in range(rng.randint(0, 5)))
        return Add(
            rng.choice([0, 0, 0, 1, 2]), num_shared_tokens, suffix, rng.choice([1, 2, 3, 5, 9, 14]), rng.random() < 0.7
        )

    makers: list[Callable[[], Operation]] = [
        add,
        lambda: Steps(rng.randint(1, 5)),
        lambda: Abort(rng.randrange(40)),
        Preempt,
    ]
    return [rng.choices(makers, weights=[45, 40, 7, 8])[0]() for _ in range(rng.randint(10, 60))]


def dense_schedule(rng: random.Random) -> dict[str, Any]:
    return {
        "depth": rng.randint(0, 1),
        "max_num_seqs": rng.choice([1, 2, 3, 8]),
        "max_num_batched_tokens": rng.choice([1, 2, 3, 5, 8, 13, 64]),
        "chunked_prefill": rng.random() < 0.6,
    }


def dense_manager(
    rng: random.Random,
    hybrid: bool,
    cpu_split: CpuSplit | None = None,
    keeps_first_blocks: bool = False,
    has_shadow: bool = False,
    companions: Seq[Companion] = (),
    model_drafts: bool = True,
) -> KVCacheManager:
    """`companions`: besides the shadow."""
    num_blocks = rng.randint(8, 60 if hybrid else 40)
    num_pages = rng.choice([1, 3, num_blocks, num_blocks]) if has_shadow else 0
    if not hybrid:
        companions = [*([ShadowPages(num_pages, num_pages)] if has_shadow else ()), *companions]
        block_size, enable_prefix_caching = rng.randint(1, 5), rng.random() < 0.8
        return BlockManager(
            num_blocks, block_size, enable_prefix_caching, companions=companions, model_drafts=model_drafts
        )
    num_slots = rng.randint(2, 8)
    if has_shadow:
        num_sinks = num_pages if num_pages == num_blocks else 1
        companions = [ShadowPages(num_pages, num_sinks, rng.choice([0, num_slots])), *companions]
    return HybridKVCacheManager(
        num_blocks,
        num_slots,
        GRAIN * rng.randint(1, 3),
        rng.randint(1, 3),
        rng.random() < 0.8,
        splitter(cpu_split),
        keeps_first_blocks=keeps_first_blocks,
        companions=companions,
        model_drafts=model_drafts,
        grain=GRAIN,
        long_chunk_blocks=LONG_CHUNK_BLOCKS,
        progress_tokens=rng.choice([1, 4, 30]),
    )


def dense_companions(rng: random.Random, schedule: dict[str, Any], has_head: bool) -> list[Companion]:
    states = dense_states(rng, schedule["max_num_seqs"], model_drafts=not has_head)
    return [states, HeadPages()] if has_head else [states]


def dense_states(
    rng: random.Random, max_num_seqs: int, min_snapshots: int = 0, model_drafts: bool = True
) -> RecurrentStates:
    """Slots for `max_num_seqs` sequences, and for few or many states that are saved or drafts."""
    num_slots = 1 + max_num_seqs + rng.choice([0, 1, 2, 8])
    num_snapshots = max(min_snapshots, rng.choice([0, 1, 2, 5, 30, 30]))
    snapshot_tokens = rng.choice([3, 8, 100])
    return RecurrentStates(num_slots, num_snapshots, snapshot_tokens=snapshot_tokens, model_drafts=model_drafts)


def odd_bound(rng: random.Random) -> StepBound:
    """See odd_step_s."""
    times = ChunkTimes(token_keys=rng.choice([1, 50]))
    return StepBound(times, max_step_s=rng.choice([0.001, 0.1]), missing_token_s=rng.choice([0.0, 0.001, 1.0]))


def odd_step_s(rng: random.Random) -> float | None:
    """Steps take any time, whatever they run."""
    return rng.choice([0.0, 0.001, 0.01, 1.0, None])


def odd_drafter(kind: str, seed: int) -> Callable[[KVCacheManager, ContentRunner], Drafter]:
    """Make the drafter of a Simulation: an OddDrafter of this kind, or one of "resident", "shadow" or "mtp" drafts, or
    of "prompt_lookup".
    """

    def make(kv: KVCacheManager, runner: ContentRunner) -> Drafter:
        if kind == "resident":
            return ModelDrafter("resident", kv.misses_keys)
        if kind == "shadow":
            (shadow,) = (each for each in kv.companions if isinstance(each, ShadowPages))
            return ModelDrafter("shadow", shadow.has_pages)
        if kind == "prompt_lookup":
            return PromptLookupDrafter()
        if kind == "mtp":
            return ModelDrafter("mtp", lambda seq: True)

        def next_tokens(seq: Sequence, count: int) -> list[int]:
            run = runner.contents[seq.seq_id].copy()
            for _ in range(count):
                run.append(next_token(run.tags[-1]))
            return run.token_ids[len(run.token_ids) - count :]

        return OddDrafter(kind, next_tokens, VOCAB_SIZE, seed)

    return make


def play_dense(
    seed: int,
    hybrid: bool,
    with_cpu: bool = False,
    drafter: str = "",
    bounded: bool = False,
    hash_bytes: Callable[[bytes], int] | None = None,
    has_states: bool = False,
    has_head: bool = False,
    **options: Any,
) -> Simulation:
    """A dense workload; `options` are the Simulation's, beside a schedule drawn from the seed. `with_cpu`: the CPU
    attends to some of the missing keys. `drafter`: a kind of OddDrafter, to speculate with. `bounded`: by an odd_bound.
    `hash_bytes`: the prefix index's. `has_states`: some layers are recurrent. `has_head`: there is a draft head.
    """
    rng = random.Random(seed)
    if bounded:
        times_rng = random.Random(seed)
        options |= {"step_bound": odd_bound(times_rng), "step_s": lambda: odd_step_s(times_rng)}
        options |= {"chunked_prefill": True}
    if drafter:
        options |= {"make_drafter": odd_drafter(drafter, seed), "max_guesses": rng.choice([1, 2, 3, 5, 9])}
    split = RandomSplit(generator=random.Random(seed)) if with_cpu else None
    has_shadow = drafter == "shadow"
    schedule = dense_schedule(random.Random(seed + 1)) if has_states else {}
    kv = dense_manager(
        rng,
        hybrid,
        split,
        keeps_first_blocks=bool(drafter) and drafter not in ("shadow", "mtp"),
        has_shadow=has_shadow,
        companions=dense_companions(random.Random(seed), schedule, has_head) if has_states else (),
        model_drafts=not has_head,
    )
    simulation = Simulation(kv, **((schedule or dense_schedule(rng)) | options))
    if hash_bytes is not None:
        old = simulation.pool.index
        simulation.pool.index = PrefixIndex(old.block_size, old.grain, hash_bytes=hash_bytes, snapshots=old.snapshots)
    play(simulation, dense_operations(rng))
    return simulation
