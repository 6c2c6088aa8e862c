"""Outputs are dicts, and objects with vLLM's attributes."""

import asyncio
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from nanovllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    FlexibleArgumentParser,
    RequestOutputKind,
    SamplingParams,
)
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 20}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    with LLM(model, **OPTIONS) as llm:
        yield llm


def test_attributes_are_the_entries(engine: LLM) -> None:
    (output,) = engine.generate("Hello", GREEDY, use_tqdm=False)
    (answer,) = output.outputs
    assert output["outputs"] == [answer] and "outputs" not in output
    with pytest.raises(KeyError, match="embedding"):
        output["embedding"]
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs"):
        assert getattr(answer, name) == getattr(output, name) == output[name], name
    for name in ("prompt", "prompt_token_ids", "num_cached_tokens", "ttft_s", "num_prompt_tokens"):
        assert getattr(output, name) == output[name], name
    assert output.prompt == "Hello" and output.finished and answer.index == 0
    assert output.request_id == str(output["request_id"])
    assert output.prompt_logprobs is None and output.error is None and "error" not in output
    assert output.logprobs is not None
    assert answer.cumulative_logprob == pytest.approx(sum(next(iter(e.values())).logprob for e in output.logprobs))
    first = output.logprobs[0][output.token_ids[0]]
    assert first.decoded_token == first.text
    metrics = output.metrics
    assert metrics.num_generation_tokens == 8 and metrics.first_token_latency == output["ttft_s"]
    assert metrics.last_token_ts == pytest.approx(output["ttft_s"] + 7 * output["tpot_s"])
    assert {"text", "outputs", "finished", "token_ids"} <= set(dir(output))
    with pytest.raises(AttributeError, match="'RequestOutput' object has no attribute 'embedding'"):
        output.embedding  # noqa: B018
    with pytest.raises(AttributeError):
        output.text = ""
    copies = (copy.copy(output), pickle.loads(pickle.dumps(output)))
    assert all(each == output and type(each) is RequestOutput for each in copies)
    assert json.loads(json.dumps(output))["text"] == output.text


def test_outputs_of_several_answers_have_their_index(engine: LLM) -> None:
    (output,) = engine.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(n=3, seed=1, max_tokens=4), False)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert output.outputs is output["outputs"] and output.prompt is None
    assert output.outputs[0].text == output.text and len({each.text for each in output.outputs}) == 3


def test_prompt_of_token_ids_may_come_with_its_text(engine: LLM) -> None:
    prompt = {"prompt": "Hello", "prompt_token_ids": engine.tokenizer.encode("Hello")}
    assert engine.generate(prompt, GREEDY, use_tqdm=False)[0].prompt == "Hello"


def test_stop_reason_names_the_stop_string_or_token(engine: LLM) -> None:
    (output,) = engine.generate("Hello", GREEDY, use_tqdm=False)
    assert output.text and output.outputs[0].stop_reason is None
    stop = output.text[3:5]
    third, end = output.token_ids[2], engine.text.end_token_ids[0]
    plain = {"temperature": 0, "max_tokens": 8}
    for params, reason in (
        (SamplingParams(**plain, ignore_eos=True, stop=["zzz", stop]), stop),
        (SamplingParams(**plain, ignore_eos=True, stop_token_ids=[third]), third),
        (SamplingParams(**plain, ignore_eos=True, stop_token_ids=[end], logit_bias={end: 100}), end),
        (SamplingParams(**plain, stop_token_ids=[end], logit_bias={end: 100}), None),
    ):
        (stopped,) = engine.generate("Hello", params, use_tqdm=False)
        assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", reason)


def test_steps_return_the_same_outputs(engine: LLM) -> None:
    request_id = engine.add_request("Hello", GREEDY)
    finished: dict[int, RequestOutput] = {}
    while not engine.is_finished():
        finished |= engine.step().finished
    assert finished[request_id].request_id == str(request_id) and finished[request_id].prompt == "Hello"


def test_updates_of_a_stream_have_the_answer_so_far(model: Path) -> None:
    async def collect(params: SamplingParams) -> list[Any]:
        async with AsyncLLM(model, **OPTIONS) as engine:
            with pytest.raises(RequestError, match=r"generate does not take lora_request='x': merge the adapter"):
                await anext(engine.generate("Hello", params, lora_request="x"))
            others = {"lora_request": None, "priority": 0, "trace_headers": None}  # as vLLM's own server gives them
            updates = engine.generate(prompt="Hello", sampling_params=params, request_id="mine", **others)
            return [(update, update.outputs[0], update.finished) async for update in updates]

    (*earlier, last) = asyncio.run(collect(GREEDY))
    assert earlier and all(update.request_id == "mine" for update, *_ in (*earlier, last))
    text, token_ids = "", []
    for update, answer, finished in earlier:
        text, token_ids = text + update.text, token_ids + update.token_ids
        assert (answer.text, answer.token_ids, answer.finish_reason, finished) == (text, token_ids, None, False)
        assert len(answer.logprobs) == len(token_ids) and answer.cumulative_logprob < 0
    update, answer, finished = last
    assert finished and update.output.finished and answer.text == text + update.text
    assert answer.text == update.output.text and answer.finish_reason == "length"

    updates = asyncio.run(collect(SamplingParams(n=2, seed=3, max_tokens=4)))
    assert [finished for *_, finished in updates] == [False] * (len(updates) - 1) + [True]
    ended = {update.index: answer.index for update, answer, _ in updates if update.output is not None}
    assert ended == {0: 0, 1: 1}


def test_output_kind_chooses_what_the_outputs_of_updates_have(model: Path) -> None:
    async def collect(engine: AsyncLLM, kind: str) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, output_kind=kind)
        return [(update, *update.outputs) async for update in engine.generate("Hello", params)]

    async def collect_all() -> list[list[Any]]:
        args = AsyncEngineArgs(model=str(model), **OPTIONS)
        async with AsyncLLM.from_engine_args(args) as engine:
            return [await collect(engine, kind) for kind in RequestOutputKind]

    cumulative, delta, final = asyncio.run(collect_all())
    expected = cumulative[-1][1]
    assert expected.text and expected.text == delta[-1][0].output.text
    assert "".join(answer.text for _, answer in delta) == expected.text
    assert [token_id for _, answer in delta for token_id in answer.token_ids] == expected.token_ids and len(delta) > 1
    assert all(len(answer.logprobs) == len(answer.token_ids) for _, answer in delta)
    assert [answer.finish_reason for _, answer in delta] == [None] * (len(delta) - 1) + ["length"]
    ((update, answer),) = final
    assert update.finished and (answer.text, answer.token_ids) == (expected.text, expected.token_ids)


def test_arguments_of_an_engine_come_from_flags(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model=str(model))
    parser.add_argument("--max-tokens", type=int)
    given = ["prog", "--max_tokens=3", "--max_model_len", "64", "--device=cpu", "--num-kvcache-blocks", "4"]
    monkeypatch.setattr("sys.argv", given)
    args = parser.parse_args()
    engine_args = EngineArgs.from_cli_args(args)
    assert engine_args == {"model": str(model), "max_model_len": 64, "device": "cpu", "num_kvcache_blocks": 4}
    assert (engine_args.max_model_len, engine_args.tensor_parallel_size, args.max_tokens) == (64, 1, 3)
    given_args = vars(args)
    del given_args["max_tokens"]
    for make in (lambda: LLM(**given_args), lambda: LLM.from_engine_args(engine_args)):
        with make() as llm:
            assert llm.max_model_len == 64
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-such-flag"])
