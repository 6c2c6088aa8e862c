"""One request cannot slow the others: a step of the worst that a server admits by default takes little more work of
the engine than a step of plain requests of the same size.

The model computes nothing here. Work is counted, not timed: the bytecodes that Python executes up to the arrays and
the pickled plan that ranks get, and the bytes of both. The vocabulary, the prompts and the requests are as large as a
server allows.
"""

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from tiny_models import write_tiny_model, write_tiny_tokenizer

from nanovllm.engine.engine import Engine
from nanovllm.engine.setup import EngineSetup, Internals, prepare
from nanovllm.entrypoints.server.admission import MAX_LIST_ITEMS, MAX_N, MAX_STOP
from nanovllm.errors import RequestError
from nanovllm.executor.base import Executor, LaunchedStep
from nanovllm.kvcache.block_manager import BlockManager
from nanovllm.plan.kv_spec import KVCacheSizes, StartReport
from nanovllm.plan.outputs import Outbox, PositionLogprobs, StepLogprobs
from nanovllm.plan.step_plan import SequenceStep, StepPlan
from nanovllm.runner.inputs import build_inputs, edit_inputs
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.text.frontend import TextFrontend

VOCAB, MODEL_LEN, BLOCK = 65_536, 131_072, 4096
NUM_STEPS = 5
MAX_BYTECODES = 120_000  # more than a plain step: about 2.5 ms, half a step of an 8B model on an H200
MAX_BYTES = 2**20  # more than a plain step
SHORT, LONG = [1], [i % VOCAB for i in range(MODEL_LEN - 2000)]
LETTER_A = 64  # a token


class HostOnly(Executor):
    """Makes what the ranks would get, and answers with tokens and log-probabilities at once.

    A token is drawn from those that the row's mask allows; without a mask nearly all are the letter a.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # of what the ranks get in the last step
        self._rng = random.Random(0)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        edited = edit_inputs(plan, build_inputs(plan, BLOCK, group_blocks=0).sampling, VOCAB)
        self.num_bytes = sum(len(pickle.dumps(each, pickle.HIGHEST_PROTOCOL)) for each in (plan, edited))
        with uncounted():
            return self._answer(plan)

    def _answer(self, plan: StepPlan) -> LaunchedStep:
        token_ids = [token_id for step in plan.sequences if step.sampling for token_id in self._drawn(step)]
        sampled = [step for step in plan.sequences if step.sampling and step.num_logprobs is not None]
        scored = [step.scores for step in plan.sequences if step.scores is not None]
        logprobs = StepLogprobs(
            positions(len(sampled), sampled[0].num_logprobs) if sampled else None,
            positions(len(scored[0].target_ids), scored[0].num_logprobs) if scored else None,
        )
        return Done(token_ids, logprobs)

    def _drawn(self, step: SequenceStep) -> Iterator[int]:
        for i in range(step.num_sampled):
            allowed = None if step.edits is None else step.edits.rows[i].allowed
            if allowed is None:
                yield LETTER_A + (self._rng.random() < 0.01)
            else:
                yield int(self._rng.choice(np.unpackbits(allowed.view(np.uint8), bitorder="little").nonzero()[0]))

    def wait_for(self, step: LaunchedStep) -> None:
        pass


class Done(LaunchedStep):
    def __init__(self, token_ids: list[int], logprobs: StepLogprobs) -> None:
        self._token_ids, self._logprobs = token_ids, logprobs

    def token_ids(self) -> list[int]:
        return self._token_ids

    def logprobs(self) -> StepLogprobs:
        return self._logprobs


def positions(count: int, num_top: int | None) -> PositionLogprobs:
    own, top = np.zeros(count, np.int64), np.tile(np.arange(num_top or 0), (count, 1))
    return PositionLogprobs(own, own.astype(np.float32), own + 1, top, top.astype(np.float32))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> EngineSetup:
    model = tmp_path_factory.mktemp("tiny")
    write_tiny_model(model, vocab_size=VOCAB, hidden_size=16, tied=True, max_position_embeddings=MODEL_LEN)
    write_tiny_tokenizer(model, VOCAB)
    return prepare(model, {"device": "cpu", "max_model_len": MODEL_LEN}, Internals(works_ahead=True))


@pytest.fixture(scope="module")
def text(setup: EngineSetup) -> TextFrontend:
    return TextFrontend(setup.model_config, setup.directory)


class Counter:
    """Counts the bytecodes that this thread executes in `with counter:`."""

    def __init__(self) -> None:
        self.num_bytecodes = 0

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.num_bytecodes += event == "opcode"
        return self._trace


@contextmanager
def uncounted() -> Iterator[None]:
    counting = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(counting)


class Work(NamedTuple):
    num_bytecodes: float
    num_bytes: float


def step_work(setup: EngineSetup, text: TextFrontend, prompt: list[int], **load: Any) -> Work:
    """The median work of a step in which a stream and a request of these parameters run."""
    sizes, executor = KVCacheSizes(2000, 0), HostOnly()
    scheduler = Scheduler(BlockManager(2000, BLOCK), max_num_seqs=256, max_num_batched_tokens=16_384)
    report = StartReport(needs_rope_lens=False, link_byte_per_s=None, phases="")
    engine, outbox = Engine(setup, executor, scheduler, sizes, report), Outbox()
    plain = SamplingParams(max_tokens=2000, ignore_eos=True)
    params = SamplingParams(**({"max_tokens": 1000, "ignore_eos": True, "seed": 1} | load))
    for request, with_tokens in ((text.make_request(SHORT, plain), False), (text.make_request(prompt, params), True)):
        for seq in engine.make_sequences(request):
            engine.add_sequence(seq, text.receiver(outbox, seq.params, seq.token_ids, with_tokens))
    bytecodes, num_bytes = [], []
    for _ in range(NUM_STEPS):
        counter = Counter()
        with counter:
            engine.step(outbox)
        bytecodes.append(counter.num_bytecodes)
        num_bytes.append(executor.num_bytes)
    return Work(median(bytecodes), median(num_bytes))


WORST: dict[str, tuple[list[int], dict[str, Any]]] = {
    "bad words of many lengths": (SHORT, {"bad_words": ["a" * length for length in range(1, 180)], "n": MAX_N}),
    "many bad words": (SHORT, {"bad_words": [f"{chr(97 + i % 26)}{i}" for i in range(3200)], "n": MAX_N}),
    "biases": (SHORT, {"logit_bias": dict.fromkeys(range(MAX_LIST_ITEMS), 1.0), "n": MAX_N}),
    "end tokens": (SHORT, {"stop_token_ids": [*range(1000, 1000 + MAX_LIST_ITEMS)], "min_tokens": 1000, "n": MAX_N}),
    "repetition": (LONG, {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "n": MAX_N}),
    "scores": (LONG, {"prompt_logprobs": MAX_LOGPROBS}),
    "log-probabilities": (SHORT, {"logprobs": MAX_LOGPROBS, "n": MAX_N}),
    "stop strings": (SHORT, {"stop": ["a" * 250 + chr(1000 + i) for i in range(MAX_STOP)], "n": MAX_N}),
    "regex": (SHORT, {"structured_outputs": StructuredOutputs(regex=r"(.|\n)*a(.|\n){40}"), "n": MAX_N}),
    "choices": (
        SHORT,
        {"structured_outputs": StructuredOutputs(choice=[f"a{i}" for i in range(MAX_LIST_ITEMS)]), "n": MAX_N},
    ),
}


@pytest.mark.slow
def test_step_of_the_worst_request_takes_little_more_work_than_a_plain_one(
    setup: EngineSetup, text: TextFrontend
) -> None:
    """Regression: bad words took 80 ms of each step for everybody, log-probabilities of prompts 300 ms."""
    for kind, (prompt, load) in WORST.items():
        worst, plain = step_work(setup, text, prompt, **load), step_work(setup, text, prompt, n=load.get("n", 1))
        assert worst.num_bytecodes - plain.num_bytecodes < MAX_BYTECODES, kind
        assert worst.num_bytes - plain.num_bytes < MAX_BYTES, kind


def test_more_than_the_worst_request_is_refused(text: TextFrontend) -> None:
    for words, message in (
        (["a" * i for i in range(1, 1199)], "bad_words has 718201 bytes in all, at most 16384; leave some"),
        (["\u00e9" * 50 + str(i) for i in range(1000)], "bad_words has 102890 bytes in all, at most 16384; leave some"),
    ):
        with pytest.raises(RequestError, match=message):
            text.rules(SamplingParams(bad_words=words))
    with pytest.raises(RequestError, match="stop has 20000 characters in all, at most 16384; leave some out"):
        SamplingParams(stop=["a" * 10_000, "b" * 10_000])
