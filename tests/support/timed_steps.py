"""A scheduler in simulated time: each step takes what a modelled GPU would need for it. No tensors, no real clock.

As on a GPU, a step is planned while the one before it runs. A request that arrives meanwhile is in the step after.
"""

import random
from dataclasses import dataclass, field

from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StepPlan
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.schedule.step_bound import ChunkTimes, StepBound

QUERY_TILE_TOKENS = 64  # attention in a graph takes as long for one token as for so many
TOKEN_KEYS = 3840  # Qwen3-0.6B: keys whose attention costs as much as a token's linear layers
KV_TOKEN_BYTES = 114_688


@dataclass(frozen=True)
class Gpu:
    """Times like those of one H200 with Qwen3-0.6B. Steps with chunks are launched kernel by kernel, which takes
    `chunk_s` however short they are. The first chunk of each magnitude takes `first_chunk_s` more.

    Chunks of up to `graph_tokens` tokens in all run as a graph, if no key is streamed. They take `graph_chunk_s`
    instead of `chunk_s`, whole tiles of queries, and `graph_key_s` for a token and a key.
    """

    step_s: float = 1.7e-3
    row_s: float = 2.5e-5  # per answer: 32 of them take 2.5 ms
    token_s: float = 1.45e-6  # per token of a chunk
    key_s: float = 3.85e-10  # per token of a chunk and key
    chunk_s: float = 0.0
    first_chunk_s: float = 0.0
    graph_tokens: int = 0
    graph_chunk_s: float = 0.0
    graph_key_s: float = 0.0
    link_byte_per_s: float = 50e9

    def runs_as_graph(self, plan: StepPlan) -> bool:
        num_tokens = sum(step.num_tokens for step in plan.sequences if step.num_tokens != step.num_sampled)
        return num_tokens <= self.graph_tokens and not (plan.moves.brings_in_keys or plan.moves.loads)

    def seconds(self, plan: StepPlan, block_size: int) -> float:
        compute_s = self.step_s
        chunks = [step for step in plan.sequences if step.num_tokens != step.num_sampled]
        in_graph = self.runs_as_graph(plan)
        key_s = self.graph_key_s if in_graph else self.key_s
        for step in plan.sequences:
            if step.num_tokens == step.num_sampled:
                compute_s += self.row_s
                continue
            num_tokens = -(-step.num_tokens // QUERY_TILE_TOKENS) * QUERY_TILE_TOKENS if in_graph else step.num_tokens
            compute_s += num_tokens * (self.token_s + key_s * (step.position + step.num_tokens / 2))
        if chunks:
            compute_s += self.graph_chunk_s if in_graph else self.chunk_s
        num_streamed = sum(group.num_tokens(block_size) for group in plan.moves.streamed)
        num_streamed += sum(load.num_tokens for load in plan.moves.loads)
        streaming_s = num_streamed * KV_TOKEN_BYTES / self.link_byte_per_s
        return max(compute_s, streaming_s)


@dataclass
class Request:
    seq: Sequence
    arrival_s: float
    token_s: list[float] = field(default_factory=list)  # arrival of each token
    num_steps: int = 0  # planned after its arrival, up to the one that samples its first token

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0] - self.arrival_s

    def gaps_s(self, start_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Times per token of those that arrived between the two times."""
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs if start_s <= earlier and later <= end_s]


class TimedSteps:
    def __init__(
        self, kv: KVCacheManager, gpu: Gpu, *, max_step_s: float | None = None, scheduler: type[Scheduler] = Scheduler
    ) -> None:
        self.gpu, self.block_size = gpu, kv.block_size  # type: ignore[attr-defined]
        self.now_s = 0.0
        self.times = ChunkTimes(TOKEN_KEYS, gpu.graph_tokens)
        bound = None
        if max_step_s is not None:
            missing_token_s = KV_TOKEN_BYTES / gpu.link_byte_per_s
            bound = StepBound(self.times, max_step_s=max_step_s, missing_token_s=missing_token_s)
        self.scheduler = scheduler(kv, max_num_seqs=512, max_num_batched_tokens=16_384, step_bound=bound)
        self.requests: list[Request] = []
        self.step_s: list[float] = []
        self._in_flight: tuple[StepPlan, float, float | None] | None = None  # when it ends; how long it takes
        self._rng = random.Random(0)
        self._known_chunks: set[int] = set()  # magnitudes of the tokens of chunks that have run

    def add(self, num_tokens: int, max_tokens: int, token_ids: list[int] | None = None) -> Request:
        seq_id = len(self.requests)
        token_ids = token_ids or [self._rng.randrange(100_000) for _ in range(num_tokens)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(Sequence(seq_id, token_ids, params, seed=0), self.now_s)
        self.scheduler.add(request.seq)
        self.requests.append(request)
        return request

    def step(self) -> StepPlan | None:
        """Plan the next step while the last one runs, then let that one end."""
        for request in self.requests:
            request.num_steps += not request.seq.num_output_tokens
        plan = self.scheduler.schedule()
        launched: tuple[StepPlan, float, float | None] | None = None
        if plan is not None:
            seconds = self.gpu.seconds(plan, self.block_size) + self._preparation_s(plan)
            self.step_s.append(seconds)
            if self._in_flight is None:
                launched = plan, self.now_s + seconds, None  # after a pause
            else:
                launched = plan, self._in_flight[1] + seconds, seconds
        done, self._in_flight = self._in_flight, launched
        if done is not None:
            self._end(*done)
        return plan

    def _preparation_s(self, plan: StepPlan) -> float:
        """Time that only the first chunk of a magnitude takes. Graphs are captured beforehand."""
        if self.gpu.runs_as_graph(plan):
            return 0.0
        chunks = {step.num_tokens.bit_length() for step in plan.sequences if step.num_tokens > step.num_sampled}
        new = chunks - self._known_chunks
        self._known_chunks |= new
        return len(new) * self.gpu.first_chunk_s

    def _end(self, plan: StepPlan, end_s: float, seconds: float | None) -> None:
        self.now_s = end_s
        self.times.step_ended(plan, seconds)
        for seq in self.scheduler.commit(plan, [7] * plan.num_sampled):
            self.requests[seq.seq_id].token_s.append(end_s)

    def run_until(self, *requests: Request) -> None:
        """Step until these have ended; without any, until all have."""
        while any(request.seq.finish_reason is None for request in requests or self.requests):
            self.step()
