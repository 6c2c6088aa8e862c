"""After an error: a step that fails closes the engine, a request that fails ends alone, a start that fails leaves
nothing behind.
"""

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from integrity import check_scheduler
from run_threads import in_threads
from tiers import RUNS_ALL
from tiny_engines import KINDS

from nanovllm import LLM, SamplingParams
from nanovllm.capacity.machine import Machine, find_gpu
from nanovllm.capacity.make_plan import make_plan
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.device.devices import memory_remedy
from nanovllm.engine import startup
from nanovllm.engine.setup import EngineSetup, Internals
from nanovllm.errors import ConfigError, EngineError
from nanovllm.executor.base import LocalExecutor
from nanovllm.plan.kv_spec import KVCacheSizes
from nanovllm.text.detokenizer import TextReceiver

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = [7, *range(300), *range(300)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_llm(model: Path, kind: str, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 200}
    return LLM(str(model), **(defaults | KINDS[kind] | options))


# -- a step that fails -----------------------------------------------------------------------------------------------


def fail_once(owner: Any, name: str, error: BaseException, after: int = 0) -> None:
    """Call number `after` + 1 of a method raises, before it has done anything."""
    original, num_calls = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        num_calls[0] += 1
        if num_calls[0] == after + 1:
            raise error
        return original(*args, **kwargs)

    setattr(owner, name, failing)


FAULTS: dict[str, Callable[[LLM, BaseException], None]] = {
    "planning": lambda llm, error: fail_once(llm.scheduler.kv, "finish_step", error, after=1),
    "a layer": lambda llm, error: fail_once(llm.runner.model.model.layers[0].mlp, "forward", error, after=1),
    "the sampler": lambda llm, error: fail_once(llm.runner.model, "compute_logits", error),
    "the commit": lambda llm, error: fail_once(llm.scheduler, "commit", error, after=1),
}


@pytest.mark.parametrize("where", FAULTS)
def test_step_raises_engine_refuses_further_use_and_names_the_cause(model: Path, kind: str, where: str) -> None:
    """Regression: the prefix cache vouched for K and V of a step that had failed, and the same prompt, asked again,
    found 512 cached tokens and was answered with wrong tokens.
    """
    with make_llm(model, kind) as llm:
        (expected,) = llm.generate([LONG], GREEDY, use_tqdm=False)
    with make_llm(model, kind) as llm:
        other = llm.add_request([1, 2, 3], GREEDY)
        FAULTS[where](llm, torch.OutOfMemoryError("tried to allocate 8 GiB"))
        with pytest.raises(torch.OutOfMemoryError):
            llm.generate([LONG], GREEDY, use_tqdm=False)
        calls: list[Callable[[], object]] = [
            lambda: llm.generate([LONG], GREEDY, use_tqdm=False),
            lambda: llm.add_request(LONG, GREEDY),
            lambda: list(llm.stream("x", GREEDY)),
            llm.step,
            llm.stats,
        ]
        for call in calls:
            with pytest.raises(EngineError, match="a step failed with OutOfMemoryError: tried to allocate 8 GiB; make"):
                call()
        assert not llm.abort(other)
    with make_llm(model, kind) as llm:
        assert llm.generate([LONG], GREEDY, use_tqdm=False)[0]["token_ids"] == expected["token_ids"]


def test_second_ctrl_c_inside_a_step_closes_the_engine(model: Path, kind: str) -> None:
    """Regression: two quick Ctrl-C left a step halfway, and the next call found tokens cached that were not there."""
    with make_llm(model, kind) as llm:
        forward = llm.runner.model.model.layers[0].mlp.forward

        def interrupted(hidden: torch.Tensor) -> torch.Tensor:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return forward(hidden)

        llm.runner.model.model.layers[0].mlp.forward = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate([LONG], GREEDY, use_tqdm=False)
        with pytest.raises(EngineError, match="a step failed with KeyboardInterrupt"):
            llm.generate([LONG], GREEDY, use_tqdm=False)


def test_step_raises_in_one_thread_the_others_get_an_engine_error(model: Path, kind: str) -> None:
    with make_llm(model, kind) as llm:
        fail_once(llm.runner.model, "compute_logits", RuntimeError("broken"), after=4)
        errors: list[BaseException] = []

        def ask(first: int) -> None:
            try:
                llm.generate([[first, 2, 3]], SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
            except RuntimeError as error:
                errors.append(error)

        in_threads(*(partial(ask, i) for i in range(3)))
        assert len(errors) == 3 and sum(isinstance(error, EngineError) for error in errors) == 2
        assert all("broken" in str(error) for error in errors)


# -- a request that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True], ids=["at the end", "while read"])
@pytest.mark.parametrize("ahead", [False, True])
def test_detokenizer_raises_only_its_request_ends(model: Path, kind: str, ahead: bool, reads: bool) -> None:
    """Regression: one step ahead, the same plan was committed again at every later step, and all requests were lost.

    Text that nobody reads is decoded at the end. Otherwise the request ends with the token after the one that failed.
    """
    prompts = ["Hello world", "The quick", "x"]
    with make_llm(model, kind, internals=Internals(works_ahead=ahead)) as llm:
        expected = llm.generate(prompts, GREEDY, use_tqdm=False)
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        llm.step()
        receiver = llm.engine._steps.receivers[ids[1]]
        assert isinstance(receiver, TextReceiver)
        fail_once(receiver.detokenizer, "update", UnicodeError("no such text"), after=2 if reads else 0)
        finished: dict[int, Any] = {}
        while not llm.is_finished():
            output = llm.step()
            finished |= output.finished
            assert not reads or output.texts.keys() <= set(ids)
        assert finished[ids[1]]["finish_reason"] == "error"
        assert finished[ids[1]]["error"] == "its text could not be decoded: UnicodeError: no such text"
        answer = finished[ids[1]]["token_ids"]
        assert answer == expected[1]["token_ids"][: len(answer)]
        assert 4 <= len(answer) <= 6 if reads else len(answer) == GREEDY.max_tokens
        for i in (0, 2):
            assert finished[ids[i]]["token_ids"] == expected[i]["token_ids"] and "error" not in finished[ids[i]]
        check_scheduler(llm.scheduler)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in again] == [output["token_ids"] for output in expected]


@pytest.mark.parametrize("ahead", [False, True])
def test_nan_logits_end_their_request_with_an_error(model: Path, kind: str, ahead: bool) -> None:
    """Regression: NaN logits were sampled, and the answer was a row of zeros that ended with "length"."""
    with make_llm(model, kind, enable_prefix_caching=False, internals=Internals(works_ahead=ahead)) as llm:
        prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        expected = llm.generate(prompts, GREEDY, use_tqdm=False)
        with torch.no_grad():
            unused = next(
                token_id
                for token_id in range(10, 300)
                if all(token_id not in output["token_ids"] for output in expected)
            )
            llm.runner.model.model.embed_tokens.weight[unused] = torch.nan
        outputs = llm.generate([prompts[0], [4, unused, 6], prompts[2]], GREEDY, use_tqdm=False)
        assert outputs[1]["finish_reason"] == "error" and outputs[1]["token_ids"] == []
        assert "token 3 hold NaN or infinity" in outputs[1]["error"] and outputs[1]["error_cause"] == "engine"
        assert [outputs[i]["token_ids"] for i in (0, 2)] == [expected[i]["token_ids"] for i in (0, 2)]
        with pytest.raises(EngineError, match=r"the request failed: .*NaN"):
            list(llm.stream([4, unused, 6], GREEDY))
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output["token_ids"] for output in again] == [output["token_ids"] for output in expected]
        check_scheduler(llm.scheduler)


# -- a start that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"enable_cpu_offload": True}])
def test_number_of_blocks_that_an_error_names_fits_where_the_next_start_measures_less(options: dict[str, Any]) -> None:
    """Regression: on a GPU the next start measured 20 MiB less room, and named one block less."""
    name = "num_gpu_blocks" if options else "num_kvcache_blocks"

    def sizes_of(num_blocks: int, room_bytes: int) -> KVCacheSizes:
        config = Config(model="qwen3-0.6b", kvcache_block_size=256, **options, **{name: num_blocks})
        model = config_without_weights(config.model)
        plan = make_plan(config, model, Machine.gpu(64 * 2**30, find_gpu("H200")))
        setup = EngineSetup(
            config=config,
            model_config=model,
            directory=None,
            max_model_len=40960,
            device=torch.device("cuda"),
            plan=plan,
            internals=Internals(),
        )
        measured = Mock(call=lambda *_: (room_bytes, "this much is left"))
        return startup._kv_cache_sizes(setup, measured)

    room_bytes = 5 * 2**30
    with pytest.raises(ConfigError, match=f"no room for {name}=1000 .*this much is left; lower {name} to") as error:
        sizes_of(1000, room_bytes)
    named = re.search(rf"lower {name} to (\d+)", str(error.value))
    assert named is not None and int(named[1]) * 28 * 2**20 > room_bytes - 2**28
    assert sizes_of(int(named[1]), room_bytes - 100 * 2**20).num_gpu_blocks == int(named[1])


def test_memory_remedy_out_of_memory_is_a_value_error_that_says_what_to_lower() -> None:
    message = "CUDA out of memory. Tried to allocate 10.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
    expected = r"ran out of memory while capturing \(CUDA out of memory. Tried to allocate 10.00 GiB\); lower max_num_b"
    with pytest.raises(ConfigError, match=expected), memory_remedy("capturing"):
        raise torch.OutOfMemoryError(message)
    with pytest.raises(RuntimeError, match="something else"), memory_remedy("capturing"):
        raise RuntimeError("something else")


def test_start_raises_late_everything_is_closed_and_the_next_one_starts(
    model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[LocalExecutor] = []
    with monkeypatch.context() as patch:
        close = LocalExecutor.close
        patch.setattr(LocalExecutor, "close", lambda self: (close(self), closed.append(self)))
        patch.setattr(startup, "Scheduler", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_llm(model, kind)
    assert len(closed) == 1
    with pytest.raises(AssertionError, match="the KV cache has not been allocated, or has been released"):
        _ = closed[0].runner.memory  # type: ignore[attr-defined]
    with make_llm(model, kind) as llm:
        assert len(llm.generate(["x"], GREEDY, use_tqdm=False)[0]["token_ids"]) == 8


def test_interrupt_at_any_line_of_init_leaves_no_engine_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: three assignments came after the engine had started, and nothing closed it when they were left."""
    executors: list[LocalExecutor] = []
    make = LocalExecutor.__init__
    monkeypatch.setattr(LocalExecutor, "__init__", lambda self, *args: (executors.append(self), make(self, *args))[1])
    for num_lines in itertools.count(1):
        left = num_lines

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if frame.f_code is not LLM.__init__.__code__:
                return None
            left -= event == "line"
            if event == "line" and not left:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            llm = make_llm(model, "offload")
        except KeyboardInterrupt:
            assert all(executor._is_closed for executor in executors)
            continue
        finally:
            sys.settrace(None)
        llm.close()
        assert num_lines > 8 and len(executors) == 1, "only the last line starts an engine"
        return


# -- Ctrl-C at any line ----------------------------------------------------------------------------------------------


class InterruptAt:
    """Traces the engine's own lines and sends SIGINT before some of them."""

    FILES = (
        *("llm.py", "frontend.py", "detokenizer.py", "outputs.py", "engine/engine.py", "step_loop.py"),
        *("scheduler.py", "block_manager.py", "block_pool.py", "interrupt.py"),
    )

    def __init__(self, *lines: int) -> None:
        self.lines, self.num_lines = lines, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self.FILES) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.num_lines in self.lines:
                os.kill(os.getpid(), signal.SIGINT)
        return self._line

    @contextmanager
    def tracing(self) -> Iterator[None]:
        previous = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(previous)


@pytest.mark.parametrize("is_double", [False, True], ids=["once", "twice"])
def test_ctrl_c_at_any_line_leaves_the_engine_consistent_or_closed(model: Path, is_double: bool) -> None:
    """Regression: Ctrl-C while a request was queued or aborted left it in the engine for ever, or half removed; a
    second one at the end of a step left a turn that never ended, so that the next call hung.
    """
    llm = make_llm(model, "all GPU")
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompts = [[1, 2, 3], LONG]
    expected = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    whole = InterruptAt()
    with whole.tracing():
        llm.generate(prompts, params, use_tqdm=False)
    assert whole.num_lines > 500
    num_closed = 0
    for line in range(1, whole.num_lines, 7 if RUNS_ALL else 31):
        lines = (line, line + line % 60 + 1) if is_double else (line,)
        with suppress(KeyboardInterrupt), InterruptAt(*lines).tracing():
            llm.generate(prompts, params, use_tqdm=False)
        if llm.engine.closed_because is not None:
            assert is_double, f"closed after one Ctrl-C before line {line}: {llm.engine.closed_because}"
            num_closed += 1
            llm.close()
            llm = make_llm(model, "all GPU")
            continue
        num_steps = 0
        while not llm.is_finished():  # a second one before the clean-up leaves requests, which run to their end
            assert is_double and num_steps < 10, f"Ctrl-C before line {line} left requests behind"
            llm.step()
            num_steps += 1
        check_scheduler(llm.scheduler)
        assert [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert bool(num_closed) == is_double
    llm.close()
