"""Engine: token ids in, token ids out, over any executor. Here one that counts instead of running a model."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from integrity import check_scheduler
from tiny_models import write_tiny_model
from virtual_clock import VirtualClock

from nanovllm.engine.engine import Engine
from nanovllm.engine.setup import EngineSetup, Internals, prepare
from nanovllm.engine.step_loop import PAUSE_S
from nanovllm.errors import EngineError, WorkerDiedError
from nanovllm.executor.base import Executor, LaunchedStep
from nanovllm.kvcache.block_manager import BlockManager
from nanovllm.plan.kv_spec import KVCacheSizes, StartReport
from nanovllm.plan.outputs import Ending, Outbox, PositionLogprobs, Receiver, RequestOutput
from nanovllm.plan.sequence import Request, Sequence
from nanovllm.plan.step_plan import StepPlan
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.schedule.step_bound import ChunkTimes, StepBound

END_TOKEN_ID = 40
PARAMS = SamplingParams(max_tokens=5)


class CountedStep(LaunchedStep):
    """Every sequence samples the number of tokens before the new one."""

    def __init__(self, plan: StepPlan, number: int) -> None:
        self.number = number
        self._token_ids = [step.sampled_position for step in plan.sequences if step.sampling is not None]

    def is_done(self) -> bool:
        return True

    def token_ids(self) -> list[int]:
        return self._token_ids

    def seconds(self) -> float:
        return float(self.number)


class CountingExecutor(Executor):
    """Records what an engine that has started calls. `dies_at`: the number of the step in which a rank dies."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.dies_at = dies_at
        self.runner = SimpleNamespace(stats=lambda: {"num_loaded_bytes": 7})  # type: ignore[assignment]

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{method.__name__} is called when an engine starts")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.calls.append("launch")
        return CountedStep(plan, self.calls.count("launch"))

    def wait_for(self, step: LaunchedStep) -> None:
        self.calls.append("wait")
        if self.calls.count("wait") == self.dies_at:
            raise WorkerDiedError("rank 1 died")

    def close(self) -> None:
        self.calls.append("close")


class EndingReceiver(Receiver):
    """Notes the tokens that it reads, and ends its request at `last`, with `error` perhaps."""

    def __init__(self, outbox: Outbox, last: int | None = None, error: str | None = None) -> None:
        super().__init__(outbox)
        self.last, self.error = last, error
        self.token_ids: list[int] = []

    def read(self, seq: Sequence, logprobs: PositionLogprobs | None = None) -> Ending | None:
        self.token_ids.append(seq.token_ids[-1])
        if self.token_ids[-1] != self.last:
            return None
        return Ending("stop" if self.error is None else "error", self.error)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> EngineSetup:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    return prepare(model, {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 20})


class NotedTimes(ChunkTimes):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(token_keys=1)
        self.seconds: list[float | None] = []

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        self.seconds.append(seconds)


def make_engine(
    setup: EngineSetup, ahead: bool = False, dies_at: int | None = None, times: ChunkTimes | None = None
) -> Engine:
    kv = BlockManager(20, setup.config.block_size)
    bound = None if times is None else StepBound(times, max_step_s=1.0)
    scheduler = Scheduler(
        kv, max_num_seqs=8, max_num_batched_tokens=100, eos_token_ids=(END_TOKEN_ID,), step_bound=bound
    )
    report = StartReport(needs_rope_lens=False, link_byte_per_s=None, phases="")
    setup = replace(setup, internals=Internals(works_ahead=ahead))
    return Engine(setup, CountingExecutor(dies_at), scheduler, KVCacheSizes(20), report)


@pytest.fixture(params=[False, True], ids=["in step", "ahead"])
def engine(setup: EngineSetup, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(setup, request.param)
    yield engine
    check_scheduler(engine.scheduler)
    assert not engine.has_requests and not engine.scheduler.has_unfinished


def add(engine: Engine, receiver: Receiver, num_tokens: int, params: SamplingParams = PARAMS) -> int:
    """Queue the prompt 0, 1, 2, ... and return the request id."""
    (seq,) = engine.make_sequences(Request(array("q", range(num_tokens)), params))
    return engine.add_sequence(seq, receiver)


def test_answers_share_the_array_of_the_request_until_their_first_token(engine: Engine) -> None:
    outbox, token_ids = Outbox(), array("q", range(10))
    sequences = engine.make_sequences(Request(token_ids, SamplingParams(max_tokens=3, n=2)))
    for seq in sequences:
        engine.add_sequence(seq, Receiver(outbox))
    assert all(seq.token_ids is token_ids for seq in sequences)
    finish(engine, outbox)
    assert [seq.token_ids.tolist() for seq in sequences] == [list(range(13))] * 2
    assert token_ids == array("q", range(10))


def finish(engine: Engine, outbox: Outbox) -> dict[int, RequestOutput]:
    finished: dict[int, RequestOutput] = {}
    while engine.has_requests or outbox:
        finished |= engine.step(outbox).finished
    return finished


def test_requests_get_their_token_ids_and_no_text(engine: Engine) -> None:
    outbox = Outbox()
    ids = [add(engine, Receiver(outbox), n) for n in (10, 250, END_TOKEN_ID - 2)]
    finished = finish(engine, outbox)
    assert [finished[i]["token_ids"] for i in ids] == [[10, 11, 12, 13, 14], [250, 251, 252, 253, 254], [38, 39, 40]]
    assert [finished[i]["finish_reason"] for i in ids] == ["length", "length", "stop"]
    assert all(finished[i]["text"] is None for i in ids)
    assert engine.stats()["num_loaded_bytes"] == 7


def test_next_step_is_launched_before_the_last_ones_tokens_are_waited_for_when_working_ahead(engine: Engine) -> None:
    add(engine, Receiver(outbox := Outbox()), 10, SamplingParams(max_tokens=2))
    finish(engine, outbox)
    expected = ["launch", "launch", "wait", "wait"] if engine.setup.works_ahead else ["launch", "wait"] * 2
    assert engine.executor.calls == expected  # type: ignore[attr-defined]


def test_receiver_ends_its_request_alone_at_the_token_it_read(engine: Engine) -> None:
    outbox = Outbox()
    receivers = [EndingReceiver(outbox), EndingReceiver(outbox, last=12), EndingReceiver(outbox, last=14, error="no")]
    ids = [add(engine, receiver, 10) for receiver in receivers]
    finished = finish(engine, outbox)
    assert [receiver.token_ids for receiver in receivers] == [[10, 11, 12, 13, 14], [10, 11, 12], [10, 11, 12, 13, 14]]
    assert [finished[i]["token_ids"] for i in ids] == [receiver.token_ids for receiver in receivers]
    assert [finished[i]["finish_reason"] for i in ids] == ["length", "stop", "error"]  # the last had its full length
    assert [finished[i].get("error") for i in ids] == [None, None, "no"]


@pytest.mark.parametrize("aborts", [False, True])
def test_answers_are_passed_on_before_a_long_step_is_launched(setup: EngineSetup, aborts: bool) -> None:
    """Its launch takes as long as several steps. What is aborted in between does no harm."""
    engine, outbox = make_engine(setup, ahead=True, times=NotedTimes()), Outbox()
    calls = engine.executor.calls  # type: ignore[attr-defined]
    answering = add(engine, Receiver(outbox), 3)
    for _ in range(2):
        engine.step(outbox)
    long_ones = [add(engine, Receiver(outbox), 60) for _ in range(2)]
    calls.clear()
    turns = []
    for _ in range(3):
        turns.append((engine.step(outbox).num_decode_tokens, tuple(calls)))
        calls.clear()
        if aborts and len(turns) == 1:
            engine.abort(long_ones[0])
    assert turns[0] == (1, ("wait",)), "the long step is planned, and not launched yet"
    assert turns[1] == (0, ("launch",))
    assert turns[2][1] == ("launch", "wait")
    finished = finish(engine, outbox)
    assert [finished[i]["finish_reason"] for i in (answering, long_ones[1])] == ["length", "length"]
    check_scheduler(engine.scheduler)
    engine.close()


def test_long_prompts_alone_keep_the_engine_one_step_ahead(setup: EngineSetup) -> None:
    """No answer waits for what the step before has sampled."""
    engine, outbox = make_engine(setup, ahead=True, times=NotedTimes()), Outbox()
    add(engine, Receiver(outbox), 250)
    for _ in range(2):
        engine.step(outbox)
    assert engine.executor.calls == ["launch", "launch", "wait"]  # type: ignore[attr-defined]
    finish(engine, outbox)
    engine.close()


@pytest.mark.parametrize("has_answer", [False, True])
def test_long_steps_are_measured_however_long_the_step_before_takes(
    setup: EngineSetup, has_answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they seemed to follow a pause of the caller, and so nothing bounded their length."""
    times, clock = NotedTimes(), VirtualClock(monkeypatch)
    engine, outbox = make_engine(setup, ahead=True, times=times), Outbox()
    executor = engine.executor

    def slow_wait(step: LaunchedStep) -> None:
        clock.pass_time(1.2 * PAUSE_S)

    monkeypatch.setattr(executor, "wait_for", slow_wait)
    if has_answer:
        add(engine, Receiver(outbox), 3)
        engine.step(outbox)
    add(engine, Receiver(outbox), 250)
    finish(engine, outbox)
    assert times.seconds[0] is None and None not in times.seconds[1:]
    engine.close()


def test_rank_that_dies_ends_the_engine_and_names_the_cause(setup: EngineSetup) -> None:
    engine, outbox = make_engine(setup, ahead=True, dies_at=2), Outbox()
    request_id = add(engine, Receiver(outbox), 10)
    with pytest.raises(WorkerDiedError):
        finish(engine, outbox)
    for call in (lambda: engine.step(outbox), engine.stats, lambda: engine.next_output(outbox)):
        with pytest.raises(EngineError, match="a step failed with WorkerDiedError: rank 1 died"):
            call()
    assert not engine.abort(request_id)
    engine.close()
    assert engine.executor.calls[-1] == "close"  # type: ignore[attr-defined]


@pytest.mark.parametrize("ahead", [False, True])
def test_meters_get_the_times_of_the_launched_steps_but_not_after_pauses(
    setup: EngineSetup, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step number n says that it took n seconds. It is unknown how long a step takes after the engine had no requests,
    and after the caller stayed away while the GPU had nothing to do.
    """
    times, clock = NotedTimes(), VirtualClock(monkeypatch)
    engine, outbox = make_engine(setup, ahead, times=times), Outbox()
    for _ in range(2):
        add(engine, Receiver(outbox), 3)
        finish(engine, outbox)
    assert times.seconds == [None, 2, 3, 4, 5, None, 7, 8, 9, 10]
    add(engine, Receiver(outbox), 3)
    for share_of_pause in (0.9, 0.9, 1.1):
        engine.step(outbox)
        clock.pass_time(share_of_pause * PAUSE_S)
    finish(engine, outbox)
    assert times.seconds[10:] == [None, 12, 13, None, 15]
    engine.close()
