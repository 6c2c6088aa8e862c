"""AsyncLLM: answers equal to LLM's, ends of every kind, and slow consumers that hold up nobody."""

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from event_loops import on_a_loop, run, until
from http_server import num_open
from waiting import LIMIT_S, wait_until

from nanovllm import AsyncLLM, EngineError, RequestError, SamplingParams, async_llm
from nanovllm.engine.setup import Internals
from nanovllm.errors import ConfigError, WorkerDiedError
from nanovllm.executor.base import LaunchedStep
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.plan.outputs import RequestOutput
from nanovllm.plan.step_plan import StepPlan
from nanovllm.request_stream import RequestUpdate
from nanovllm.runner.kv_memory import make_offload_engine
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.text.frontend import Prompt

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_kvcache_blocks": 1000,
    "max_num_batched_tokens": 300,
    "enforce_eager": True,
}
OFFLOAD = OPTIONS | {
    "enable_cpu_offload": True, "num_kvcache_blocks": -1, "num_cpu_blocks": 20, "num_gpu_blocks": 4,
    "kvcache_block_size": 256, "cpu_attention": "off", "speculation": "off",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=10**5, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def engine(long_model: Path, request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(long_model, internals=Internals(works_ahead=request.param), **OPTIONS)
    yield engine
    assert engine.failure is None
    engine.close()


async def collect(updates: AsyncIterator[RequestUpdate]) -> dict[int, tuple[str, list[int], RequestOutput]]:
    """Index -> the joined texts and tokens of its updates, and the output, which no other update may follow."""
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    outputs: dict[int, RequestOutput] = {}
    async for update in updates:
        assert update.index not in outputs
        texts[update.index] = texts.get(update.index, "") + update.text
        token_ids[update.index] = token_ids.get(update.index, []) + update.token_ids
        if update.output is not None:
            outputs[update.index] = update.output
    return {index: (texts[index], token_ids[index], outputs[index]) for index in sorted(outputs)}


# -- answers ---------------------------------------------------------------------------------------------------------


def test_generate_updates_joined_are_the_output_of_llm(engine: AsyncLLM) -> None:
    prompts: list[Prompt] = ["Hello", [1, 2, 3]]
    expected = engine.llm.generate(prompts, GREEDY, use_tqdm=False)
    answers = run(collect(engine.generate(prompts, GREEDY)))
    for (text, token_ids, output), llm_output in zip(answers.values(), expected, strict=True):
        assert text == output["text"] == llm_output["text"]
        assert token_ids == output["token_ids"] == llm_output["token_ids"]


def test_generate_several_answers_numbers_them_by_prompt(engine: AsyncLLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=6, ignore_eos=True, seed=7, n=3)
    answers = run(collect(engine.generate(["first", "second"], params)))
    expected = engine.llm.generate(["first"] * 3 + ["second"] * 3, params.per_answer() * 2, use_tqdm=False)
    assert [output["token_ids"] for _, _, output in answers.values()] == [each["token_ids"] for each in expected]


def test_generate_without_tokens_or_without_text_yields_the_other_alone(engine: AsyncLLM) -> None:
    ((text, token_ids, output),) = run(collect(engine.generate("Hello", GREEDY, with_tokens=False))).values()
    assert text == output["text"]
    assert token_ids == []
    assert len(output["token_ids"]) == GREEDY.max_tokens
    ((text, token_ids, output),) = run(collect(engine.generate("Hello", replace(GREEDY, detokenize=False)))).values()
    assert (text, output["text"], token_ids) == ("", None, output["token_ids"])


def num_handed_over(engine: AsyncLLM) -> int:
    """Ends of answers that the engine's thread has handed over, and the loop has not dispatched."""
    with engine._dispatcher._lock:
        return sum(len(content.finished) for content in engine._dispatcher._arrived)


@on_a_loop
async def test_busy_consumers_get_fewer_and_longer_updates(long_model: Path) -> None:
    """Consumers that take 4 ms of the processor for an update get a quarter of the time at most, and lose nothing."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    busy_s, rests_s = list[float](), list[float]()

    async def consume(engine: AsyncLLM, prompt: list[int]) -> None:
        token_ids: list[int] = []
        async for update in engine.generate(prompt, params):
            start_s = time.thread_time()
            while time.thread_time() - start_s < 0.004:
                pass
            busy_s.append(time.thread_time() - start_s)
            token_ids += update.token_ids
        assert len(token_ids) == 120

    async with AsyncLLM(long_model, **OPTIONS) as engine:
        engine._dispatcher._max_rest_s = LIMIT_S
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def note_rest(delay_s: float, callback: Any, *args: Any, **options: Any) -> asyncio.TimerHandle:
            rests_s.extend([delay_s] if callback == engine._dispatcher._end_rest else [])
            return call_later(delay_s, callback, *args, **options)

        loop.call_later = note_rest  # type: ignore[method-assign]
        await asyncio.gather(*(consume(engine, [1, 2, 3 + i]) for i in range(8)))
    assert sum(rests_s) >= 3 * sum(busy_s[: -2 * 8])  # there is no rest after the last steps
    assert len(busy_s) < 8 * 120


def test_streams_that_have_ended_reach_their_consumers_after_another_loop_has_followed(long_model: Path) -> None:
    """A new loop may follow once all requests have ended, even if not all consumers have been woken."""

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    may_step = threading.Event()

    async def submit(engine: AsyncLLM) -> list[asyncio.Task[Any]]:
        launch = engine.llm.engine.executor.launch

        def wait_and_launch(plan: StepPlan) -> LaunchedStep:
            assert may_step.wait(LIMIT_S)
            return launch(plan)

        engine.llm.engine.executor.launch = wait_and_launch  # type: ignore[method-assign]
        tasks = [asyncio.ensure_future(collect(engine.generate([[1, 2, 3]], params))) for _ in range(30)]
        await until(lambda: len(engine._dispatcher._streams) == 30)
        may_step.set()
        wait_until(lambda: num_handed_over(engine) == 30)  # the loop is busy until all have ended
        while engine._dispatcher._streams:
            await asyncio.sleep(0)
        assert engine._dispatcher._has_more, "some consumers have not been woken yet"
        return tasks

    engine, first_loop = AsyncLLM(long_model, **OPTIONS), asyncio.new_event_loop()
    tasks = first_loop.run_until_complete(asyncio.wait_for(submit(engine), LIMIT_S))
    run(collect(engine.generate("Hello", GREEDY)))
    answers = first_loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S))
    assert [len(answer[0][1]) for answer in answers] == [60] * 30
    first_loop.close()
    engine.close()


@on_a_loop
async def test_observer_that_raises_does_not_stop_other_streams(long_model: Path) -> None:
    class Broken:
        def updated(self, index: int) -> None: ...

        def finished(self, output: RequestOutput) -> None:
            raise ValueError("an observer failed")

        def closed(self, num_open: int) -> None: ...

    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
    async with AsyncLLM(long_model, **OPTIONS) as engine:
        stream = await engine.submit([[1, 2, 3]], GREEDY)
        stream.observer = Broken()
        await until(lambda: bool(reported))
        await collect(engine.generate("Hello", GREEDY))
    assert reported == ["an observer failed"]


@on_a_loop
async def test_generate_many_at_once_answers_each(engine: AsyncLLM) -> None:
    prompts = [[1 + i, 2, 3] for i in range(60)]
    expected = engine.llm.generate(prompts, GREEDY, use_tqdm=False)
    answers = await asyncio.gather(*(collect(engine.generate(prompt, GREEDY)) for prompt in prompts))
    assert [answer[0][2]["token_ids"] for answer in answers] == [each["token_ids"] for each in expected]
    assert [answer[0][1] for answer in answers] == [each["token_ids"] for each in expected]


@on_a_loop
async def test_generate_beside_a_blocking_call_both_are_answered(engine: AsyncLLM) -> None:
    blocking = asyncio.to_thread(engine.llm.generate, ["Hello"] * 3, GREEDY, False)
    answers, outputs = await asyncio.gather(collect(engine.generate("Hello", GREEDY)), blocking)
    assert all(output["token_ids"] == answers[0][1] for output in outputs)


def test_generate_impossible_request_raises_and_queues_nothing(engine: AsyncLLM) -> None:
    prompts: list[Prompt] = ["Hello", list(range(256)) * 600]
    with pytest.raises(RequestError, match="max_model_len"):
        run(collect(engine.generate(prompts, GREEDY)))
    assert num_open(engine) == 0


# -- consumers -------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_stream_slow_consumer_gets_merged_updates_and_holds_up_nobody(engine: AsyncLLM) -> None:
    stream = await engine.submit("slow", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    ((_, _, fast),) = (await collect(engine.generate("fast", GREEDY))).values()
    await until(lambda: not engine._dispatcher._streams)  # all has arrived
    updates = [update async for update in stream]
    assert len(fast["token_ids"]) == 8
    assert len(updates) == 1  # all steps in one update
    assert updates[0].output is not None
    assert updates[0].token_ids == updates[0].output["token_ids"]
    assert updates[0].text == updates[0].output["text"]


@on_a_loop
async def test_consumers_have_everything_before_a_long_step_is_launched(long_model: Path) -> None:
    """Launching takes long, and holds the lock of Python that they need. Each of 12 takes a while for its update."""
    num_streams, taken, num_late = 12, Counter[int](), []
    options = OPTIONS | {"max_num_batched_tokens": 400, "max_num_seqs": 64, "max_step_ms": 1000.0}
    engine = AsyncLLM(long_model, internals=Internals(works_ahead=True), **options)
    engine._dispatcher._max_passing_s = LIMIT_S
    bound = engine.llm.scheduler.sharing.bound
    assert bound is not None
    bound.times.step_ended = lambda *args: None  # type: ignore[method-assign]  # so that the clock decides nothing
    launch = engine.llm.engine.executor.launch

    def noting_launch(plan: StepPlan) -> LaunchedStep:
        if max(step.num_tokens for step in plan.sequences) > 200:
            for seq in engine.llm.scheduler.running:
                if len(seq.prompt_token_ids) == 3:
                    num_given = seq.num_output_tokens - seq.num_pending_tokens
                    num_late.append(num_given - taken[seq.prompt_token_ids[2] - 3])
        return launch(plan)

    engine.llm.engine.executor.launch = noting_launch  # type: ignore[method-assign]

    async def consume(number: int) -> None:
        async with aclosing(engine.generate([1, 2, 3 + number], ENDLESS)) as updates:
            async for update in updates:
                taken[number] += len(update.token_ids)
                time.sleep(1e-4)

    consumers = [asyncio.create_task(consume(number)) for number in range(num_streams)]
    await until(lambda: len(taken) == num_streams)
    await collect(engine.generate([[7] * 700], GREEDY))
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    await engine.aclose()
    assert len(num_late) >= 2 * num_streams and not any(num_late), num_late


@on_a_loop
async def test_step_that_is_planned_when_all_requests_are_aborted_runs_before_the_next_request_comes(
    long_model: Path,
) -> None:
    """Regression: it was a long step, and it ran before the first step of the next request, perhaps minutes later. It
    cannot be dropped: prompts are promised the K and V that it writes.
    """
    engine = AsyncLLM(long_model, internals=Internals(works_ahead=True), **(OPTIONS | {"max_step_ms": 1000.0}))
    steps, wait = engine.llm.engine._steps, engine._dispatcher.wait_until_passed_on
    is_planned, is_aborted = threading.Event(), threading.Event()

    def wait_before_a_long_step() -> None:
        wait()
        if steps._planned is not None and not is_planned.is_set():
            is_planned.set()
            assert is_aborted.wait(LIMIT_S)

    engine._dispatcher.wait_until_passed_on = wait_before_a_long_step  # type: ignore[method-assign]
    answer = await engine.submit([1, 2, 3], ENDLESS)
    await anext(answer)
    prompt = await engine.submit([7] * 1000, GREEDY)
    await until(is_planned.is_set)
    answer.close()
    prompt.close()
    assert not engine.llm.engine.has_requests
    is_aborted.set()
    await until(lambda: steps._planned is None)
    await engine.aclose()


# -- the start -------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_engine_starts_in_the_thread_that_runs_its_steps(long_model: Path) -> None:
    """Regression: cuDNN's plans were built in the thread that started the engine, and were of no use to the steps."""
    threads: list[threading.Thread] = []

    def start(*args: Any) -> OffloadEngine:
        threads.append(threading.current_thread())
        return make_offload_engine(*args)

    async with AsyncLLM(long_model, internals=Internals(make_offload_engine=start), **OFFLOAD) as engine:
        launch = engine.llm.engine.executor.launch

        def note_and_launch(plan: StepPlan) -> LaunchedStep:
            threads.append(threading.current_thread())
            return launch(plan)

        engine.llm.engine.executor.launch = note_and_launch  # type: ignore[method-assign]
        await collect(engine.generate("Hello", GREEDY))
    assert len(threads) > 1 and set(threads) == {engine._thread}


def fail(*args: Any) -> NoReturn:
    raise ConfigError("there is no room")


def interrupt_and_go_on(*args: Any) -> NoReturn:
    """Press Ctrl-C, and start the engine for ever."""
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        time.sleep(0.001)


START_ERRORS: dict[str, tuple[Any, dict[str, Any], type[BaseException], str]] = {
    "bad option": (make_offload_engine, {"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
    "failure": (fail, {}, ConfigError, "^there is no room$"),
    "Ctrl-C": (interrupt_and_go_on, {}, KeyboardInterrupt, "^$"),
}


@pytest.mark.parametrize(("start", "options", "error", "message"), START_ERRORS.values(), ids=START_ERRORS)
def test_start_that_fails_or_is_interrupted_raises_the_error_and_leaves_no_thread(
    long_model: Path, start: Any, options: dict[str, Any], error: type[BaseException], message: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error, match=message) as raised:
        AsyncLLM(long_model, internals=Internals(make_offload_engine=start), **(OFFLOAD | options))
    assert raised.type is error
    assert set(threading.enumerate()) <= before


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_updates", [0, 1, 5])
@on_a_loop
async def test_generate_closed_early_aborts_within_a_step(engine: AsyncLLM, num_updates: int) -> None:
    async with aclosing(engine.generate("Hello", ENDLESS)) as updates:
        seen = 0
        while seen < num_updates:
            seen += bool(await anext(updates))
    num_steps = engine.llm.stats()["num_steps"]
    await until(lambda: num_open(engine) == 0)
    assert engine.llm.stats()["num_steps"] <= num_steps + 2


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.004, 0.02, 0.1])
@on_a_loop
async def test_generate_task_cancelled_at_any_stage_leaves_nothing(engine: AsyncLLM, delay_s: float) -> None:
    tasks = [asyncio.create_task(collect(engine.generate("Hello", ENDLESS))) for _ in range(4)]
    await asyncio.sleep(delay_s)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
    )
    await until(lambda: num_open(engine) == 0)
    assert not engine._dispatcher._streams


def test_second_loop_after_the_first_works_and_beside_it_is_refused(engine: AsyncLLM) -> None:
    async def nested() -> None:
        stream = await engine.submit("Hello", ENDLESS)
        try:
            with pytest.raises(RuntimeError, match="one loop at a time"):
                await asyncio.to_thread(lambda: asyncio.run(collect(engine.generate("Hello", GREEDY))))
        finally:
            stream.close()

    run(nested())
    assert run(collect(engine.generate("Hello", GREEDY)))


def test_loop_closed_with_open_requests_next_loop_aborts_them(engine: AsyncLLM) -> None:
    run(engine.submit("Hello", ENDLESS))
    run(collect(engine.generate("Hello", GREEDY)))
    run(until(lambda: num_open(engine) == 0))


@on_a_loop
async def test_close_gives_open_requests_a_last_update(long_model: Path) -> None:
    async with AsyncLLM(long_model, **OPTIONS) as engine:
        stream = await engine.submit("Hello", ENDLESS)
        updates = [await anext(stream)]
    updates += [update async for update in stream]
    with pytest.raises(EngineError, match="closed"):
        await engine.submit("Hello", GREEDY)
    engine.close()
    assert not engine._thread.is_alive()
    assert engine.failure is None
    output = updates[-1].output
    assert output is not None
    assert output["finish_reason"] == "abort"
    assert [token_id for update in updates for token_id in update.token_ids] == output["token_ids"]


@pytest.mark.parametrize("works_ahead", [False, True])
@on_a_loop
async def test_step_that_raises_fails_open_and_later_requests(long_model: Path, works_ahead: bool) -> None:
    def fall(*args: Any) -> LaunchedStep:
        raise OSError("the GPU fell off")

    async with AsyncLLM(long_model, internals=Internals(works_ahead=works_ahead), **OPTIONS) as engine:
        watcher = asyncio.create_task(engine.wait_for_failure())
        streams = [await engine.submit("Hello", ENDLESS) for _ in range(3)]
        await anext(streams[0])
        engine.llm.engine.executor.launch = fall  # type: ignore[method-assign]
        for stream in streams:
            with pytest.raises(EngineError, match="the GPU fell off"):
                await collect(stream)
        assert "the GPU fell off" in str(await watcher)
        assert engine.failure is not None
        assert engine.failure is await engine.wait_for_failure()
        with pytest.raises(EngineError, match="the GPU fell off"):
            await engine.submit("Hello", GREEDY)


@on_a_loop
async def test_dead_rank_fails_an_engine_that_is_idle(long_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_a_death() -> None:
        raise WorkerDiedError("worker rank 1 died")

    monkeypatch.setattr(async_llm, "CHECK_INTERVAL_S", 0.01)
    async with AsyncLLM(long_model, **OPTIONS) as engine:
        engine.llm.engine.executor.check = find_a_death  # type: ignore[method-assign]
        assert "rank 1 died" in str(await engine.wait_for_failure())


@on_a_loop
async def test_answers_that_share_their_edits_are_those_of_separate_requests(engine: AsyncLLM) -> None:
    for more in (
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {65: 4.0, 66: 4.0}, "min_tokens": 4},
        {"bad_words": ["A", "BC", "BBB"], "logit_bias": {33: 6.0, 34: 6.0, 35: 6.0}},
        {"structured_outputs": StructuredOutputs(regex="[a-f]{3,9}")},
    ):
        params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True, **more)  # type: ignore[arg-type]
        stream = await engine.submit([[1, 2, 3]], params)
        found = [output["token_ids"] for output in await stream.outputs()]
        answers = [engine.llm.generate([[1, 2, 3]], each, use_tqdm=False)[0] for each in params.per_answer()]
        assert found == [answer["token_ids"] for answer in answers]
        assert len({*map(str, (answer["token_ids"] for answer in answers))}) == 3


@on_a_loop
async def test_sequences_are_made_off_the_event_loop(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with a repetition penalty, a long prompt blocked the loop for 0.1 s an answer."""
    makers: list[int] = []
    make = engine.llm.engine.make_sequences

    def make_and_note(*args: Any) -> Any:
        makers.append(threading.get_ident())
        return make(*args)

    monkeypatch.setattr(engine.llm.engine, "make_sequences", make_and_note)
    params = SamplingParams(n=3, repetition_penalty=1.5, max_tokens=2)
    outputs = await collect(engine.generate([[1, 2]], params))
    assert (len(outputs), len(makers)) == (3, 1)
    assert threading.get_ident() not in makers


def test_dropped_engine_ends_its_thread_and_is_collected(long_model: Path) -> None:
    """The thread referred to the AsyncLLM, which nothing but `close` could end, with all of its memory."""

    async def answer(engine: AsyncLLM) -> None:
        async for _ in engine.generate([1, 2, 3], GREEDY):
            pass

    engine = AsyncLLM(long_model, **OPTIONS)
    asyncio.run(answer(engine))
    thread, held = engine._thread, weakref.ref(engine.llm.engine)
    del engine
    gc.collect()  # the task of the answer
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    del thread
    assert held() is None
