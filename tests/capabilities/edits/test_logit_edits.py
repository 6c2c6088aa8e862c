"""Penalties, biases, bad words, min_tokens and constraints: the tokens are those of a plain loop over transformers'
logits, alone and together, greedy and sampled, ahead of the last token, with offload, and with guesses.
"""

import math
from array import array
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from checked_engine import WORKS_AHEAD, Reference, cache_options
from odd_drafters import OddDrafter

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.capabilities.edits.logit_editor import BadWords, TokenTable
from nanovllm.engine.setup import Internals
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import sample
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.plan.logit_edits import NO_RULES, AnswerRules
from nanovllm.plan.outputs import Outbox, Receiver, RequestOutput
from nanovllm.plan.sequence import Request, Sequence

VOCAB, END = 320, 319
NUM_TOKENS = 14
PROMPTS = [[(7 * i * i + 3 * i) % 300 for i in range(n)] for n in (5, 270, 33)]
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.3},
    "repetition wanted": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.8},
    "presence": {"presence_penalty": -1.5},
    "bias": {"logit_bias": {5: 2.5, 40: -3.0, 17: 100.0, 200: 1.0}},
    "all penalties": {"repetition_penalty": 1.2, "frequency_penalty": -0.4, "presence_penalty": 0.9},
    "min tokens": {"min_tokens": 9, "logit_bias": {END: 20.0}, "ignore_eos": False},
    "stop token": {"min_tokens": 5, "stop_token_ids": [31], "logit_bias": {31: 100.0}},
    "everything": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {END: 4.0, 9: 3.0, 200: 3.5},
        "min_tokens": 6,
        "ignore_eos": False,
    },
}
BAD_WORDS = ((9,), (17, 17), (200, 9, 200), (281, 18), (18, 180), *((t, (t * 3) % VOCAB) for t in range(0, VOCAB, 2)))


def bad_words(words: Iterable[tuple[int, ...]]) -> BadWords:
    """Make bad words of tokens, each of which is one character."""
    chars = [chr(0x100 + token_id).encode() for token_id in range(VOCAB)]
    return BadWords([b"".join(chars[token_id] for token_id in word) for word in words], TokenTable(chars), VOCAB)


class Alternating:
    """A constraint: even and odd tokens take turns, and the answer has 11 tokens."""

    is_ready, is_slow = True, False

    def __init__(self, token_ids: list[int] | None = None) -> None:
        self.token_ids = token_ids or []

    @property
    def is_finished(self) -> bool:
        return len(self.token_ids) == 11

    def is_allowed(self, token_id: int) -> bool:
        return not self.token_ids or (token_id - self.token_ids[-1]) % 2 == 1

    def accept(self, token_id: int) -> bool:
        allowed = self.is_allowed(token_id)
        if allowed:
            self.token_ids.append(token_id)
        return allowed

    def mask(self) -> np.ndarray:
        bits = np.array([self.is_allowed(token_id) for token_id in range(VOCAB)])
        return np.packbits(bits, bitorder="little").view(np.int32)

    def masks_for(self, guesses: list[int]) -> list[np.ndarray]:
        ahead = Alternating(self.token_ids.copy())
        masks = [ahead.mask()]
        for guess in guesses:
            ahead.accept(guess)
            masks.append(ahead.mask())
        return masks


def rules_of(case: str) -> AnswerRules:
    if case == "bad words":
        return AnswerRules(bad_words(BAD_WORDS))
    if case == "constraint":
        return AnswerRules(None, Alternating)
    return AnswerRules(bad_words(BAD_WORDS), Alternating) if case == "everything" else NO_RULES


def params_of(case: str, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True} | CASES.get(case, {}) | more))


def edited(
    logits: torch.Tensor, prompt: list[int], answer: list[int], p: SamplingParams, rules: AnswerRules, constraint: Any
) -> Any:
    """The definition, token by token."""
    row = logits.tolist()
    if constraint is not None:
        row = [x if constraint.is_allowed(t) else -math.inf for t, x in enumerate(row)]
    for token_id, bias in (p.logit_bias or {}).items():
        row[token_id] += bias
    for *begin, end in BAD_WORDS if rules.bad_words else ():
        if not begin or answer[-len(begin) :] == begin:
            row[end] = -math.inf
    if len(answer) < p.min_tokens:
        for token_id in (END, *(p.stop_token_ids or ())):
            row[token_id] = -math.inf
    for token_id in range(VOCAB):
        if token_id in prompt or token_id in answer:
            row[token_id] *= 1 / p.repetition_penalty if row[token_id] > 0 else p.repetition_penalty
        row[token_id] -= p.frequency_penalty * answer.count(token_id) + p.presence_penalty * (token_id in answer)
    return torch.tensor([row])


def expected_answer(reference: Reference, prompt: list[int], p: SamplingParams, rules: AnswerRules) -> list[int]:
    answer: list[int] = []
    constraint = rules.make_constraint and rules.make_constraint()
    while len(answer) < (p.max_tokens or 0):
        row = edited(reference.logits(prompt + answer, 1)[0], prompt, answer, p, rules, constraint)
        tensors = SamplingTensors(
            torch.tensor([float(p.temperature)]),
            torch.tensor([p.top_k]),
            torch.tensor([p.top_p]),
            torch.tensor([p.min_p]),
            torch.tensor([p.seed or 0]),
            torch.tensor([len(prompt) + len(answer)]),
        )
        answer.append(int(sample(row, tensors)))
        if constraint is not None:
            assert constraint.accept(answer[-1])
        is_end = (answer[-1] == END and not p.ignore_eos) or answer[-1] in (p.stop_token_ids or ())
        if is_end or (constraint is not None and constraint.is_finished):
            break
    return answer


SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 5}
NAMES = [*CASES, "bad words", "constraint"]
WORK = [(prompt, case, more) for prompt, case in zip(PROMPTS * 4, NAMES, strict=True) for more in ({}, SAMPLED)]


@pytest.fixture(scope="module")
def answers(reference: Reference) -> list[list[int]]:
    """The right answer of each request in WORK."""
    return [
        expected_answer(reference, prompt, params_of(case, **({"temperature": 0} | more)), rules_of(case))
        for prompt, case, more in WORK
    ]


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams, AnswerRules]]) -> list[RequestOutput]:
    outbox = Outbox()
    ids = [
        llm.engine.add_sequence(seq, Receiver(outbox))
        for prompt, params, rules in requests
        for seq in llm.engine.make_sequences(Request(array("q", prompt), params, rules))
    ]
    outputs: dict[int, RequestOutput] = {}
    while len(outputs) < len(ids):
        outputs |= llm.engine.next_output(outbox).finished
    return [outputs[request_id] for request_id in ids]


def drafter(kind: str, answers: list[list[int]]) -> OddDrafter:
    whole = {tuple(prompt): [] for prompt in PROMPTS}
    for (prompt, _, _), answer in zip(WORK, answers, strict=True):
        whole[tuple(prompt)].append(prompt + answer)

    def next_tokens(seq: Sequence, count: int) -> list[int]:
        known = seq.token_ids.tolist()
        texts = whole[tuple(seq.prompt_token_ids)]
        return next((text[len(known) : len(known) + count] for text in texts if text[: len(known)] == known), [])

    return OddDrafter(kind, next_tokens, vocab_size=VOCAB)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("slots", "ahead", "guesses"),
    [
        *((None, False, None), (None, True, "right"), (3, True, "random"), (8, True, "drafts")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((None, True, None), (3, True, None), (None, False, "wrong"))
        ),
    ],
)
def test_edited_answers_are_those_of_a_plain_loop(
    reference: Reference, answers: list[list[int]], slots: int | None, ahead: bool, guesses: str | None, device: str
) -> None:
    """All cases run in one batch, beside each other. On a GPU, decode steps are graphs."""
    internals, options = WORKS_AHEAD if ahead else Internals(), cache_options(slots)
    if guesses is not None:
        internals = replace(internals, drafters=(drafter(guesses, answers),), always_guesses=True)
        options |= {"speculation": "auto", "num_speculative_tokens": 5, "max_num_seqs": 3}
    requests = [(prompt, params_of(case, **({"temperature": 0} | more)), rules_of(case)) for prompt, case, more in WORK]
    options = {"device": device, "dtype": "float32", "max_num_seqs": 9} | options
    with LLM(str(reference.directory), internals=internals, max_num_batched_tokens=128, **options) as llm:
        outputs = run(llm, requests)
        if guesses is not None:
            assert llm.stats()["num_guesses"] > 0
    for (_, case, more), output, answer in zip(WORK, outputs, answers, strict=True):
        assert output["token_ids"] == answer, f"{case} {more}"


def test_edits_change_the_answer_of_each_case(reference: Reference, answers: list[list[int]]) -> None:
    for (prompt, case, more), answer in zip(WORK, answers, strict=True):
        plain = params_of("nothing", **({"temperature": 0} | more))
        assert (answer == expected_answer(reference, prompt, plain, NO_RULES)) == (case == "nothing"), f"{case} {more}"


def test_constraint_that_is_complete_keeps_the_last_token_in_the_text() -> None:
    """The request ends with "stop" although its last token is not an end token."""
    model = str(build_retrieval_model())
    with LLM(model, device="cpu", num_kvcache_blocks=8) as llm:
        outbox = Outbox()
        request = llm.text.make_request("one\ntwo\none\n", SamplingParams(temperature=0, max_tokens=40))
        request = replace(request, rules=AnswerRules(None, partial(Anything, 5)))
        (seq,) = llm.engine.make_sequences(request)
        llm.engine.add_sequence(seq, llm.text.receiver(outbox, seq.params, seq.token_ids))
        finished: dict[int, RequestOutput] = {}
        while not finished:
            finished = llm.engine.next_output(outbox).finished
    (output,) = finished.values()
    assert output["finish_reason"] == "stop" and len(output["token_ids"]) == 5
    assert output["text"] == llm.tokenizer.decode(output["token_ids"])


class Anything:
    """A constraint that allows every token and is complete after `num_tokens`."""

    is_ready, is_slow = True, False

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    @property
    def is_finished(self) -> bool:
        return self.num_left == 0

    def accept(self, token_id: int) -> bool:
        self.num_left -= 1
        return True

    def masks_for(self, guesses: list[int]) -> list[np.ndarray]:
        return []


def test_bad_words_are_not_in_the_text() -> None:
    prompt = "alpha beta gamma\ndelta\nalpha beta gamma\ndelta\nalpha beta"
    with LLM(str(build_retrieval_model()), device="cpu", num_kvcache_blocks=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        plain = llm.generate([prompt], params, use_tqdm=False)[0]["text"]
        without = llm.generate([prompt], replace(params, bad_words=["gamma"]), use_tqdm=False)[0]["text"]
    assert plain is not None and "gamma" in plain
    assert without is not None and "gamma" not in without


def test_bad_words_that_leave_no_token_end_their_request_alone(reference: Reference) -> None:
    """Regression: the engine was said to be the cause, because logits held NaN."""
    prompt, plain = PROMPTS[2], params_of("nothing", temperature=0)
    all_but_end = AnswerRules(bad_words([(token_id,) for token_id in range(VOCAB) if token_id != END]))
    after_the_first = AnswerRules(bad_words([(a, b) for a in range(VOCAB) for b in range(VOCAB)]))
    for internals in (Internals(), WORKS_AHEAD):
        with LLM(str(reference.directory), device="cpu", internals=internals, **cache_options(None)) as llm:
            expected, *others, same = run(
                llm,
                [
                    (prompt, plain, NO_RULES),
                    (prompt, params_of("nothing", min_tokens=2, ignore_eos=False), all_but_end),
                    (prompt, plain, after_the_first),
                    (prompt, plain, NO_RULES),
                ],
            )
        assert expected["token_ids"] == same["token_ids"] and len(same["token_ids"]) == NUM_TOKENS
        assert [len(output["token_ids"]) for output in others] == [0, 1]
        for output in others:
            assert (output["finish_reason"], output["error_cause"]) == ("error", "request")
            assert "the request's parameters forbid every token" in output["error"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias \[320\] are outside the vocabulary 0..319"),
        ({"bad_words": ["x"]}, "bad_words need a tokenizer"),
    ],
)
def test_edits_that_cannot_be_made_are_refused(reference: Reference, params: dict[str, Any], message: str) -> None:
    with (
        LLM(str(reference.directory), device="cpu", **cache_options(None)) as llm,
        pytest.raises(RequestError, match=message),
    ):
        llm.generate([[1, 2]], SamplingParams(**params), use_tqdm=False)
