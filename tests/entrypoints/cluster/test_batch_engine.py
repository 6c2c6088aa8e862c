"""BatchEngine and RowAnswerer with the built-in model, without Ray: rows to answers, and parts of files."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from chat_formats import SAID, write_chat_model

from nanovllm.async_llm import AsyncLLM
from nanovllm.capacity.machine import Machine
from nanovllm.entrypoints.cluster.batch_engine import MAX_TRIES, BatchEngine, EngineJob, RowAnswerer
from nanovllm.entrypoints.cluster.batch_files import JsonLinesRows, UnitRows
from nanovllm.entrypoints.cluster.batch_rows import RowDefaults, RowPlace, Unit, UnitLimits, error_columns, plan_units
from nanovllm.errors import EngineError, RequestError
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.sampling_params import SamplingParams

OPTIONS = {"device": "cpu", "num_kvcache_blocks": 64, "max_model_len": 4096}
GREEDY = RowDefaults({}, {"temperature": 0.0}, seed=0)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(build_retrieval_model(), **OPTIONS)
    yield engine
    engine.close()


def answer(engine: AsyncLLM, rows: Sequence[Any], documents: Sequence[int] | None = None) -> list[dict[str, Any]]:
    places = [RowPlace(0, line, 0, document) for line, document in enumerate(documents or [-1] * len(rows))]
    return asyncio.run(RowAnswerer(engine, GREEDY).answer_unit(rows, places))


def test_answer_unit_each_kind_of_prompt(engine: AsyncLLM) -> None:
    text = "The passkey is 4711.\nThe passkey is"
    added = answer(
        engine,
        [
            {"prompt": text, "max_tokens": 5},
            {"prompt_token_ids": list(text.encode()), "max_tokens": 5},
            {"messages": [{"role": "user", "content": "Hello there, you."}]},
            {"prompt": text, "max_tokens": 5, "detokenize": False},
        ],
    )
    assert [each["text"] for each in added[:2]] == [" 4711", " 4711"] and added[3]["text"] is None
    assert added[2]["text"].startswith("I complete lines") and added[2]["finish_reason"] == "stop"
    assert added[0]["token_ids"] == list(b" 4711") == added[3]["token_ids"]
    assert added[0]["finish_reason"] == "length" and all(each["error"] is None for each in added)


def test_answer_unit_conversation_has_the_reasoning_apart(tmp_path: Path) -> None:
    """Regression: the text of an answer of gpt-oss was "analysisI think 1.assistantfinalIt rains."."""
    said, name = SAID["gpt-oss"]["text"], "gpt-oss"
    engine = AsyncLLM(write_chat_model(build_retrieval_model(), tmp_path / "model", name), **OPTIONS)
    row = {"messages": [{"role": "user", "content": said}], "max_tokens": 150}
    added, two, ids = answer(engine, [row, row | {"n": 2}, row | {"detokenize": False}])
    engine.close()
    for each in (added, two, *two["outputs"]):
        assert (each["reasoning_content"], each["text"]) == ("I think 1.", "It rains.")
    assert ids["text"] is None and ids["token_ids"] == added["token_ids"]


def test_answer_unit_bad_rows_do_not_disturb_the_others(engine: AsyncLLM) -> None:
    good = {"prompt": "The passkey is 4711.\nThe passkey is", "max_tokens": 5}
    long = {"prompt": "x" * 5000}
    added = answer(engine, [good, RequestError("line 2 is not JSON"), {}, long, good | {"top_p": 9}, good])
    assert added[0]["text"] == added[5]["text"] == " 4711"
    assert added[1] == error_columns("line 2 is not JSON")
    assert "give one of prompt" in added[2]["error"]
    assert "max_model_len" in added[3]["error"] and added[3]["text"] is None
    assert "top_p=9" in added[4]["error"]


def test_answer_unit_several_answers_and_logprobs(engine: AsyncLLM) -> None:
    (added,) = answer(engine, [{"prompt": "The key", "n": 3, "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0}])
    assert len(added["outputs"]) == 3 and added["outputs"][0]["token_ids"] == added["token_ids"]
    assert [len(entry) for entry in added["token_logprobs"]] == [1, 1]  # greedy: the token is the most likely one
    assert added["token_logprobs"][0][0]["token_id"] == added["token_ids"][0]
    assert added["prompt_token_logprobs"][0] is None and len(added["prompt_token_logprobs"]) == len("The key")
    json.dumps(added)


def test_answer_unit_rows_of_a_document_share_its_kv(engine: AsyncLLM) -> None:
    documents = [f"Document {i}. " + f"Line {i} of many. " * 60 for i in range(3)]  # about 1,000 tokens
    rows = [{"prompt": documents[d] + f"Question {q}", "max_tokens": 3} for d in range(3) for q in range(4)]
    added = answer(engine, rows, [d for d in range(3) for _ in range(4)])
    hits = [each["num_cached_tokens"] for each in added]
    for d in range(3):
        first, *others = hits[4 * d : 4 * d + 4]
        assert first == 0 and min(others) >= 768


def test_answer_unit_engine_that_fails_is_no_error_of_a_row() -> None:
    engine = AsyncLLM(build_retrieval_model(), **OPTIONS)
    engine.close()
    with pytest.raises(EngineError):
        answer(engine, [{"prompt": "x"}])


# -- parts -------------------------------------------------------------------------------------------------------


class Died(BaseException):
    """Stands for the end of the process."""


class MortalEngine(BatchEngine):
    def _exit(self, error: Exception) -> None:
        raise Died


def make_job(folder: Path, rows: Sequence[Any], **options: Any) -> tuple[EngineJob, list[Unit]]:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / "out"
    output.mkdir()
    units = plan_units(JsonLinesRows.scan(path, 0, None, xxhash.xxh3_64()), UnitLimits(max_rows=2))
    job = EngineJob(
        model=str(build_retrieval_model()),
        options=OPTIONS | options,
        sampling={"max_tokens": 2},
        input_paths=[path],
        output=output,
        format=JsonLinesRows,
        num_part_digits=5,
        tensor_parallel_size=1,
        find_machine=lambda config: Machine.cpu(2**33),
        memory_bytes=2**32,
    )
    return job, units


def run_units(engine: BatchEngine, units: dict[int, Unit]) -> list[dict[str, Any]]:
    """The results of units that run together."""

    async def main() -> Any:
        batches = [{"unit": [unit_idx], "places": [unit.packed]} for unit_idx, unit in units.items()]
        return await asyncio.gather(*map(engine, batches))

    return [{name: value for name, (value,) in result.items()} for result in asyncio.run(main())]


def test_engine_writes_a_part_for_each_unit(tmp_path: Path) -> None:
    job, units = make_job(tmp_path, [{"id": i, "prompt": "x" * (i != 2)} for i in range(3)])
    results = run_units(MortalEngine(job), dict(enumerate(units)))
    assert [(r["unit"], r["num_rows"], r["num_errors"], r["failure"]) for r in results] == [
        (0, 2, 0, ""),
        (1, 1, 1, ""),
    ]
    assert results[0]["num_tokens"] == 4
    assert sorted(path.name for path in job.output.iterdir()) == ["part-00000.jsonl", "part-00001.jsonl"]
    (last,) = map(json.loads, job.part_path(1).read_text().splitlines())
    assert last["id"] == 2 and last["text"] is None and "empty" in last["error"]


def test_engine_refusal_ends_the_job(tmp_path: Path) -> None:
    """Options that cannot work, and input that is gone."""
    job, units = make_job(tmp_path, [{"prompt": "x"}], num_kvcache_blocks=-5)
    (result,) = run_units(MortalEngine(job), {0: units[0]})
    assert result["is_refusal"] and "num_kvcache_blocks=-5" in result["failure"]
    job.input_paths[0].unlink()
    (result,) = run_units(MortalEngine(replace(job, options=OPTIONS)), {0: units[0]})
    assert result["is_refusal"] and "in.jsonl" in result["failure"]
    assert not list(job.output.glob("part-*"))


class Failing(MortalEngine):
    """Fails with the rows of unit 0."""

    async def _answer(self, answerer: RowAnswerer, rows: UnitRows, places: Sequence[RowPlace]) -> Any:
        if places[0].line == 0:
            raise EngineError("a step failed with OutOfMemoryError")
        return await super()._answer(answerer, rows, places)


def test_engine_unit_that_ends_three_engines_gets_errors_and_the_job_goes_on(tmp_path: Path) -> None:
    job, units = make_job(tmp_path, [{"id": i, "prompt": "x"} for i in range(4)])
    for _ in range(MAX_TRIES):
        with pytest.raises(Died):
            run_units(Failing(job), {0: units[0]})
        assert not job.part_path(0).exists()
    bad, good = run_units(Failing(job), dict(enumerate(units)))
    assert [(r["num_errors"], r["failure"]) for r in (bad, good)] == [(2, ""), (0, "")]
    rows = [json.loads(line) for line in job.part_path(0).read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1]
    for row in rows:
        assert row["text"] is None and "3 engines have failed" in row["error"] and "OutOfMemoryError" in row["error"]
    assert sorted(path.name for path in job.output.iterdir()) == ["part-00000.jsonl", "part-00001.jsonl"]


def test_engine_rows_that_end_even_their_reader_end_the_job(tmp_path: Path) -> None:
    """Ray would run them again without end."""
    job, units = make_job(tmp_path, [{"prompt": "x"}] * 2)
    job.scratch_path(0, "tries").write_text("\n" * (MAX_TRIES + 1))  # a process that is killed gives no reason
    (result,) = run_units(MortalEngine(job), {0: units[0]})
    assert not result["is_refusal"] and "2 rows from line 1 of in.jsonl to line 2: engines fail" in result["failure"]


def test_engine_that_does_not_start_ends_the_job_without_blaming_rows(tmp_path: Path) -> None:
    class NoStart(MortalEngine):
        def _start_engine(self) -> AsyncLLM:
            raise RuntimeError("no GPU")

    job, units = make_job(tmp_path, [{"prompt": "x"}])
    for _ in range(MAX_TRIES):
        with pytest.raises(Died):
            run_units(NoStart(job), {0: units[0]})
    (result,) = run_units(NoStart(job), {0: units[0]})
    assert not result["is_refusal"] and not job.part_path(0).exists()
    assert result["failure"] == "3 engines have not started; the last reason known is: RuntimeError: no GPU"


def test_engine_unit_runs_alone_after_its_second_failure(tmp_path: Path) -> None:
    job, units = make_job(tmp_path, [{"prompt": "x"}] * 4)

    class Noting(MortalEngine):
        def __init__(self, job: EngineJob, expected: int) -> None:
            super().__init__(job)
            self.inside, self.most_inside, self.expected = 0, 0, expected
            self.all_are_inside = asyncio.Event()

        async def _answer(self, answerer: RowAnswerer, rows: UnitRows, places: Sequence[RowPlace]) -> Any:
            self.inside += 1
            self.most_inside = max(self.inside, self.most_inside)
            if self.inside == self.expected:
                self.all_are_inside.set()
            await self.all_are_inside.wait()
            added = await super()._answer(answerer, rows, places)
            self.inside -= 1
            return added

    for num_failed, expected in ((0, 2), (1, 2), (2, 1)):
        job.scratch_path(0, "tries").write_text("\n" * num_failed)
        engine = Noting(job, expected)
        run_units(engine, dict(enumerate(units)))
        assert engine.most_inside == expected


def test_engine_output_is_that_of_the_engine_alone(tmp_path: Path, engine: AsyncLLM) -> None:
    job, units = make_job(tmp_path, [{"prompt": "The passkey is 4711.\nThe passkey is", "seed": 3, "temperature": 9.0}])
    run_units(MortalEngine(job), {0: units[0]})
    (row,) = map(json.loads, job.part_path(0).read_text().splitlines())
    params = SamplingParams(seed=3, temperature=9.0, max_tokens=2)

    async def main() -> Any:
        stream = await engine.submit(row["prompt"], params)
        return await stream.outputs()

    assert row["token_ids"] == asyncio.run(main())[0]["token_ids"]
