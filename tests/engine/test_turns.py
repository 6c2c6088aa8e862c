"""Several threads, one engine: whose turn it is, and that every call gets its own answers."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrity import check_scheduler
from run_threads import in_threads
from waiting import LIMIT_S, wait_until

from nanovllm import LLM, SamplingParams
from nanovllm.engine.engine import Turns
from nanovllm.errors import EngineError
from nanovllm.executor.base import LaunchedStep
from nanovllm.plan.step_plan import StepPlan

KINDS = {
    "all GPU": {"num_kvcache_blocks": 30},
    "offload": {"enable_cpu_offload": True, "num_gpu_blocks": 4, "num_cpu_blocks": 30, "kvcache_block_size": 256},
}
PROMPTS = ["Hello world", "The quick", "x", "abc " * 100]


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def never() -> bool:
    return False


# -- turns -----------------------------------------------------------------------------------------------------------


def test_call_outside_a_turn_is_made_at_once_inside_one_when_it_ends() -> None:
    turns, made = Turns(), []
    turns.call(lambda: made.append("at once"))
    assert made == ["at once"]
    assert turns.begin(never)
    turns.call(lambda: made.append("first"))
    turns.call(lambda: turns.call(lambda: made.append("third")))  # as an abandoned stream does
    turns.call(lambda: made.append("second"))
    assert made == ["at once"]
    turns.end()
    assert made == ["at once", "first", "second", "third"]
    turns.end()  # nobody's turn: nothing to end


def test_begin_waits_for_the_turn_of_another_thread_and_for_nothing_else() -> None:
    turns, order = Turns(), []
    assert turns.begin(never)

    def other() -> None:
        assert turns.begin(never)
        order.append("other")
        turns.end()

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.05)
    order.append("this")
    turns.end()
    thread.join(LIMIT_S)
    assert order == ["this", "other"]


def test_begin_ends_without_a_turn_once_its_condition_comes_true() -> None:
    turns, ready, got_turn = Turns(), threading.Event(), []
    assert not turns.begin(lambda: True)
    assert turns.begin(never)
    thread = threading.Thread(target=lambda: got_turn.append(turns.begin(ready.is_set)))
    thread.start()
    time.sleep(0.05)
    assert not got_turn
    ready.set()
    turns.end()
    thread.join(LIMIT_S)
    assert got_turn == [False]


def test_begin_that_needs_a_turn_gets_it_before_one_that_does_not() -> None:
    """Regression: a thread in `generate` took every turn, and `close` or `step` in another one waited for its end."""
    turns, order, done = Turns(), [], threading.Event()
    assert turns.begin()

    def needs_turn() -> None:
        assert turns.begin()
        order.append("needed")
        turns.end()

    threads = [threading.Thread(target=needs_turn) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(turns._queue) == 2)
    turns.end()
    assert turns.begin(done.is_set)  # both others were there before
    order.append("not needed")
    turns.end()
    for thread in threads:
        thread.join(LIMIT_S)
    assert order == ["needed", "needed", "not needed"]


def test_end_wakes_the_next_in_the_queue_whoever_waits_beside_it() -> None:
    turns, done, order = Turns(), threading.Event(), []
    assert turns.begin()

    def needs_turn() -> None:
        assert turns.begin()
        order.append("needed")
        done.set()
        turns.end()

    waiting = threading.Thread(target=lambda: order.append(turns.begin(done.is_set)), daemon=True)
    needing = threading.Thread(target=needs_turn, daemon=True)
    waiting.start()
    time.sleep(0.05)  # a single notification would reach the first that waits
    needing.start()
    wait_until(lambda: turns._queue)
    turns.end()
    needing.join(LIMIT_S)
    waiting.join(LIMIT_S)
    assert order == ["needed", False]


def test_begin_in_the_middle_of_the_same_threads_turn_raises_instead_of_waiting_for_ever() -> None:
    turns = Turns()
    assert turns.begin()
    with pytest.raises(EngineError, match="already running a step"):
        turns.begin()
    turns.end()


def test_call_raises_those_who_wait_are_woken() -> None:
    """Regression: they slept until somebody else ended a turn, which nobody did."""
    turns, got_turn = Turns(), []
    assert turns.begin()
    turns.call(lambda: [][0])
    thread = threading.Thread(target=lambda: got_turn.append(turns.begin()), daemon=True)
    thread.start()
    time.sleep(0.05)
    with pytest.raises(IndexError):
        turns.end()
    thread.join(LIMIT_S)
    assert got_turn == [True]


def test_thread_that_is_interrupted_at_the_head_of_the_queue_wakes_the_next() -> None:
    turns, got_turn = Turns(), []
    wait = turns._changed.wait

    def wait_and_fall() -> None:
        wait()
        if threading.current_thread() is threads[0]:
            wait(0.1)  # meanwhile the other finds that it is not the next
            raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            turns.begin()
        turns.end()

    turns._changed.wait = wait_and_fall  # type: ignore[assignment, method-assign]
    assert turns.begin()
    threads = [threading.Thread(target=interrupted), threading.Thread(target=lambda: got_turn.append(turns.begin()))]
    for num_queued, thread in enumerate(threads, 1):
        thread.daemon = True
        thread.start()
        wait_until(lambda num_queued=num_queued: len(turns._queue) == num_queued)  # type: ignore[misc]
    turns.end()
    for thread in threads:
        thread.join(LIMIT_S)
    assert got_turn == [True]


# -- an engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[(kind, device) for kind in KINDS for device in ("cpu", "cuda")], ids=lambda p: " ".join(p))
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    kind, device = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    options: dict[str, Any] = {"dtype": "float32", "device": device, "max_num_batched_tokens": 200}
    with LLM(str(model), **(options | KINDS[kind])) as engine:
        yield engine
        if engine.engine.closed_because is None:
            assert engine.is_finished()
            check_scheduler(engine.scheduler)


def test_generate_chat_and_stream_in_several_threads_get_their_own_answers(llm: LLM) -> None:
    """Regression: of four threads that called generate, all four failed with IndexError or AssertionError."""
    expected = [output["text"] for output in llm.generate(PROMPTS, greedy(), use_tqdm=False)]
    messages = [{"role": "user", "content": "Hello"}]
    (chat_expected,) = llm.chat(messages, greedy(), use_tqdm=False)
    pieces: list[str] = []

    def generate() -> None:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False)
            assert [output["text"] for output in outputs] == expected

    def chat() -> None:
        for _ in range(3):
            assert llm.chat(messages, greedy(), use_tqdm=False)[0]["text"] == chat_expected["text"]

    def stream() -> None:
        for prompt, text in zip(PROMPTS, expected, strict=True):
            pieces.append("".join(llm.stream(prompt, greedy())))
            assert pieces[-1] == text

    in_threads(generate, generate, chat, stream)
    assert len(pieces) == 4


def test_add_and_abort_from_threads_while_another_steps(llm: LLM) -> None:
    """Regression: an abort in the middle of a step raised IndexError in the thread that stepped."""
    expected = [output["token_ids"] for output in llm.generate(PROMPTS, greedy(16), use_tqdm=False)]
    added: dict[int, int] = {}  # request id -> prompt
    asked_to_end: set[int] = set()
    finished: dict[int, Any] = {}
    still_adding = [True, True]

    def add(which: int) -> None:
        rng = random.Random(which)
        for _ in range(20):
            prompt = rng.randrange(len(PROMPTS))
            is_aborted = rng.random() < 0.5
            request_id = llm.add_request(PROMPTS[prompt], greedy(1500 if is_aborted else 16))
            added[request_id] = prompt
            time.sleep(rng.random() / 200)
            if is_aborted and llm.abort(request_id):
                asked_to_end.add(request_id)
        still_adding[which] = False

    def step() -> None:
        while any(still_adding) or not llm.is_finished():
            for request_id, output in llm.step().finished.items():
                assert request_id not in finished, "a request ended twice"
                finished[request_id] = output

    in_threads(step, lambda: add(0), lambda: add(1))
    finished |= llm.step().finished
    assert set(finished) == set(added) and len(added) == 40 and len(asked_to_end) > 5
    for request_id, output in finished.items():
        answer = expected[added[request_id]]
        if output["finish_reason"] == "abort":
            assert request_id in asked_to_end
            assert output["token_ids"][:16] == answer[: len(output["token_ids"])]
        else:
            assert output["token_ids"][:16] == answer


def test_generate_whose_request_another_thread_aborts_returns_it_with_the_others(llm: LLM) -> None:
    """Regression: the call raised EngineError and all its results were lost."""
    params = [greedy(8), SamplingParams(max_tokens=1500, ignore_eos=True), greedy(8)]
    results: list[Any] = []
    is_alone, is_aborted = threading.Event(), threading.Event()
    launch = llm.engine.executor.launch

    def launch_and_wait(plan: StepPlan) -> LaunchedStep:
        if [seq.params for seq in llm.scheduler.sequences.values()] == [params[1]]:  # the others have ended
            is_alone.set()
            assert is_aborted.wait(LIMIT_S)
        return launch(plan)

    def abort() -> None:
        assert is_alone.wait(LIMIT_S)
        assert llm.abort(next(iter(llm.scheduler.sequences)))
        is_aborted.set()

    llm.engine.executor.launch = launch_and_wait  # type: ignore[method-assign]
    in_threads(lambda: results.extend(llm.generate(PROMPTS[:3], params, use_tqdm=False)), abort)
    assert [output["finish_reason"] for output in results] == ["length", "abort", "length"]
    assert 0 < len(results[1]["token_ids"]) < 1500
    assert llm.tokenizer.decode(results[1]["token_ids"]).startswith(results[1]["text"]) and results[1]["text"]


def test_stream_dropped_while_another_thread_steps_is_aborted(llm: LLM) -> None:
    """Regression: the text of a stream left early stayed in the engine for ever."""
    done = threading.Event()

    def drop_streams() -> None:
        for _ in range(10):
            stream = llm.stream(PROMPTS[0], greedy(500))
            next(stream)
            del stream
        done.set()

    def generate() -> None:
        while not done.is_set():
            llm.generate([PROMPTS[1]], greedy(5), use_tqdm=False)

    in_threads(drop_streams, generate)
    assert llm.is_finished()


def test_step_and_close_come_between_the_steps_of_a_generate_in_another_thread(llm: LLM) -> None:
    """Regression: they waited until `generate` had ended, 2,700 steps later."""
    errors: list[EngineError] = []
    launch, main = llm.engine.executor.launch, threading.current_thread()

    def launch_and_wait(plan: StepPlan) -> LaunchedStep:
        if threading.current_thread() is not main:  # no step ends before this thread needs a turn, or has aborted all
            wait_until(lambda: llm.engine._turns._queue or llm.engine._turns._calls)
        return launch(plan)

    def generate() -> None:
        try:
            llm.generate(PROMPTS[:1], greedy(1500), use_tqdm=False)
        except EngineError as error:
            errors.append(error)

    llm.engine.executor.launch = launch_and_wait  # type: ignore[method-assign]
    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    wait_until(lambda: llm.stats()["num_running"])
    for _ in range(5):
        llm.step()
        assert not llm.is_finished()
    (request_id,) = llm.scheduler.sequences
    llm.abort(request_id)
    thread.join(LIMIT_S)
    assert not thread.is_alive() and not errors
    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    wait_until(lambda: llm.stats()["num_running"])
    llm.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive() and "it is closed" in str(errors[0])
