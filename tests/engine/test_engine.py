"""The calls a user makes, and what bad input gets."""

import gc
import json
import os
import shutil
import signal
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from integrity import check_scheduler
from run_threads import in_threads
from tiny_engines import KINDS, finish_all
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.engine import startup
from nanovllm.errors import CheckpointError, ConfigError, EngineError, RequestError
from nanovllm.executor.base import LaunchedStep
from nanovllm.plan.kv_spec import BlockState
from nanovllm.utils.interrupt import deferred_interrupt

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAX_MODEL_LEN = 2048
PROMPTS = ["Hello world", "The quick", "x", "abc " * 150]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(model: Path, kind: str = "all GPU", device: str = "cpu", **options: Any) -> LLM:
    defaults = {"dtype": "float32", "max_num_batched_tokens": 200, "enforce_eager": True}
    return LLM(str(model), device=device, **(defaults | KINDS.get(kind, {}) | options))


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=KINDS)
def llm(model: Path, device: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Shared: every test leaves it idle (see `idle`), and prefix hits change no token."""
    with make_llm(model, request.param, device) as engine:
        yield engine


@pytest.fixture(autouse=True)
def idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the shared engine with nothing to do and nothing held."""
    yield
    if "llm" not in request.fixturenames:
        return
    engine = request.getfixturevalue("llm")
    was_idle = engine.is_finished()
    for request_id in list(engine.scheduler.sequences):  # so that a failed test does not spoil the next ones
        engine.abort(request_id)
    while not engine.is_finished():
        engine.step()
    assert was_idle
    check_scheduler(engine.scheduler)
    stats = engine.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0
    kind = "cpu" if engine.config.enable_cpu_offload else "gpu"
    assert stats[f"num_free_{kind}_blocks"] == stats[f"num_{kind}_blocks"]


# -- generate --------------------------------------------------------------------------------------------------------


def test_generate_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5, 1)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [9, 2, 5, 1]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert set(output) == {
            *("request_id", "prompt", "text", "token_ids", "prompt_token_ids", "finish_reason", "stop_reason"),
            *("num_prompt_tokens", "num_cached_tokens", "ttft_s", "tpot_s"),
        }
        assert output["prompt_token_ids"] == llm.tokenizer.encode(prompt)
        assert output["num_prompt_tokens"] == len(prompt)
        assert output["text"] == llm.tokenizer.decode(output["token_ids"])
        assert output["finish_reason"] == "length"
        assert output["ttft_s"] is not None and output["ttft_s"] > 0
    assert outputs[3]["tpot_s"] is None
    assert all(output["tpot_s"] is not None and output["tpot_s"] > 0 for output in outputs[:3])


PROMPT_KINDS: dict[str, Callable[[list[int]], Any]] = {
    "text": lambda ids: "Hello",
    "list": list,
    "numpy": lambda ids: np.array(ids),
    "numpy int32": lambda ids: np.array(ids, np.int32),
    "numpy scalars": lambda ids: list(np.array(ids)),
    "tuple": tuple,
    "array": lambda ids: array("q", ids),
    "dict of ids": lambda ids: {"prompt_token_ids": ids},
    "dict of text and ids": lambda ids: {"prompt": "not this", "prompt_token_ids": np.array(ids)},
    "dict of text": lambda ids: {"prompt": "Hello"},
    "dict with null": lambda ids: {"prompt": "Hello", "prompt_token_ids": None},
}


def test_generate_prompts_of_every_kind_agree(llm: LLM) -> None:
    """R7: only strings and lists of plain integers were taken, and one call could not mix them."""
    ids, params = llm.tokenizer.encode("Hello"), replace(GREEDY, max_tokens=3)
    (expected,) = llm.generate("Hello", params, use_tqdm=False)
    for kind, make in PROMPT_KINDS.items():
        prompt = make(ids)
        assert token_ids(llm, prompt, params) == [expected["token_ids"]], kind
        assert token_ids(llm, (p for p in ("Hello", prompt, ids)), params) == [expected["token_ids"]] * 3, kind
        assert "".join(llm.stream(prompt, params)) == expected["text"], kind
    rows = np.arange(12).reshape(3, 4)  # of an array, each is a prompt
    assert token_ids(llm, rows, params) == token_ids(llm, rows.tolist(), params)
    assert token_ids(llm, range(4), params) == token_ids(llm, [[0, 1, 2, 3]], params)
    assert llm.generate([], params, use_tqdm=False) == []


def test_generate_second_time_counts_cached_tokens(llm: LLM) -> None:
    prompt = [7, *range(300)]
    first, second = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first["num_cached_tokens"], second["num_cached_tokens"]) == (0, 256)
    assert first["token_ids"] == second["token_ids"]


def test_generate_shows_a_bar_with_both_rates_at_a_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(PROMPTS[:2], GREEDY)
    assert capsys.readouterr().err == ""  # a log
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(PROMPTS[:2], GREEDY)
    shown = capsys.readouterr().err
    assert "Generating: 100%" in shown and "2/2" in shown
    assert "Prefill=" in shown and "Decode=" in shown and "tok/s" in shown
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_generate_leaves_requests_added_by_hand_to_step(llm: LLM) -> None:
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    (output,) = llm.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert output["num_prompt_tokens"] == len(PROMPTS[1])
    held = llm.step()
    assert held.finished[request_id]["text"] == held.texts[request_id]
    assert len(held.finished[request_id]["token_ids"]) == 12


# -- sampling --------------------------------------------------------------------------------------------------------


def seeded(seed: int, **params: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=10, ignore_eos=True, **params)


def token_ids(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_seeded_request_gives_the_same_tokens_whatever_it_is_batched_with(llm: LLM, model: Path, device: str) -> None:
    params = [seeded(1), seeded(2, top_k=20), seeded(3, top_p=0.9), seeded(4, min_p=0.02, temperature=0.7)]
    alone = [token_ids(llm, [prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    assert token_ids(llm, PROMPTS, params) == alone
    assert token_ids(llm, PROMPTS[::-1], params[::-1]) == alone[::-1]
    assert token_ids(llm, [*PROMPTS, "more", "company"], [*params, GREEDY, seeded(9)])[:4] == alone
    with make_llm(model, "offload", device, num_gpu_blocks=2, max_num_batched_tokens=37, seed=5) as other:
        assert token_ids(other, PROMPTS, params) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_bounded_steps_give_the_same_tokens(model: Path, kind: str) -> None:
    """Long and short prompts at once, in steps that aim for the shortest time there is."""
    prompts = [[1 + i % 200 for i in range(n)] for n in (300, 5, 250, 40)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for max_step_ms in (None, 1.0):
        with make_llm(model, kind, max_num_batched_tokens=128, max_step_ms=max_step_ms) as llm:
            answers.append(token_ids(llm, prompts, params))
    assert answers[0] == answers[1]


def test_seeds_differ_and_repeat(llm: LLM) -> None:
    one, again, other = token_ids(llm, ["abc"] * 3, [seeded(1), seeded(1), seeded(2)])
    assert one == again != other
    assert token_ids(llm, ["abc"], seeded(-1)) != [one]


def test_requests_without_a_seed_draw_from_the_engines(model: Path) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    drawn = []
    for seed in (0, 0, 1):
        with make_llm(model, seed=seed) as engine:
            drawn.append(token_ids(engine, ["abc"] * 2, params))
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]  # each request its own


# -- ends ------------------------------------------------------------------------------------------------------------


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    full = llm.generate(["12345"], GREEDY, use_tqdm=False)[0]
    assert full["text"] is not None
    stop = full["text"][3:5]  # two tokens
    assert "\ufffd" not in stop
    for given in (stop, ["never", stop], (stop, full["text"][8:10])):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=given)
        output = llm.generate(["12345"], params, use_tqdm=False)[0]
        assert output["text"] == full["text"][: full["text"].index(stop)]
        assert output["finish_reason"] == "stop"
        assert output["token_ids"] == full["token_ids"][: len(output["token_ids"])] != full["token_ids"]
        assert "".join(llm.stream("12345", params)) == output["text"]
    in_last_token = replace(GREEDY, max_tokens=5, stop=full["text"][4])
    assert llm.generate(["12345"], in_last_token, use_tqdm=False)[0]["finish_reason"] == "stop"


def test_stop_token_id_ends_with_it(llm: LLM) -> None:
    full = token_ids(llm, ["12345"], GREEDY)[0]
    end = full.index(full[4])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[full[4]])
    output = llm.generate(["12345"], params, use_tqdm=False)[0]
    assert (output["token_ids"], output["finish_reason"]) == (full[: end + 1], "stop")


@pytest.mark.parametrize("named_by", ["generation_config", "tokenizer"])
def test_end_token_ends_unless_ignored(model: Path, tmp_path: Path, named_by: str) -> None:
    """M5: a chat ran on behind its <|im_end|> where the configs name the base model's end token alone."""
    from transformers import AutoTokenizer

    with make_llm(model) as engine:
        full = token_ids(engine, ["Hello world"], GREEDY)[0]
    end_token = full[2]
    directory = shutil.copytree(model, tmp_path / "model")
    assert full.index(end_token) == 2
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] != end_token
    if named_by == "tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_token)
        tokenizer.save_pretrained(directory)
    else:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end_token, 318]}))
    with make_llm(directory) as engine:
        output = engine.generate(["Hello world"], replace(GREEDY, ignore_eos=False), use_tqdm=False)[0]
        assert (output["token_ids"], output["finish_reason"]) == (full[:3], "stop")
        assert token_ids(engine, ["Hello world"], GREEDY)[0] == full


def test_end_token_is_in_the_text_only_if_asked_for(llm: LLM) -> None:
    """Its id is in token_ids in any case. As in vLLM that goes for stop_token_ids, too."""
    full = token_ids(llm, ["12345"], GREEDY)[0]
    texts = {}
    for include in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=12,
            stop_token_ids=[full[4]],
            skip_special_tokens=False,
            include_stop_str_in_output=include,
        )
        output = llm.generate(["12345"], params, use_tqdm=False)[0]
        assert output["token_ids"] == full[: full.index(full[4]) + 1]
        texts[include] = output["text"]
        assert "".join(llm.stream("12345", params)) == output["text"]
    assert texts[True] == llm.tokenizer.decode(full[: full.index(full[4]) + 1])
    assert texts[False] == llm.tokenizer.decode(full[: full.index(full[4])])


def test_stop_string_that_is_a_special_token_matches_where_those_are_shown(
    model: Path, tmp_path: Path, device: str
) -> None:
    """M4: special tokens were dropped before the search, so such a stop string never matched."""
    from transformers import AutoTokenizer

    prompts = [f"{i}" for i in range(40)]
    with make_llm(model, device=device) as engine:
        answers = dict(zip(prompts, token_ids(engine, prompts, GREEDY), strict=True))
    # The tokenizer has bytes up to 255; one of the words that follow becomes special
    prompt, full, end = next((p, ids, i) for p, ids in answers.items() for i, t in enumerate(ids) if 255 < t < 319)
    directory = shutil.copytree(model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    special = tokenizer.convert_ids_to_tokens(full[end])
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    tokenizer.save_pretrained(directory)
    with make_llm(directory, device=device) as engine:
        ends = {}
        for skip in (True, False):
            params = replace(GREEDY, stop=special, skip_special_tokens=skip)
            ends[skip] = engine.generate([prompt], params, use_tqdm=False)[0]
        assert (ends[True]["finish_reason"], len(ends[True]["token_ids"])) == ("length", 12)
        assert (ends[False]["finish_reason"], ends[False]["token_ids"]) == ("stop", full[: end + 1])
        assert special not in (ends[False]["text"] or "")
        params = replace(GREEDY, stop=special, skip_special_tokens=False, include_stop_str_in_output=True)
        assert (engine.generate([prompt], params, use_tqdm=False)[0]["text"] or "").endswith(special)


def test_detokenize_off_makes_no_text(llm: LLM) -> None:
    expected = token_ids(llm, PROMPTS, GREEDY)
    outputs = llm.generate(PROMPTS, replace(GREEDY, detokenize=False), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == expected
    assert all(output["text"] is None for output in outputs)
    with pytest.raises(RequestError, match="stream yields text; leave detokenize on"):
        llm.stream("x", replace(GREEDY, detokenize=False))


@pytest.mark.parametrize("kind", KINDS)
def test_max_tokens_none_runs_to_the_end_of_the_context_or_of_the_cache(model: Path, kind: str) -> None:
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with make_llm(model, kind, max_model_len=40) as engine:
        assert len(token_ids(engine, [[1] * 30], endless)[0]) == 10
        with pytest.raises(RequestError, match="leaves no room for an answer in max_model_len=40; shorten"):
            engine.generate([[1] * 40], endless, use_tqdm=False)
    small = {"num_kvcache_blocks": 1} if kind == "all GPU" else {"num_cpu_blocks": 1}
    with make_llm(model, kind, **small) as engine:
        assert len(token_ids(engine, [[1] * 250], endless)[0]) == 7  # the last one needs no K and V


# -- chat and stream -------------------------------------------------------------------------------------------------


def test_chat_applies_the_template_to_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "Hello"}]
    two = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Why?"}]
    expected = token_ids(llm, ["user: Hello\nassistant:", "system: Be brief\nuser: Why?\nassistant:"], GREEDY)
    assert [output["token_ids"] for output in llm.chat(one, GREEDY, use_tqdm=False)] == expected[:1]
    assert [output["token_ids"] for output in llm.chat([one, two], GREEDY, use_tqdm=False)] == expected


def test_stream_yields_the_text_of_generate_piece_by_piece(llm: LLM) -> None:
    for prompt in PROMPTS:
        pieces = list(llm.stream(prompt, GREEDY))
        assert "".join(pieces) == llm.generate([prompt], GREEDY, use_tqdm=False)[0]["text"]
        assert len(pieces) > 2


def test_two_streams_and_a_generate_at_once_get_their_own(llm: LLM) -> None:
    expected = [output["text"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[3], GREEDY)
    texts = [next(first), next(second), next(first)]
    assert llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)[0]["text"] == expected[1]
    assert texts[0] + texts[2] + "".join(first) == expected[0]
    assert texts[1] + "".join(second) == expected[3]


def test_stream_refuses_before_the_first_piece_is_asked_for(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        llm.stream("x", SamplingParams(max_tokens=MAX_MODEL_LEN))


# -- requests by hand ------------------------------------------------------------------------------------------------


def test_add_request_step_and_abort(llm: LLM) -> None:
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    assert len(set(ids)) == 4 and not llm.is_finished()
    texts, finished = dict.fromkeys(ids, ""), {}
    llm.step()
    assert llm.abort(ids[1]) and not llm.abort(ids[1])
    while not llm.is_finished():
        output = llm.step()
        finished |= output.finished
        for request_id, text in output.texts.items():
            texts[request_id] += text
    assert set(finished) == set(ids)
    assert [finished[i]["finish_reason"] for i in ids] == ["length", "abort", "length", "length"]
    assert finished[ids[1]]["num_prompt_tokens"] == len(PROMPTS[1])
    assert not llm.abort(ids[0]) and not llm.abort(12345)
    first_step_texts = [finished[i]["text"].removesuffix(texts[i]) for i in finished]
    assert all(len(text) <= 8 for text in first_step_texts)  # `texts` lacks only what the very first step brought


def test_abort_before_the_first_step_ends_the_request_with_an_empty_output(llm: LLM) -> None:
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    num_steps = llm.stats()["num_steps"]
    assert llm.abort(request_id) and not llm.is_finished()
    output = llm.step().finished[request_id]
    assert (output["finish_reason"], output["token_ids"], output["text"]) == ("abort", [], "")
    assert output["ttft_s"] is output["tpot_s"] is None
    assert llm.is_finished() and llm.stats()["num_steps"] == num_steps


def test_stream_whose_request_is_aborted_ends_without_a_step_of_another_one(llm: LLM) -> None:
    """Regression: it ran 60 steps of the other request and then raised."""
    (whole,) = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    stream = llm.stream(PROMPTS[0], GREEDY)
    text = next(stream)
    (request_id,) = llm.scheduler.sequences
    other = llm.add_request(PROMPTS[3], GREEDY)
    text += next(stream)
    num_steps = llm.stats()["num_steps"]
    assert llm.abort(request_id)
    text += "".join(stream)
    assert llm.stats()["num_steps"] == num_steps
    assert text and whole["text"] is not None and whole["text"].startswith(text) and text != whole["text"]
    finished = finish_all(llm)
    assert list(finished) == [other] and finished[other]["finish_reason"] == "length"


def test_step_counts_prefill_and_decode_tokens(llm: LLM) -> None:
    llm.add_request([5] * 50, SamplingParams(max_tokens=3, ignore_eos=True))
    counts = []
    while not llm.is_finished():
        output = llm.step()
        counts.append((output.num_prefill_tokens, output.num_decode_tokens))
    assert [count for count in counts if count != (0, 0)] == [(50, 0), (0, 1), (0, 1)]


def test_last_token_of_a_prompt_counts_as_prefill_in_a_step_of_its_own(llm: LLM) -> None:
    """Regression: it counted as a token of the answer."""
    for num_tokens in (1, llm.config.max_num_batched_tokens + 1):
        before = llm.stats()
        llm.generate([[7] * num_tokens], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        after = llm.stats()
        counts = [after[name] - before[name] for name in ("num_prefill_tokens", "num_decode_tokens")]
        assert counts == [num_tokens, 2]


def test_stats_count(llm: LLM) -> None:
    before = llm.stats()
    llm.generate([list(range(200)) + list(range(300))], GREEDY, use_tqdm=False)
    after = llm.stats()
    assert after["num_steps"] - before["num_steps"] >= 14
    assert after["block_bytes"] == 2 * 2 * 256 * 2 * 16 * 4
    if llm.config.enable_cpu_offload:
        assert (after["num_gpu_blocks"], after["num_cpu_blocks"]) == (3, 20)
        assert after["num_offloaded_bytes"] - before["num_offloaded_bytes"] >= after["block_bytes"]
        assert after["num_hit_blocks"] > before["num_hit_blocks"]
    else:
        assert after["num_gpu_blocks"] == 20
    assert after["num_preemptions"] == 0
    assert after["num_prefill_tokens"] - before["num_prefill_tokens"] == 500
    assert after["num_decode_tokens"] - before["num_decode_tokens"] == 11


def test_block_states_can_be_read_while_a_step_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    wait_for = llm.engine.executor.wait_for

    def watch() -> None:
        states = llm.block_states()
        assert len(states) == 20
        seen.update(states)

    def watch_and_wait(step: LaunchedStep) -> None:
        in_threads(watch)  # this one is in a turn of the engine
        wait_for(step)

    monkeypatch.setattr(llm.engine.executor, "wait_for", watch_and_wait)
    llm.generate([[7] * 1100, [8] * 700], GREEDY, use_tqdm=False)
    assert {BlockState.FREE, BlockState.RESIDENT, BlockState.WRITTEN} <= seen
    missing = {BlockState.STREAMED, BlockState.CPU_ATTENDED} & seen
    assert bool(missing) == llm.config.enable_cpu_offload


def test_offload_stats_count_the_bytes_of_streamed_blocks(model: Path) -> None:
    with make_llm(model, "offload", num_gpu_blocks=2, cpu_attention="off") as engine:
        engine.generate([list(range(300)) * 4], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        stats = engine.stats()
        assert stats["num_offloaded_bytes"] == 4 * stats["block_bytes"]  # each full block once
        assert stats["num_loaded_bytes"] == stats["num_missed_blocks"] * stats["block_bytes"] > 0


def test_open_ended_answers_that_outgrow_the_pool_have_the_tokens_of_a_large_one(model: Path) -> None:
    """Regression: a request without max_tokens reserved the rest of its context, so that two ran at once here."""
    prompts = [[n + 1, *range(50, 250 + 10 * n)] for n in range(6)]
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=None, ignore_eos=True) for n in range(6)]
    options = {"num_gpu_blocks": 8, "max_model_len": 290, "max_num_batched_tokens": 2048}
    texts, num_running = [], []
    for num_cpu_blocks in (6, 40):  # three contexts; all of them
        with make_llm(model, "offload", **(options | {"num_cpu_blocks": num_cpu_blocks})) as engine:
            ids = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
            finished: dict[int, Any] = {}
            while not engine.is_finished():
                finished |= engine.step().finished
                num_running.append(engine.stats()["num_running"])
            assert engine.stats()["num_preemptions"] >= 3 * (num_cpu_blocks == 6)
            check_scheduler(engine.scheduler)
            texts.append([finished[request_id]["token_ids"] for request_id in ids])
            assert all(output["finish_reason"] == "length" for output in finished.values())
    assert texts[0] == texts[1]
    assert num_running[0] == 6


# -- life of an engine -----------------------------------------------------------------------------------------------


def test_close_twice_is_fine_and_a_closed_engine_refuses(model: Path) -> None:
    """An error inside the context closes, too."""
    with pytest.raises(ZeroDivisionError), make_llm(model, "offload") as engine:
        _ = 1 / 0
    engine.close()
    for call in (lambda: engine.generate(["x"], GREEDY), lambda: engine.add_request("x", GREEDY), engine.step):
        with pytest.raises(EngineError, match="closed"):
            call()


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_engine_dropped_without_close_is_gone_at_once(model: Path, device: str, kind: str, enforce_eager: bool) -> None:
    """It holds itself in no circle: the garbage collector, to which on a GPU it is frozen, is not needed."""
    engine = make_llm(model, kind, device, enforce_eager=enforce_eager)
    token_ids(engine, PROMPTS, GREEDY)
    runner = engine.runner
    parts = [engine, engine.engine, engine.engine.executor, engine.text, engine.scheduler]
    parts += [runner, runner.model, runner.graphs, runner.offload]
    references = [weakref.ref(part) for part in parts if part is not None]
    del parts, runner
    gc.disable()
    try:
        del engine
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


@pytest.mark.gpu
def test_collector_leaves_out_what_start_up_made_until_the_engine_is_closed(model: Path) -> None:
    """Regression: full collections of 0.2 s each, one in some hundred steps of 256 sequences."""
    gc.unfreeze()  # what conftest.py has frozen
    with make_llm(model, device="cuda") as engine:
        assert gc.get_freeze_count() > 10_000
        token_ids(engine, PROMPTS, GREEDY)
    assert gc.get_freeze_count() == 0


def test_two_engines_in_one_process_do_not_meet(model: Path, device: str) -> None:
    with make_llm(model, "offload", device) as one, make_llm(model, "all GPU", device) as two:
        expected = token_ids(one, PROMPTS, GREEDY)
        ids = [(one.add_request(prompt, GREEDY), two.add_request(prompt, GREEDY)) for prompt in PROMPTS]
        finished_one: dict[int, Any] = {}
        finished_two: dict[int, Any] = {}
        while not (one.is_finished() and two.is_finished()):
            finished_one |= one.step().finished
            finished_two |= two.step().finished
        assert [finished_one[i]["token_ids"] for i, _ in ids] == expected
        assert [finished_two[i]["token_ids"] for _, i in ids] == expected


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt_in_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C in the middle of a step: its `n`-th from now."""

    def install(n: int) -> None:
        launch, remaining = llm.runner.launch, [n]

        def launch_and_interrupt(plan: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return launch(plan)

        monkeypatch.setattr(llm.runner, "launch", launch_and_interrupt)

    return install


@pytest.mark.parametrize("num_steps", [1, 2, 9])
def test_ctrl_c_in_generate_ends_its_requests_and_the_engine_goes_on(
    llm: LLM, interrupt_in_step: Callable[[int], None], num_steps: int
) -> None:
    expected = token_ids(llm, PROMPTS, GREEDY)
    other = llm.add_request(PROMPTS[2], GREEDY)
    interrupt_in_step(num_steps)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert set(llm.scheduler.sequences) == {other}  # not of this call: still there
    assert finish_all(llm)[other]["token_ids"] == expected[2]
    assert token_ids(llm, PROMPTS, GREEDY) == expected


def test_ctrl_c_in_stream_ends_it(llm: LLM, interrupt_in_step: Callable[[int], None]) -> None:
    interrupt_in_step(3)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(PROMPTS[0], GREEDY))
    assert not llm.scheduler.has_unfinished
    token_ids(llm, PROMPTS[:1], GREEDY)


def test_deferred_interrupt_holds_all_but_a_second_one_where_it_may_act_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as held:
        try:
            with held.second_acts_at_once():
                os.kill(os.getpid(), signal.SIGINT)
                reached.append("after the first")
                os.kill(os.getpid(), signal.SIGINT)
                reached.append("after the second")
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("cleaned up")
    assert reached == ["after the first", "cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after both")
    assert reached[-1] == "after both"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_deferred_interrupt_in_another_thread_does_nothing() -> None:
    handlers = []

    def run() -> None:
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


# -- what bad input gets ---------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a runner, and with it the model and its cache, comes into being."""

    def refuse(*args: object) -> None:
        raise AssertionError("a runner was made")

    monkeypatch.setattr(startup, "make_runner", refuse)


OFFLOAD = {"enable_cpu_offload": True}
THOUSAND_LAYERS = {"num_hidden_layers": 1000, "layer_types": ["full_attention"] * 1000}


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpu_block": 8}, "LLM has no option num_gpu_block; did you mean num_gpu_blocks or"),
        (OFFLOAD | {"num_cpu_blocks": 10**9}, r"a CPU pool of 1000000000 blocks needs .* GiB, .* lower num_cpu_blocks"),
        (
            OFFLOAD | {"cpu_memory_gb": 1e6},
            r"a CPU pool of \d+ blocks needs 1000000.00 GiB, but only .* is available; lower",
        ),
        (
            OFFLOAD | {"cpu_memory_gb": 1e-6},
            "cpu_memory_gb=1e-06 is less than one block of 128.00 KiB; raise cpu_memory_gb to 0.01",
        ),
        ({"num_kvcache_blocks": 10**8}, "num_kvcache_blocks=100000000 blocks .* weights .* lower num_kv"),
        (OFFLOAD | {"num_gpu_blocks": 10**8}, "=100000000 blocks .* weights and staging .*; lower num_gpu"),
        (
            {"kvcache_block_size": 2**30, "hf_overrides": THOUSAND_LAYERS},  # too large for any machine
            r"num_kvcache_blocks=1 blocks of .* GiB need .*; use a smaller .* block size",
        ),
        (
            {"max_model_len": 4096},
            "max_model_len=4096 is more than the 2048 tokens that the model's rope covers; lower",
        ),
        (
            {"hf_overrides": {"rope": 1}},
            "hf_overrides names 'rope', which the engine does not read; choose from architectures",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be 1 or more"),  # more of what Config refuses: test_config.py
        ({"attn_backend": "flash"}, "attn_backend='flash' cannot run here: it needs a CUDA GPU.* use 'auto'"),
    ],
)
def test_bad_option_is_refused_with_value_limit_and_remedy(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(model), **({"device": "cpu"} | options))


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures.0.='GPT2LMHeadModel'.* is not supported; supported"),
        ({"head_dim": 72}, "head_dim=72 .* is not supported; use a checkpoint with one of 16, .*128"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}, "rope_parameters": None}, "rope"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            "quantization_config.bits=3 .*supported are 4, 8",
        ),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_window=512.*only full attention is supported"),
    ],
)
def test_unsupported_model_setting_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((model / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.usefixtures("nothing_allocated")
@pytest.mark.parametrize(("name", "message"), [("absent", "does not exist; give"), ("empty", "no config.json in")])
def test_model_directory_without_a_model_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=message):
        LLM(str(tmp_path / name), device="cpu")


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "the prompt is empty"),
    ("", {}, "the prompt is empty"),
    ([1, 320], {}, r"token_ids\[1\]=320 is outside the vocabulary 0..319"),
    ([1, -1], {}, r"token_ids\[1\]=-1 is outside the vocabulary"),
    ([1, 2**70], {}, rf"token_ids\[1\]={2**70} is outside the vocabulary"),
    ([1, 2.0], {}, r"token_ids\[1\]=2.0 is not an integer"),
    ([1, "a"], {}, r"token_ids\[1\]='a' is not an integer"),
    ([1, True], {}, r"token_ids\[1\]=True is not an integer"),
    ((1, np.True_), {}, r"token_ids\[1\]=np.True_ is not an integer"),
    ([5, np.array([3])], {}, r"token_ids\[1\]=array\(\[3\]\) is not an integer"),
    (np.array([1, 2**63], np.uint64), {}, rf"token_ids\[1\]={2**63} is outside the vocabulary"),
    (array("d", [1.0]), {}, "an array of float64"),
    (5, {}, "a prompt has type int, expected a string or a list of token ids"),
    ([1] * 2000, {"max_tokens": 49}, r"prompt of 2000 tokens \+ max_tokens=49 exceeds max_model_len=2048; shorten"),
    ("x", {"stop_token_ids": [320]}, r"stop_token_ids \[320\] are outside the vocabulary 0..319; leave them out"),
    ("a\ud800b", {}, "not valid Unicode text; remove lone surrogates"),  # was a TypeError inside the tokenizer
    ("x", {"max_tokens": 2048}, r"prompt of 1 tokens \+ max_tokens=2048 exceeds max_model_len=2048"),
]


def test_bad_request_is_refused_and_leaves_running_ones_untouched(llm: LLM) -> None:
    expected = token_ids(llm, PROMPTS[3:], GREEDY)[0]
    running = llm.add_request(PROMPTS[3], GREEDY)
    llm.step()
    for prompt, params, message in BAD_REQUESTS:
        with pytest.raises(RequestError, match=message):
            llm.add_request(prompt, SamplingParams(**params))
    finished = finish_all(llm)
    assert list(finished) == [running] and finished[running]["token_ids"] == expected


def test_longest_request_that_fits_runs(llm: LLM) -> None:
    (output,) = llm.generate([[1] * (MAX_MODEL_LEN - 2)], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output["token_ids"]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_request_larger_than_the_pool_is_refused_when_added(model: Path, kind: str) -> None:
    small = {"num_kvcache_blocks": 2} if kind == "all GPU" else {"num_cpu_blocks": 2}
    with make_llm(model, kind, **small) as engine:
        with pytest.raises(RequestError, match=r"prompt of 510 tokens \+ max_tokens=4 needs 3 .* blocks of 256 tokens"):
            engine.add_request([1] * 510, SamplingParams(max_tokens=4))
        engine.generate([[1] * 510], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)


def test_generate_with_a_prompt_larger_than_the_pool_queues_none_of_them(model: Path) -> None:
    """Regression: those before it were queued and aborted, though the error's description said that none was."""
    with make_llm(model, num_kvcache_blocks=2) as engine:
        with (
            mock.patch.object(engine.scheduler, "add", wraps=engine.scheduler.add) as add,
            pytest.raises(RequestError, match="prompt of 510 tokens"),
        ):
            engine.generate([[1] * 5, [1] * 510], SamplingParams(max_tokens=4), use_tqdm=False)
        assert add.call_count == 0 and engine.is_finished()


BAD_CALLS: list[tuple[Any, Any, str]] = [
    (["a", "b"], [GREEDY], "1 sampling_params for 2 prompts; give one, or one per prompt"),
    (["a"], [], "0 sampling_params for 1 prompts"),
    (["a", 5], None, "a prompt has type int, expected a string or a list of token ids"),
    ({"a": 1}, None, "a prompt is a dict with the keys 'a'; expected"),
    ({"prompt": "a", "multi_modal_data": {}}, None, "keys 'prompt', 'multi_modal_data'; expected"),
    ([{}], None, "a prompt is a dict with the keys none"),
    (b"abc", None, "prompts has type bytes, expected"),
    ([b"abc"], None, "a prompt has type bytes, expected"),
    (np.ones(3), None, "a prompt has type float64, expected"),
    ([np.ones((1, 2), int)], None, r"an array of int64 of shape \(1, 2\), expected integers in one dimension"),
    ([np.array([1.5])], None, "an array of float64"),
    (7, None, "prompts has type int, expected"),
    ([[1], []], None, "the prompt is empty"),
    ([[1], [400]], None, "outside the vocabulary"),
    (["a"], {"temperature": 0}, "sampling_params has type dict, expected SamplingParams"),
    (["a", "b"], [GREEDY, 3], "sampling_params has type int, expected SamplingParams"),
]


def test_generate_bad_arguments_are_refused_before_anything_is_queued(llm: LLM) -> None:
    for prompts, params, message in BAD_CALLS:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params, use_tqdm=False)
        assert not llm.scheduler.has_unfinished


def test_without_a_tokenizer_token_ids_work_and_text_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with make_llm(tmp_path) as engine:
        output = engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]
        assert output["text"] is None and len(output["token_ids"]) == 12
        calls: dict[str, Callable[[], object]] = {
            "a text prompt needs a tokenizer, .* give a list of token ids": lambda: engine.generate(["a"]),
            "stop strings need a tokenizer, .* use stop_token_ids": lambda: engine.generate(
                [[1]], SamplingParams(stop="a")
            ),
            "stream yields text and needs a tokenizer, .* use generate": lambda: engine.stream([1, 2]),
            "chat needs a tokenizer with a chat template, .* use generate": lambda: engine.chat([{"role": "user"}]),
        }
        for message, call in calls.items():
            with pytest.raises(RequestError, match=message):
                call()
