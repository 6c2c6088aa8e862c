"""The KV cache as memory whose cells hold tags instead of numbers: what a wrong plan does to attention, without torch.

A tag stands for a token and all tokens before it, so two cells hold the same tag only where their K/V are the same.
`ContentRunner.launch` does to the cells what a plan says, in the documented order, and checks that every sequence of
the step sees each of its own tokens exactly once. `Simulation` drives a scheduler with it as Engine.step does.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from integrity import check_scheduler
from simulated_disk import SimulatedDisk

from nanovllm.capabilities.draft_head.pages import HeadStep, PageCopies, PageCopy
from nanovllm.capabilities.recurrent.places import StateFlush, StateFlushes, StateStep
from nanovllm.capabilities.shadow.pages import DraftKeys, PageFill, ShadowFills, ShadowPages
from nanovllm.capabilities.speculation.drafters import Drafter
from nanovllm.capabilities.speculation.speculator import Speculator
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.block_pool import Block, BlockPool
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.seams import Companion
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.plan.shadow_spec import SINK_TOKENS
from nanovllm.plan.step_plan import KVMoves, SequenceStep, StepPlan, find_payload
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.schedule.step_bound import StepBound

EOS = 0
VOCAB_SIZE = 7
_EMPTY = -1


class ContentError(AssertionError):
    """A sequence would attend to something else than its own tokens, each once."""


Kind = TypeVar("Kind", bound=Companion)


def companion_of(kv: KVCacheManager, kind: type[Kind]) -> Kind:
    """The manager's companion of this type."""
    (found,) = (each for each in kv.companions if isinstance(each, kind))
    return found


def state_of(step: SequenceStep) -> StateStep | None:
    return step.payload(StateStep)


def head_of(step: SequenceStep) -> HeadStep | None:
    return step.payload(HeadStep)


def page_copies(plan: StepPlan) -> tuple[PageCopy, ...]:
    copies = find_payload(plan.moves.payloads, PageCopies)
    return () if copies is None else copies.copies


def state_flushes(plan: StepPlan) -> tuple[StateFlush, ...]:
    flushes = find_payload(plan.moves.payloads, StateFlushes)
    return () if flushes is None else flushes.flushes


def extend_tags(tags: list[int], token_ids: list[int], salt: int = 0) -> None:
    """Append the tags of `token_ids`, which follow the tokens that `tags` stand for."""
    for token_id in token_ids:
        parent = tags[-1] if tags else salt
        tags.append(xxhash.xxh64_intdigest(parent.to_bytes(8, "little") + token_id.to_bytes(8, "little")) >> 1)


def tokens(count: int, start: int = 0) -> list[int]:
    """`count` token ids that repeat in no block of the sizes used in tests."""
    return [start + i * i % 1009 for i in range(count)]


def next_token(tag: int) -> int:
    """Return the model's answer after the token with this tag."""
    return tag % VOCAB_SIZE


def expected_answer(prompt: list[int], params: SamplingParams) -> list[int]:
    tags: list[int] = []
    extend_tags(tags, prompt)
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        answer.append(next_token(tags[-1]))
        extend_tags(tags, answer[-1:])
        if answer[-1] in params.stop_token_ids or (answer[-1] == EOS and not params.ignore_eos):
            break
    return answer


def num_equal(a: list[int], b: list[int]) -> int:
    """Count the first elements that are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def longest_prefix_left(pool: BlockPool, seq: Sequence) -> int:
    """Tokens of `seq` whose grains are in some block, by looking at all blocks; one token is left to compute."""
    return len(_prefixes_left(pool, seq)) * pool.index.grain


def longest_state_left(pool: BlockPool, seq: Sequence) -> int:
    """Return the tokens up to the last one behind which there is a snapshot."""
    snapshots = pool.index.snapshots
    assert snapshots is not None
    numbers = enumerate(_prefixes_left(pool, seq), 1)
    return max((i * pool.index.grain for i, prefix_id in numbers if prefix_id in snapshots), default=0)


def _prefixes_left(pool: BlockPool, seq: Sequence) -> list[int]:
    """The ids of the prefixes of `seq` up to each of these grains."""
    grain, block_size = pool.index.grain, pool.index.block_size
    num_known = (len(seq.token_ids) - 1) // grain * grain if pool.enable_prefix_caching else 0
    num_matched, prefix_id = 0, ~seq.hash_salt
    found_ids: list[int] = []
    while num_matched < num_known:
        wanted = seq.token_ids[num_matched : min(num_matched + block_size, num_known)].tolist()
        held = [block for block in pool.blocks if block.prefix_ids[:1] == [prefix_id]]
        num_grains, block = max(
            ((num_equal(block.token_ids.tolist(), wanted) // grain, block) for block in held),
            key=lambda found: found[0],
            default=(0, None),
        )
        num_matched += num_grains * grain
        found_ids += block.prefix_ids[1 : 1 + num_grains] if block is not None else []
        if block is None or num_grains * grain < block_size:
            break
        prefix_id = block.prefix_ids[-1]
    return found_ids


@dataclass
class _Content:
    """All tokens of a request up to the newest sampled one."""

    token_ids: list[int]
    tags: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        extend_tags(self.tags, self.token_ids[len(self.tags) :])

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        extend_tags(self.tags, [token_id])

    def copy(self) -> "_Content":
        return _Content(list(self.token_ids), list(self.tags))


class _State(NamedTuple):
    tag: int
    pending: tuple[int, ...] = ()


class _Pair(NamedTuple):
    """An input of the draft head: a token, by its tag, and the one after it."""

    tag: int
    next_token: int


class _HeadContent:
    """The cells of the draft head as pairs, and the pairs that it has results for."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cells: dict[tuple[int, int], _Pair] = {}  # by page and offset
        self._kept: dict[tuple[int, int], _Pair] = {}  # by slot, and by number among its last tokens
        self._hit_ends: dict[int, int] = {}  # by seq_id: tokens whose cells may be those of other sequences
        self._cuts: set[int] = set()  # tags of tokens at the end of a hit

    def _cell(self, step: SequenceStep, position: int) -> tuple[int, int]:
        assert head_of(step) is not None
        return head_of(step).pages[position // self._block_size], position % self._block_size

    def begin_draft(self, step: SequenceStep, run: _Content, num_drafts: int) -> None:
        """The first draft is made from a result of the step before. Each further one writes a cell."""
        assert state_of(step) is not None
        expected = _Pair(run.tags[step.position - 1], run.token_ids[step.position])
        kept = self._kept[state_of(step).source, state_of(step).num_replayed]
        if kept != expected:
            raise ContentError(f"sequence {step.seq_id} drafts at {step.position} from {kept}")
        for position in range(step.position, step.position + num_drafts - 1):
            self._cells[self._cell(step, position)] = _Pair(_EMPTY, _EMPTY)

    def follow(self, plan: StepPlan, runs: list[_Content], sampled: list[list[int]]) -> None:
        """Go through the tokens of a step, and check the cells of all tokens that are certain."""
        for step, run, own in zip(plan.sequences, runs, sampled, strict=True):
            assert state_of(step) is not None and head_of(step) is not None
            if state_of(step).load >= 0:
                self._hit_ends[step.seq_id] = step.position
                self._cuts.add(run.tags[step.position - 1])
            end, next_tokens = step.position + step.num_tokens, own or [head_of(step).next_token]
            tokens = [*run.token_ids[step.position + 1 : end - len(next_tokens) + 1], *next_tokens]
            for position, token_id in enumerate(tokens, step.position):
                self._cells[self._cell(step, position)] = _Pair(run.tags[position], token_id)
            for i in range(len(next_tokens)):
                cell = self._cell(step, end - len(next_tokens) + i)
                self._kept[state_of(step).target, i] = self._cells[cell]
        for source, target, num_tokens in page_copies(plan):
            for offset in range(num_tokens):
                self._cells[target, offset] = self._cells[source, offset]
        for step, run in zip(plan.sequences, runs, strict=True):
            self._check(step, run, step.position + step.num_tokens - step.num_guesses)

    def _check(self, step: SequenceStep, run: _Content, num_certain: int) -> None:
        """The token after the last one may not be known yet. Where a hit or one of its blocks ends, it may be another
        sequence's.
        """
        for position in range(num_certain):
            tag, token_id = self._cells[self._cell(step, position)]
            is_hit, end = position < self._hit_ends.get(step.seq_id, 0), position + 1
            may_differ = end == num_certain or tag in self._cuts or (is_hit and end % self._block_size == 0)
            if tag != run.tags[position] or not (may_differ or token_id == run.token_ids[position + 1]):
                raise ContentError(f"sequence {step.seq_id} finds {tag}, {token_id} in the head's cell {position}")


class ContentRunner:
    """A ModelRunner of one layer whose K/V are tags. It drafts the right token with probability `draft_acceptance`.

    `lacks_pages`: the shadow has not a page for every block.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        draft_acceptance: float = 0.5,
        lacks_pages: bool = False,
    ) -> None:
        self.block_size = block_size
        self.lacks_pages = lacks_pages
        self.draft_acceptance, self._rng = draft_acceptance, random.Random(0)
        self.gpu = np.full((num_gpu_blocks, block_size), _EMPTY, dtype=np.int64)
        self.cpu = np.full((num_cpu_blocks, block_size), _EMPTY, dtype=np.int64)
        self.pages: dict[int, list[int]] = {}  # the shadow's pages: the tags of a block
        self.sinks: dict[int, list[int]] = {}  # the shadow's sinks: the tags of the block's first tokens
        self.contents: dict[int, _Content] = {}
        self._sampled: list[int] = []
        # A state is the tag of the last token that it covers. Slots have the tags of pending guesses, too
        self.states: dict[int, _State] = {}  # by slot
        self.snapshots: dict[int, _State] = {}
        self.head = _HeadContent(block_size)  # for plans with steps of the draft head

    def add(self, seq_id: int, prompt: list[int]) -> None:
        self.contents[seq_id] = _Content(list(prompt))

    def launch(self, plan: StepPlan) -> list[int]:
        """The sampled tokens, then the drafted ones. Raises ContentError. Order of effects: see KVMoves."""
        fills = find_payload(plan.moves.payloads, ShadowFills) or ShadowFills((), ())
        for fill in fills.resident:
            self._fill(fill, self.gpu)
        for slot, snapshot in state_flushes(plan):
            self.snapshots[snapshot] = self.states[slot]
        for step in plan.sequences:
            if state_of(step) is not None and state_of(step).load >= 0:
                self.states[state_of(step).source] = self.snapshots[state_of(step).load]
        drafted = self._draft(plan)
        runs = [self._tokens(row, step, drafted) for row, step in enumerate(plan.sequences)]
        self._copy_in(plan.moves)
        written: set[tuple[int, int]] = set()
        for step, run in zip(plan.sequences, runs, strict=True):
            self._store(step, run, written)
        for copy in plan.moves.copies:
            self.gpu[copy.dst_slot, : copy.num_tokens] = self.gpu[copy.src_slot, : copy.num_tokens]
        for slot, cpu_block_id, start, end in plan.moves.offloads:
            self.cpu[cpu_block_id, start:end] = self.gpu[slot, start:end]
        for row, (step, run) in enumerate(zip(plan.sequences, runs, strict=True)):
            self._check_keys(row, step, run, plan.moves)
        streamed = {block_id for group in plan.moves.streamed for block_id in group.cpu_block_ids}
        for fill in fills.streamed:
            assert fill.block_id in streamed, f"{fill} waits for a block that is not streamed"
            self._fill(fill, self.cpu)
        self._advance_states(plan, runs)
        return self._sample_all(plan, runs, drafted)

    def _fill(self, fill: PageFill, blocks: np.ndarray) -> None:
        self.pages[fill.page] = blocks[fill.block_id].tolist()
        if fill.sink >= 0:
            self.sinks[fill.sink] = self.pages[fill.page][:SINK_TOKENS]

    def _sample_all(self, plan: StepPlan, runs: list[_Content], drafted: list[dict[int, int]]) -> list[int]:
        steps = zip(plan.sequences, runs, strict=True)
        sampled = [[] if step.sampling is None else self._sample(step, run) for step, run in steps]
        if head_of(plan.sequences[0]) is not None:
            self.head.follow(plan, runs, sampled)
        self._sampled = [token_id for of_step in sampled for token_id in of_step]
        return self._sampled + [token_id for ids in drafted for token_id in ids.values()]

    def _advance_states(self, plan: StepPlan, runs: list[_Content]) -> None:
        written: list[int] = []
        for step, run in zip(plan.sequences, runs, strict=True):
            state, end = state_of(step), step.position + step.num_tokens - step.num_guesses
            if state is None:
                continue
            self._check_state(step, run)
            self.states[state.target] = _State(run.tags[end - 1], tuple(run.tags[end : end + step.num_guesses]))
            written.append(state.target)
            for save in state.saves:
                assert save.num_tokens <= end - step.position, "a state is saved after guesses"
                is_end = step.position + save.num_tokens == end
                assert (save.slot == state.target) == is_end, "only a state at the end is where the sequence's is"
                if not is_end:
                    self.states[save.slot] = _State(run.tags[step.position + save.num_tokens - 1])
                    written.append(save.slot)
        assert 0 not in written and len(set(written)) == len(written), f"slots {written} are written"
        for step in plan.sequences:
            for save in state_of(step).saves if state_of(step) is not None else ():
                self.snapshots[save.snapshot] = self.states[save.slot]

    def _check_state(self, step: SequenceStep, run: _Content) -> None:
        """The state that the new tokens start from is that of all tokens before them."""
        assert state_of(step) is not None
        expected, seen = run.tags[: step.position], []
        if state_of(step).source >= 0:
            tag, pending = self.states[state_of(step).source]
            seen = [tag, *pending[: state_of(step).num_replayed]]
        if seen != expected[len(expected) - len(seen) :] or bool(seen) != bool(expected):
            raise ContentError(f"sequence {step.seq_id} starts at {step.position} from the state {seen}")

    def _draft(self, plan: StepPlan) -> list[dict[int, int]]:
        """For each draft, its token by row."""
        drafted: list[dict[int, int]] = []
        for rows in plan.draft_rows():
            has_head = head_of(plan.sequences[0]) is not None
            assert has_head or not (plan.moves.loads or plan.moves.copies), "a draft runs before slots are filled"
            assert all(step.previous_row < 0 for step in plan.sequences), "drafts take the place of pending tokens"
            ids = {}
            for row in rows:
                step = plan.sequences[row]
                self._check_draft_keys(step)
                if has_head and not drafted:
                    self.head.begin_draft(step, self.contents[step.seq_id], step.num_drafts)
                elif state_of(step) is not None and not has_head:
                    self._check_state(step, self.contents[step.seq_id])
                    assert state_of(step).draft_slot > 0, "drafts have no slot"
                    self.states[state_of(step).draft_slot] = _State(-1)
                run = self.contents[step.seq_id].copy()
                for before in drafted:
                    run.append(before[row])
                is_right = self._rng.random() < self.draft_acceptance
                ids[row] = next_token(run.tags[-1]) if is_right else self._rng.randrange(VOCAB_SIZE)
            drafted.append(ids)
        return drafted

    def _check_draft_keys(self, step: SequenceStep) -> None:
        """Drafts read the keys before the step's, once each; where pages are missing, some of them, and the newest."""
        keys = step.payload(DraftKeys)
        if keys is None:
            return
        sink, pages, block_table, num_paged_keys = keys
        first = self.pages[pages[0]][:SINK_TOKENS] if pages else []
        if (sink >= 0 or not self.lacks_pages) and first and self.sinks.get(sink) != first:
            raise ContentError(f"a draft of sequence {step.seq_id} reads sink {sink} in place of {first}")
        exact = self.gpu[list(block_table)].reshape(-1)[: num_paged_keys - step.num_tokens].tolist()
        seen = [tag for page in pages for tag in self.pages[page]] + exact
        expected = self.contents[step.seq_id].tags[: step.position]
        missing = set(expected) - set(seen)
        num_newest = step.position % self.block_size
        if (
            len(set(seen)) < len(seen)
            or set(seen) - set(expected)
            or missing & set(expected[-num_newest or step.position :])
        ):
            raise ContentError(f"a draft of sequence {step.seq_id} reads {seen} of {expected}")
        if missing and not self.lacks_pages:
            raise ContentError(f"a draft of sequence {step.seq_id} misses {missing}")

    def _tokens(self, row: int, step: SequenceStep, drafted: list[dict[int, int]]) -> _Content:
        """All tokens of the sequence up to the last one of the step, guesses included."""
        content = self.contents[step.seq_id].copy()
        token_ids = step.token_ids.tolist()
        num_known = step.num_tokens - step.num_guesses
        if step.previous_row >= 0:
            assert token_ids[num_known - 1] == -1, f"a known token of sequence {step.seq_id} is replaced"
            token_ids[num_known - 1] = self._sampled[step.previous_row]
        start = step.position
        if token_ids[:num_known] != content.token_ids[start : start + num_known]:
            raise ContentError(f"sequence {step.seq_id} runs {token_ids}, not its tokens from {start}")
        assert not step.num_guesses or len(content.token_ids) == start + 1, "guesses follow the newest token"
        for i, guess in enumerate(token_ids[num_known:]):
            content.append(drafted[i][row] if guess < 0 else guess)
        return content

    def _copy_in(self, moves: KVMoves) -> None:
        for slot, cpu_block_id, start, end in moves.flushes:
            self.cpu[cpu_block_id, start:end] = self.gpu[slot, start:end]
        for cpu_block_id, slot, num_tokens in moves.loads:
            self.gpu[slot, :num_tokens] = self.cpu[cpu_block_id, :num_tokens]

    def _store(self, step: SequenceStep, run: _Content, written: set[tuple[int, int]]) -> None:
        for cell, tag in self._new_cells(step, run).items():
            if cell in written:
                raise ContentError(f"sequence {step.seq_id} writes cell {cell}, which another one writes too")
            written.add(cell)
            self.gpu[cell] = tag

    def _new_cells(self, step: SequenceStep, run: _Content) -> dict[tuple[int, int], int]:
        """(slot, offset) and tag of each new token."""
        tags = run.tags[step.position : step.position + step.num_tokens]
        return {
            (step.block_table[i // self.block_size], i % self.block_size): tag
            for i, tag in enumerate(tags, start=step.num_paged_keys - step.num_tokens)
        }

    def _check_keys(self, row: int, step: SequenceStep, run: _Content, moves: KVMoves) -> None:
        paged = self.gpu[list(step.block_table)].reshape(-1)[: step.num_paged_keys].tolist()
        brought_in = []
        for group in moves.streamed:
            tags = self.cpu[[group.cpu_block_ids[i] for i in group.tables[row]]].reshape(-1)
            brought_in += tags[: group.context_lens(self.block_size)[row]].tolist()
        for span in moves.cpu_spans[row] if moves.cpu_spans else ():
            brought_in += self.cpu[span.cpu_block_id, span.start : span.end].tolist()
        self._compare(step, run, paged, brought_in)

    def _compare(self, step: SequenceStep, run: _Content, paged: list[int], brought_in: list[int]) -> None:
        end = step.position + step.num_tokens
        expected = run.tags[:end]
        if paged[-step.num_tokens :] != expected[step.position :]:
            raise ContentError(f"sequence {step.seq_id}: its new tokens are not its last paged keys")
        if sorted(paged + brought_in) != sorted(expected):
            position_of = {tag: position for position, tag in enumerate(expected)}
            seen = [position_of.get(tag, "foreign") for tag in paged + brought_in]
            raise ContentError(f"sequence {step.seq_id} needs keys 0..{end - 1} once each, sees {seen}")

    def _sample(self, step: SequenceStep, run: _Content) -> list[int]:
        """The token after the last known one and after each guess. Those before the first wrong guess are kept."""
        content = self.contents[step.seq_id]
        assert step.sampling is not None and step.sampled_position == len(content.token_ids)
        first = step.position + step.num_tokens - step.num_guesses - 1
        sampled = [next_token(tag) for tag in run.tags[first : first + 1 + step.num_guesses]]
        guesses = run.token_ids[len(run.token_ids) - step.num_guesses :] if step.num_guesses else []
        content.append(sampled[0])
        for guess, before, token_id in zip(guesses, sampled, sampled[1:], strict=False):
            if guess != before:
                break
            content.append(token_id)
        return sampled


def make_content_runner(kv: KVCacheManager) -> ContentRunner:
    lacks_pages = any(isinstance(each, ShadowPages) and len(each) < len(kv.pool.blocks) for each in kv.companions)
    if isinstance(kv, HybridKVCacheManager):
        return ContentRunner(len(kv.ring), len(kv.blocks), kv.block_size, lacks_pages=lacks_pages)
    assert isinstance(kv, BlockManager)
    return ContentRunner(len(kv.pool.blocks), 0, kv.block_size, lacks_pages=lacks_pages)


class Simulation:
    """A scheduler, a manager and a ContentRunner.

    depth: 1 plans a step before the last one's tokens are back, as on a GPU. change_plan: a fault to be noticed.
    step_s: what the step took that ends. make_runner: from the manager. make_drafter: from the manager and the runner,
    for a scheduler that speculates. first_id: the id of the first request.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        depth: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        chunked_prefill: bool = True,
        change_plan: Callable[[StepPlan], StepPlan] = lambda plan: plan,
        make_runner: Callable[[Any], ContentRunner] = make_content_runner,
        make_drafter: Callable[[KVCacheManager, ContentRunner], Drafter] | None = None,
        max_guesses: int = 5,
        step_bound: StepBound | None = None,
        step_s: Callable[[], float | None] = lambda: None,
        make_disk: Callable[[KVCacheManager, ContentRunner], SimulatedDisk] | None = None,
        first_id: int = 0,
    ) -> None:
        self.kv, self.depth, self.change_plan, self.step_s = kv, depth, change_plan, step_s
        self._first_id = first_id
        self.runner = make_runner(kv)
        self.disk = None if make_disk is None else make_disk(kv, self.runner)
        speculator = None
        if make_drafter is not None:
            drafter = make_drafter(kv, self.runner)
            speculator = Speculator([drafter], vocab_size=VOCAB_SIZE, max_guesses=max_guesses, times=None)
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked_prefill=chunked_prefill,
            eos_token_ids=(EOS,),
            speculator=speculator,
            max_step_rows=max(max_num_seqs, 1 + max_guesses),
            step_bound=step_bound,
            store=None if self.disk is None else self.disk.tier,
        )
        self.sequences: list[Sequence] = []
        self.in_flight: tuple[StepPlan, list[int]] | None = None
        self.plans: list[StepPlan] = []
        self._preempt_next = False
        self._admitted: set[int] = set()
        self._known_hashes: set[int] = set()  # all grains that a prompt could match
        self._taken_hashes: set[int] = set()  # the grains in blocks that were handed out since
        self._hook_manager()
        self._hook_pool()

    @property
    def pool(self) -> BlockPool:
        return self.kv.pool  # type: ignore[attr-defined, no-any-return]

    # -- hooks: forced preemption, what prompts find -------------------------------------------------------------

    def preempt_next(self) -> None:
        """In the next step that has a running sequence, the first of them finds no room, so the tail must go."""
        self._preempt_next = True

    def _hook_manager(self) -> None:
        num_placeable, admit = self.kv.num_placeable, self.kv.admit

        def hooked_num_placeable(seq: Sequence, num_tokens: int) -> int:
            if self._preempt_next and seq.seq_id not in self._admitted:
                self._preempt_next = False
                return 0
            return num_placeable(seq, num_tokens)

        def hooked_admit(seq: Sequence) -> None:
            self._admitted.add(seq.seq_id)
            match = self.pool.match(seq)
            num_found = len(match.full_blocks) * self.pool.index.block_size + match.num_partial_tokens
            longest = longest_prefix_left if self.pool.index.snapshots is None else longest_state_left
            assert num_found == longest(self.pool, seq), f"sequence {seq.seq_id} could match more"
            admit(seq)

        self.kv.num_placeable, self.kv.admit = hooked_num_placeable, hooked_admit  # type: ignore[method-assign]

    def _hook_pool(self) -> None:
        take = self.pool.allocate

        def hooked_take(block: Block | None = None) -> Block:
            self._taken_hashes.update((block or self.pool.next_free_block).grain_hashes)
            return take(block)

        self.pool.allocate = hooked_take  # type: ignore[method-assign]

    # -- operations ----------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], max_tokens: int = 4, *, ignore_eos: bool = True, **params: object) -> Sequence:
        """Raises ValueError when the request can never run."""
        seq_id = self._first_id + len(self.sequences)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params)  # type: ignore[arg-type]
        seq = Sequence(seq_id, list(prompt), sampling, seed=seq_id)
        self.scheduler.kv.check_fits(seq)
        self.scheduler.add(seq)
        self.sequences.append(seq)
        self.runner.add(seq_id, prompt)
        return seq

    def step(self) -> StepPlan | None:
        """Does what Engine.step does, then checks everything. Raises ContentError or AssertionError."""
        self._admitted.clear()
        preemptions = self.scheduler.num_preemptions
        if self.in_flight is not None and self.scheduler.needs_tokens():
            self._commit(*self.in_flight)
            self.in_flight = None
        plan = self.scheduler.schedule()
        launched = None
        if plan is not None:
            plan = self.change_plan(plan)
            self._check_plan(plan)
            launched = plan, self.runner.launch(plan)
            self.plans.append(plan)
        elif self.in_flight is None and self.scheduler.has_unfinished:
            is_loading = self.disk is not None and bool(self.disk.tier.num_waiting or self.disk.tier.holders)
            assert is_loading or self.scheduler.num_preemptions > preemptions, "sequences wait, and none can run"
        if self.depth == 0:
            self.in_flight, launched = launched, None
        if self.in_flight is not None:
            self._commit(*self.in_flight)
        self.in_flight = launched
        if self.disk is not None:
            self.disk.step()
        self.check_integrity()
        return plan

    def _commit(self, plan: StepPlan, token_ids: list[int]) -> None:
        if self.scheduler.sharing.bound is not None:
            self.scheduler.sharing.bound.times.step_ended(plan, self.step_s())
        self.scheduler.commit(plan, token_ids)

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq.seq_id)
        self.check_integrity()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until all is done; then nothing may be left over."""
        for _ in range(max_steps):
            is_loading = self.disk is not None and bool(self.disk.tier.holders)
            if not self.scheduler.has_unfinished and self.in_flight is None and not is_loading:
                break
            self.step()
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        self.check_done()

    # -- checks --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        scheduler = self.scheduler
        check_scheduler(scheduler)
        for queue in (scheduler.running, scheduler.waiting):
            order = [seq.seq_id for seq in queue]
            assert order == sorted(set(order)), f"not in order of arrival: {order}"
        assert len(scheduler.running) <= scheduler.max_num_seqs, "more sequences run than allowed"
        known = {grain_hash for block in self.pool.blocks for grain_hash in block.grain_hashes}
        assert self._known_hashes - known <= self._taken_hashes, "a grain was lost, and no block that held it was taken"
        self._known_hashes = known
        self._taken_hashes.clear()

    def _check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.scheduler.max_num_batched_tokens, f"{plan.num_tokens} tokens in a step"
        for step in plan.sequences:
            assert step.num_tokens > 0, f"sequence {step.seq_id} runs nothing"
        if isinstance(self.kv, HybridKVCacheManager):
            self._check_fewest_misses(plan)

    def _check_fewest_misses(self, plan: StepPlan) -> None:
        """Every slot that this step neither writes nor must keep for a partial block serves a block that is read."""
        assert isinstance(self.kv, HybridKVCacheManager)
        block_size, ring = self.kv.block_size, self.kv.ring
        by_id = {seq.seq_id: seq for seq in self.sequences}
        needed: set[int] = set()
        for step in plan.sequences:
            needed.update(by_id[step.seq_id].block_table[: step.position // block_size])
        occupied = {copy.src_slot for copy in plan.moves.copies}
        for step in plan.sequences:  # the slots of the chunk, from the block of its first token on
            first = (step.num_paged_keys - step.num_tokens) // block_size
            occupied.update(step.block_table[first:])
        for seq in self.scheduler.running:
            if seq.num_computed_tokens % block_size:
                occupied.add(self.kv.blocks[seq.block_table[seq.num_computed_tokens // block_size]].ring_slot)
        needed -= {held.block_id for held in (ring.blocks[slot] for slot in occupied) if held is not None}
        missing = {block_id for group in plan.moves.streamed for block_id in group.cpu_block_ids}
        missing |= {span.cpu_block_id for spans in plan.moves.cpu_spans for span in spans}
        fewest = max(0, len(needed) - (len(ring) - len(occupied)))
        assert len(missing) == fewest, f"{len(missing)} blocks are missing, {fewest} would do"

    def check_done(self) -> None:
        """Every request has ended with the right tokens, and all memory is free again."""
        for seq in self.sequences:
            assert seq.status is SequenceStatus.FINISHED, f"sequence {seq.seq_id} is lost"
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            answer = expected_answer(prompt, seq.params)
            if seq.finish_reason == "abort":
                assert seq.output_token_ids == answer[: len(seq.output_token_ids)]
            else:
                assert seq.output_token_ids == answer, f"sequence {seq.seq_id} answered wrongly"
                last_ends = answer[-1] in seq.params.stop_token_ids or (answer[-1] == EOS and not seq.params.ignore_eos)
                assert seq.finish_reason == ("stop" if last_ends else "length")
        assert self.pool.num_free == len(self.pool.blocks), "blocks are lost"
        if isinstance(self.kv, HybridKVCacheManager):
            held = [block for block in self.kv.ring.blocks if block is not None]
            assert not any(block.being_written for block in held), "slots are lost"
