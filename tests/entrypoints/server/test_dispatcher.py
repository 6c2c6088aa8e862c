"""Dispatcher: who is woken when, how long the event loop rests, and what the engine's thread waits for."""

import asyncio
import threading
import time

import pytest
from event_loops import on_a_loop, run, until
from waiting import LIMIT_S

from nanovllm import EngineError
from nanovllm.plan.outputs import NewTokens, RequestOutput, StepOutput
from nanovllm.request_stream import MAX_WOKEN, Dispatcher, RequestStream

ENDLESS_S = 10 * LIMIT_S
NUM_STREAMS = MAX_WOKEN + 4
OUTPUT: RequestOutput = {
    "text": "x",
    "token_ids": [7],
    "prompt_token_ids": [1],
    "finish_reason": "stop",
    "num_prompt_tokens": 1,
    "num_cached_tokens": 0,
    "ttft_s": None,
    "tpot_s": None,
}


class Consumers:
    """One task for each stream. `taken` has the stream of each update, in the order in which they were taken."""

    def __init__(self, dispatcher: Dispatcher, num_streams: int = NUM_STREAMS) -> None:
        self.dispatcher, self.taken = dispatcher, list[int]()
        dispatcher.bind()
        self.streams = list[RequestStream]()
        self.tasks = list[asyncio.Task[None]]()
        for _ in range(num_streams):
            self.add()

    def add(self) -> int:
        """Another stream. Returns its request id."""
        request_id = len(self.streams)
        self.streams.append(RequestStream([], abort=lambda request_ids: None))
        self.streams[-1].expect(request_id, 0)
        self.dispatcher.add(request_id, self.streams[-1])
        self.tasks.append(asyncio.create_task(self._consume(request_id)))
        return request_id

    async def ready(self) -> None:
        """Wait until all of them wait for updates."""
        await asyncio.sleep(0)

    async def _consume(self, request_id: int) -> None:
        async for _ in self.streams[request_id]:
            self.taken.append(request_id)

    async def take_a_token(self) -> None:
        """Hand over a token for each, and wait until all have it."""
        self.taken.clear()
        hand_over_tokens(self.dispatcher, len(self.streams))
        await until(lambda: len(self.taken) == len(self.streams))

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


def tokens(num_requests: int) -> StepOutput:
    """A token for each of the first requests."""
    return StepOutput(new_tokens={request_id: NewTokens([7]) for request_id in range(num_requests)})


def hand_over_tokens(dispatcher: Dispatcher, num_requests: int) -> None:
    thread = threading.Thread(target=dispatcher.hand_over, args=(tokens(num_requests),))
    thread.start()
    thread.join()


def pass_on(dispatcher: Dispatcher, num_requests: int) -> None:
    """Do what the engine's thread does beside a long step."""

    def work() -> None:
        dispatcher.hand_over(tokens(num_requests))
        dispatcher.wait_until_passed_on()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@on_a_loop
async def test_a_few_are_woken_at_a_time_and_the_rest_after_a_rest() -> None:
    consumers = Consumers(Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=0.05))
    start_s = time.monotonic()
    await consumers.take_a_token()
    assert consumers.taken == list(range(NUM_STREAMS))
    assert time.monotonic() - start_s > 0.05


@on_a_loop
async def test_without_steps_there_is_no_rest() -> None:
    consumers = Consumers(Dispatcher(rests=lambda: False, rest_ratio=1e9, max_rest_s=ENDLESS_S))
    await consumers.take_a_token()


@on_a_loop
async def test_rest_lasts_as_many_times_as_long_as_the_consumers_took() -> None:
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=5.0, max_rest_s=ENDLESS_S)
    consumers = Consumers(dispatcher, num_streams=0)
    busy_s = 0.02

    async def busy(stream: RequestStream) -> None:
        async for _ in stream:
            end_s = time.thread_time() + busy_s
            while time.thread_time() < end_s:
                pass

    for request_id in range(2):
        stream = RequestStream([], abort=lambda request_ids: None)
        stream.expect(request_id, 0)
        dispatcher.add(request_id, stream)
        consumers.tasks.append(asyncio.create_task(busy(stream)))
    await asyncio.sleep(0)
    start_s = asyncio.get_running_loop().time()
    hand_over_tokens(dispatcher, 2)
    await until(lambda: dispatcher._resting is not None)
    assert dispatcher._resting is not None
    assert dispatcher._resting.when() - start_s >= 6 * 2 * busy_s


@on_a_loop
async def test_rest_ends_when_the_engine_waits_for_its_consumers() -> None:
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=ENDLESS_S, max_passing_s=2 * LIMIT_S)
    consumers = Consumers(dispatcher)
    hand_over_tokens(dispatcher, NUM_STREAMS)
    await until(lambda: len(consumers.taken) == MAX_WOKEN and dispatcher._resting is not None)
    timer = dispatcher._resting
    await asyncio.to_thread(dispatcher.wait_until_passed_on)
    assert len(consumers.taken) == NUM_STREAMS and timer is not None and timer.cancelled()
    dispatcher._hurry()
    assert not dispatcher._is_hurried, "there is nothing to hurry with"
    hand_over_tokens(dispatcher, NUM_STREAMS)
    await asyncio.sleep(0.05)
    assert len(consumers.taken) == NUM_STREAMS, "it rests again"


@on_a_loop
async def test_engine_does_not_wait_long_for_a_loop_that_stands_still() -> None:
    dispatcher = Dispatcher(rests=lambda: True, max_passing_s=0.05)
    consumers = Consumers(dispatcher)
    pass_on(dispatcher, NUM_STREAMS)  # the loop stands still
    assert not consumers.taken


@on_a_loop
async def test_first_token_goes_ahead_of_all_others() -> None:
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=0.01)
    consumers = Consumers(dispatcher)
    await consumers.take_a_token()
    newest = consumers.add()
    await consumers.take_a_token()
    assert consumers.taken == [newest, *range(NUM_STREAMS)]


@on_a_loop
async def test_others_get_places_beside_first_updates() -> None:
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=ENDLESS_S)
    consumers = Consumers(dispatcher, num_streams=2)
    await consumers.ready()
    hand_over_tokens(dispatcher, 2)
    await until(lambda: dispatcher._resting is not None)
    assert consumers.taken == [0, 1]
    newest = [consumers.add() for _ in range(2 * MAX_WOKEN)]
    await consumers.ready()
    hand_over_tokens(dispatcher, len(consumers.streams))
    assert dispatcher._resting is not None
    dispatcher._resting.cancel()
    dispatcher._end_rest()
    await until(lambda: len(consumers.taken) == 2 + MAX_WOKEN)
    assert consumers.taken[2:] == [*newest[: MAX_WOKEN - 2], 0, 1]


@on_a_loop
async def test_failure_reaches_all_after_what_has_arrived() -> None:
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=ENDLESS_S)
    consumers = Consumers(dispatcher)
    await consumers.ready()
    hand_over_tokens(dispatcher, NUM_STREAMS)
    dispatcher.fail("a step failed")
    ends = await asyncio.gather(*consumers.tasks, return_exceptions=True)
    assert sorted(consumers.taken) == list(range(NUM_STREAMS))
    assert all(isinstance(end, EngineError) and str(end) == "a step failed" for end in ends)
    assert len(set(map(id, ends))) == NUM_STREAMS


@on_a_loop
async def test_failure_wakes_those_whose_answers_have_ended_before() -> None:
    """Regression: an answer that had ended during a rest, beside another one's first token, was never taken."""
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=ENDLESS_S)
    consumers = Consumers(dispatcher, num_streams=2)
    await consumers.ready()
    hand_over_tokens(dispatcher, 1)
    await until(lambda: dispatcher._resting is not None)
    dispatcher.hand_over(StepOutput(new_tokens={1: NewTokens([7])}, finished={0: OUTPUT}))
    dispatcher.call_on_loop(lambda: dispatcher.fail("a step failed"))
    ended, failed = await asyncio.gather(*consumers.tasks, return_exceptions=True)
    assert ended is None and isinstance(failed, EngineError)
    dispatcher._end_rest()  # finds nobody to wake


@on_a_loop
async def test_hurry_ends_with_a_wait_that_was_given_up() -> None:
    """Regression: with hundreds of streams there is always more to pass on, and the loop never rested again."""
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=0.0, max_passing_s=0.01)
    consumers = Consumers(dispatcher)
    await consumers.ready()
    pass_on(dispatcher, NUM_STREAMS)  # the loop stands still
    hurried: list[bool] = []
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: loop.call_soon(lambda: hurried.append(dispatcher._is_hurried)))
    await until(lambda: len(consumers.taken) == NUM_STREAMS)
    assert hurried == [False]


@pytest.mark.parametrize("rests", [False, True], ids=["idle", "resting"])
@pytest.mark.parametrize("left", ["a dispatch", "a hurry", "the start of a rest", "the end of a rest"])
def test_loop_that_was_replaced_changes_nothing_for_the_next(left: str, rests: bool) -> None:
    """Regression: what was left to do for the first loop ended a rest of the second, and no dispatch followed."""
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=0.02, max_passing_s=0.01)
    first_loop = asyncio.new_event_loop()

    async def bind() -> None:
        Consumers(dispatcher, num_streams=1).cancel()

    async def follow() -> None:
        dispatcher._max_rest_s = ENDLESS_S
        consumers = Consumers(dispatcher, num_streams=1)
        await consumers.ready()
        if rests:
            hand_over_tokens(dispatcher, 1)
            await until(lambda: len(consumers.taken) == 1 and dispatcher._resting is not None)
        with dispatcher._lock:
            dispatcher._arrived.append(tokens(1))  # the loop does not know yet
        state = dispatcher._resting, dispatcher._is_dispatching, dispatcher._is_hurried
        await asyncio.to_thread(first_loop.run_until_complete, asyncio.sleep(0.05))
        assert state == (dispatcher._resting, dispatcher._is_dispatching, dispatcher._is_hurried)
        assert dispatcher._resting is None or not dispatcher._resting.cancelled()
        assert len(consumers.taken) == rests
        consumers.cancel()

    first_loop.run_until_complete(bind())
    if left in ("a dispatch", "a hurry"):
        dispatcher.remove(0)
        (hand_over_tokens(dispatcher, 1) if left == "a dispatch" else pass_on(dispatcher, 1))
    else:
        hand_over_tokens(dispatcher, 1)
        first_loop.call_soon(first_loop.stop)
        first_loop.run_forever()  # dispatches, and stops
        if left == "the end of a rest":
            first_loop.call_soon(first_loop.stop)
            first_loop.run_forever()
            assert dispatcher._resting is not None
        dispatcher.remove(0)
    run(follow())
    first_loop.close()


@on_a_loop
async def test_results_of_removed_requests_are_dropped() -> None:
    dispatcher = Dispatcher(rests=lambda: True)
    consumers = Consumers(dispatcher, num_streams=2)
    assert dispatcher.remove(0) and not dispatcher.remove(0)
    hand_over_tokens(dispatcher, 2)
    await until(lambda: bool(consumers.taken))
    assert consumers.taken == [1]


def test_loop_with_open_requests_cannot_be_replaced_and_a_closed_one_leaves_them() -> None:
    dispatcher = Dispatcher(rests=lambda: True)
    first_loop = asyncio.new_event_loop()

    async def add() -> None:
        dispatcher.bind()
        dispatcher.add(5, RequestStream([], abort=lambda request_ids: None))

    async def bind() -> list[int]:
        return dispatcher.bind()

    first_loop.run_until_complete(add())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(bind())
    first_loop.close()
    assert asyncio.run(bind()) == [5]
    assert not dispatcher.remove(5)


def test_loop_that_follows_a_closed_one_has_nothing_to_wait_for_and_its_own_results() -> None:
    dispatcher = Dispatcher(rests=lambda: True, max_passing_s=2 * LIMIT_S)
    first_loop = asyncio.new_event_loop()

    async def add() -> None:
        Consumers(dispatcher, num_streams=1).cancel()

    async def follow() -> None:
        consumers = Consumers(dispatcher, num_streams=1)
        await asyncio.to_thread(dispatcher.wait_until_passed_on)
        await consumers.take_a_token()
        consumers.cancel()

    first_loop.run_until_complete(add())
    first_loop.close()
    dispatcher.hand_over(tokens(1))
    run(follow())


def test_loop_that_follows_wakes_no_stream_of_the_closed_one() -> None:
    dispatcher = Dispatcher(rests=lambda: True)
    first_loop = asyncio.new_event_loop()

    async def add() -> Consumers:
        consumers = Consumers(dispatcher)
        await consumers.ready()
        return consumers

    async def follow() -> None:
        for stream in first.streams:
            stream.wake = lambda: woken.append(True)  # type: ignore[method-assign]
        consumers = Consumers(dispatcher, num_streams=1)
        await consumers.take_a_token()
        consumers.cancel()

    first, woken = first_loop.run_until_complete(add()), list[bool]()
    hand_over_tokens(dispatcher, NUM_STREAMS)
    first_loop.call_soon(first_loop.stop)
    first_loop.run_forever()  # wakes some of them; the others are queued
    assert dispatcher._has_more
    first.cancel()
    first_loop.run_until_complete(asyncio.gather(*first.tasks, return_exceptions=True))
    first_loop.close()
    run(follow())
    assert not woken


@on_a_loop
async def test_ended_requests_have_their_output() -> None:
    dispatcher = Dispatcher(rests=lambda: True)
    consumers = Consumers(dispatcher, num_streams=1)
    dispatcher.hand_over(StepOutput(finished={0: OUTPUT}))
    await asyncio.gather(*consumers.tasks)
    assert consumers.taken == [0] and not dispatcher.remove(0)


def test_consumers_of_a_loop_that_was_replaced_get_what_had_arrived() -> None:
    """All requests have ended, but only some of their consumers have been woken when another loop follows."""
    dispatcher = Dispatcher(rests=lambda: True, rest_ratio=1e9, max_rest_s=ENDLESS_S)
    first_loop = asyncio.new_event_loop()

    async def end_all() -> Consumers:
        consumers = Consumers(dispatcher, num_streams=2 * MAX_WOKEN)
        await consumers.ready()
        dispatcher.hand_over(StepOutput(finished=dict.fromkeys(range(2 * MAX_WOKEN), OUTPUT)))
        await until(lambda: not dispatcher._streams)
        return consumers

    async def bind() -> None:
        dispatcher.bind()

    consumers = first_loop.run_until_complete(end_all())
    assert not all(task.done() for task in consumers.tasks)
    asyncio.run(bind())
    first_loop.run_until_complete(asyncio.wait_for(asyncio.gather(*consumers.tasks), LIMIT_S))
    first_loop.close()
