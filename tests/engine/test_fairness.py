"""One request cannot slow the others: beside the worst that a server admits by default, a step takes at most half as
long again as beside plain requests of the same size.

Nothing is computed here. The host's share is the engine's own, up to the arrays and the pickled plan that ranks get,
and is counted in CPU time of the engine's thread, so that other processes do not matter. To it comes a short step of a
GPU. The vocabulary and the prompts are as large as a server has them.
"""

import pickle
import random
import time
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny_model, write_tiny_tokenizer

from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.logprobs import PositionLogprobs, StepLogprobs
from nanovllm.core.outputs import Outbox
from nanovllm.core.start_report import StartReport
from nanovllm.core.step_plan import SequenceStep, StepPlan
from nanovllm.engine.engine import Engine
from nanovllm.engine.internals import Internals
from nanovllm.engine.setup import EngineSetup, prepare
from nanovllm.executor.base import Executor, LaunchedStep
from nanovllm.kvcache.policy.block_manager import BlockManager
from nanovllm.runner import edited_sampling
from nanovllm.runner.inputs import build_arrays
from nanovllm.sampling_params import SamplingParams, StructuredOutputs
from nanovllm.scheduling.scheduler import Scheduler
from nanovllm.server.options import ServerOptions
from nanovllm.text.bad_words import MAX_TOKENS
from nanovllm.text.frontend import TextFrontend

VOCAB, MODEL_LEN, BLOCK = 151_936, 131_072, 4096
GPU_STEP_S = 5e-3
NUM_STEPS = 15
LIMITS = ServerOptions()
MANY = LIMITS.max_list_items
LETTER_A = 64  # its token


class Done(LaunchedStep):
    """A step whose tokens were drawn at random from those that its masks allow, else mostly from one."""

    def __init__(self, plan: StepPlan, rng: random.Random) -> None:
        self._plan, self._rng = plan, rng

    def is_done(self) -> bool:
        return True

    def token_ids(self) -> list[int]:
        return [token_id for step in self._plan.sequences if step.sampling for token_id in self._drawn(step)]

    def _drawn(self, step: SequenceStep) -> Iterator[int]:
        for i in range(step.num_sampled):
            allowed = None if step.edits is None else step.edits.rows[i].allowed
            if allowed is None:
                yield LETTER_A if self._rng.random() < 0.99 else LETTER_A + 1
            else:
                yield self._rng.choice(np.unpackbits(allowed.view(np.uint8), bitorder="little").nonzero()[0].tolist())

    def logprobs(self) -> StepLogprobs:
        sampled = [step for step in self._plan.sequences if step.sampling and step.num_logprobs is not None]
        scored = [step.scores for step in self._plan.sequences if step.scores is not None]
        return StepLogprobs(
            positions(len(sampled), max(step.num_logprobs or 0 for step in sampled)) if sampled else None,
            positions(len(scored[0].target_ids), scored[0].num_logprobs) if scored else None,
        )


def positions(count: int, num_top: int) -> PositionLogprobs:
    own, top = np.zeros(count, np.int64), np.tile(np.arange(num_top), (count, 1))
    return PositionLogprobs(own, own.astype(np.float32), own + 1, top, top.astype(np.float32))


class HostOnly(Executor):
    """Makes what the ranks would get, and throws it away."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        build_arrays(plan, BLOCK)
        pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        if plan.has_edits:
            edits = [step.edits for step in plan.sequences if step.edits is not None]
            edited_sampling.edit_arrays(edits, list(edited_sampling._edited_rows(plan)), VOCAB)
        return Done(plan, self._rng)

    def wait_for(self, step: LaunchedStep) -> None:
        pass

    def stats(self) -> Mapping[str, Any]:
        return {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, vocab_size=VOCAB, hidden_size=16, tied=True, max_position_embeddings=MODEL_LEN)
    return write_tiny_tokenizer(directory, VOCAB)


@pytest.fixture(scope="module")
def setup(model: Path) -> EngineSetup:
    return prepare(model, {"device": "cpu", "max_model_len": MODEL_LEN}, Internals(works_ahead=True))


@pytest.fixture(scope="module")
def text(setup: EngineSetup) -> TextFrontend:
    return TextFrontend(setup.model_config, setup.directory)


def step_s(setup: EngineSetup, text: TextFrontend, prompt: list[int], load: dict[str, Any]) -> float:
    """The median step of a stream beside a request of these parameters, once the request has begun."""
    kv = BlockManager(2000, BLOCK)
    scheduler = Scheduler(kv, max_num_seqs=256, max_num_batched_tokens=16_384, eos_token_ids=text.end_token_ids)
    report = StartReport(needs_rope_lens=False, link_byte_per_s=None, phases="")
    engine = Engine(setup, HostOnly(), scheduler, KVCacheSizes(2000, 0), report)
    outbox = Outbox()
    plain = SamplingParams(max_tokens=2000, ignore_eos=True)
    engine.add_request(array("q", [1, 2, 3]), plain, text.receiver(outbox, plain))
    params = SamplingParams(**({"max_tokens": 1000, "ignore_eos": True, "seed": 1} | load))
    text.check_params(params)
    first = None
    for each in params.per_answer():
        seq = engine.make_sequence(array("q", prompt), each, text.rules(each), None, first)
        engine.add_sequence(seq, text.receiver(outbox, each, with_tokens=True))
        first = first or seq
    seconds = []
    for _ in range(NUM_STEPS):
        start_s = time.thread_time()
        engine.step(outbox)
        seconds.append(time.thread_time() - start_s)
    return GPU_STEP_S + median(seconds)


WORST: dict[str, tuple[list[int], dict[str, Any]]] = {
    "bad words of many lengths": ([1], {"bad_words": ["a" * i for i in range(1, 180)], "n": 128}),
    "bad words of two tokens": (
        [1],
        {"bad_words": [f"{a}{b}" for a in map(chr, range(97, 127)) for b in map(chr, range(33, 127))], "n": 128},
    ),
    "biases": ([1], {"logit_bias": {i: 1.0 for i in range(MANY)}, "n": 128}),
    "end tokens": ([1], {"stop_token_ids": [*range(1000, 1000 + MANY)], "min_tokens": 1000, "n": 128}),
    "repetition": ([*range(MODEL_LEN - 2000)], {"repetition_penalty": 1.1, "n": 128}),
    "scores": ([*range(MODEL_LEN - 2000)], {"prompt_logprobs": 20}),
    "logprobs": ([1], {"logprobs": 20, "n": 128}),
    "stop": ([1], {"stop": ["a" * 1000 + chr(1000 + i) for i in range(64)], "n": 128}),
    "hostile": ([1], {"structured_outputs": StructuredOutputs(regex=r"(.|\n)*a(.|\n){40}"), "n": 128}),
}


@pytest.mark.parametrize("kind", WORST)
def test_x(kind, setup, text):
    prompt, load = WORST[kind]
    t = time.time()
    plain = step_s(setup, text, prompt, {"n": load.get("n", 1)})
    worst = step_s(setup, text, prompt, load)
    print(
        f"\n{kind:30} plain {1e3 * (plain - GPU_STEP_S):.2f} worst {1e3 * (worst - GPU_STEP_S):.2f} ms  ratio {worst / plain:.2f}  took {time.time() - t:.1f}s"
    )
