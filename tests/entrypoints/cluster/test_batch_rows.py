"""The parts of `nanovllm batch` that need no Ray: its plan of units, its rows and columns, its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from nanovllm.entrypoints.cluster.batch_files import JsonLinesRows, held_alone, open_output
from nanovllm.entrypoints.cluster.batch_rows import (
    RowDefaults,
    RowPlace,
    ScannedRow,
    Unit,
    UnitLimits,
    answer_columns,
    error_columns,
    make_request,
    plan_units,
    runs_of,
)
from nanovllm.errors import ConfigError, RequestError
from nanovllm.plan.outputs import Logprob
from nanovllm.sampling_params import SamplingParams, StructuredOutputs

PLACE = RowPlace(0, 0, 0)
DEFAULTS = RowDefaults({"top_k": 7}, {"top_k": 5, "temperature": 0.0}, seed=0)


# -- the plan ----------------------------------------------------------------------------------------------------


def scanned(documents: str, num_bytes: int = 1) -> list[ScannedRow]:
    """A row for each letter, which is its document; "." for a row without one."""
    return [
        ScannedRow(0, line, 10 * line, num_bytes, None if document == "." else document.encode())
        for line, document in enumerate(documents)
    ]


def lines_of(units: list[Unit]) -> list[list[int]]:
    return [[place.line for place in unit.places] for unit in units]


def test_plan_units_keeps_documents_together_within_the_limit() -> None:
    for documents, expected in (
        ("", []),
        (".", [[0]]),
        ("....", [[0, 1, 2], [3]]),
        ("a.a.a", [[0, 2, 4], [1, 3]]),  # a document's rows follow its first one
        ("abab", [[0, 2], [1, 3]]),  # b would make five rows
        ("aaaaa.", [[0, 1, 2, 3, 4], [5]]),  # a large document is not split
        (".aa.", [[0, 1, 2], [3]]),
    ):
        units = plan_units(scanned(documents), UnitLimits(max_rows=3))
        assert lines_of(units) == expected
    long_rows = plan_units(scanned("...a", num_bytes=600), UnitLimits(max_rows=100, max_bytes=1200))
    assert lines_of(long_rows) == [[0, 1], [2, 3]]


def test_unit_packed_keeps_its_places() -> None:
    (unit,) = plan_units(scanned("a.a"), UnitLimits())
    places = Unit(packed=unit.packed).places
    assert places == [RowPlace(0, 0, 0, 0), RowPlace(0, 2, 20, 0), RowPlace(0, 1, 10)]
    assert list(runs_of(places)) == [[0, 1], [2]]
    assert unit.describe(["x.jsonl"]) == "3 rows from line 1 of x.jsonl to line 2"
    single = Unit()
    single.add(RowPlace(1, 4, 9))
    assert single.describe(["x", "y"]) == "line 5 of y"


# -- JSON lines --------------------------------------------------------------------------------------------------


def scan(path: Path, document_column: str | None = None) -> list[ScannedRow]:
    return list(JsonLinesRows.scan(path, 0, document_column, xxhash.xxh3_64()))


def test_json_lines_pass_everything_through_and_name_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = {"prompt": "é \ud800", "nested": {"a": [1, None]}}
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(good).encode() + b"\n\n{oops\n[1]\n" + b'{"prompt": "\xff"}')
    places = [RowPlace(*row[:3]) for row in scan(path)]
    assert [place.line for place in places] == [0, 2, 3, 4]
    read = JsonLinesRows([path], places)
    assert read.rows[0] == good
    assert [str(row).split(":")[0] for row in read.rows[1:]] == [
        "line 3 of in.jsonl is not JSON",
        "line 4 of in.jsonl is not a JSON object",
        "line 5 of in.jsonl is not JSON",
    ]
    read.write(tmp_path / "out.jsonl", [error_columns("x") for _ in places])
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written[0] == good | error_columns("x")
    assert written[1:] == [error_columns("x")] * 3


def test_scan_refuses_a_column_that_the_output_adds(tmp_path: Path) -> None:
    for column in ("text", "error", "outputs"):
        path = tmp_path / "in.jsonl"
        path.write_text('{"prompt": "\\"text\\""}\n' + json.dumps({"prompt": "x", column: "y"}))
        with pytest.raises(ConfigError, match=f"line 2 .*column '{column}'.*rename"):
            scan(path)


def test_scan_documents_are_told_apart_by_value(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"d": 1}, {"d": "1"}, {"d": 1, "x": 2}, {}, {"d": None}))
    )
    keys = [row.document_key for row in scan(path, "d")]
    assert keys[0] == keys[2] != keys[1]
    assert keys[3] is keys[4] is None


# -- rows --------------------------------------------------------------------------------------------------------


def test_make_request_takes_columns_before_flags_before_the_model() -> None:
    request = make_request({"prompt": "x", "max_tokens": 3, "min_p": None, "unknown": object()}, PLACE, DEFAULTS)
    assert request.prompt == {"prompt": "x"}
    assert (request.params.max_tokens, request.params.top_k, request.params.temperature) == (3, 7, 0.0)
    assert make_request({"prompt": "x", "top_k": 9}, PLACE, DEFAULTS).params.top_k == 9


def test_make_request_seed_follows_from_the_place_alone() -> None:
    places = [RowPlace(file_idx, line, 0) for file_idx in range(2) for line in range(50)]
    seeds = [make_request({"prompt": "x"}, place, DEFAULTS).params.seed for place in places]
    assert len(set(seeds)) == 100
    assert seeds[3] == make_request({"prompt": "y"}, RowPlace(0, 3, 99, 4), DEFAULTS).params.seed
    assert make_request({"prompt": "x", "seed": 5}, PLACE, DEFAULTS).params.seed == 5
    other = RowDefaults({}, {}, seed=1)
    assert make_request({"prompt": "x"}, places[3], other).params.seed not in seeds


def test_make_request_reads_the_forms_of_parquet_and_json() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    for given in (messages, json.dumps(messages)):
        request = make_request({"messages": given}, PLACE, DEFAULTS)
        assert request.messages == [{"role": "user", "content": "x"}] and request.params.max_tokens is None
    for biases in ({"5": 1.5}, [(5, 1.5)], '{"5": 1.5}', {"5": 1.5, "6": None}):
        assert make_request({"prompt": "x", "logit_bias": biases}, PLACE, DEFAULTS).params.logit_bias == {5: 1.5}
    row = {"prompt": "x", "structured_outputs": {"regex": "a+", "json": None}}
    assert make_request(row, PLACE, DEFAULTS).params.structured_outputs == StructuredOutputs(regex="a+")


def test_make_request_bad_row_is_refused() -> None:
    for row, message in (
        ({}, "the row has none of them; give one of prompt, messages, prompt_token_ids"),
        ({"prompt": "x", "messages": []}, "the row has prompt and messages"),
        ({"messages": [[{"role": "user", "content": "x"}]]}, "one conversation"),
        ({"messages": "{"}, "messages is a string that is not JSON"),
        ({"prompt": "x", "temperature": -1}, "temperature=-1"),
        ({"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias"),
        ({"prompt": "x", "structured_outputs": {"grammar": "y"}}, "structured_outputs has grammar"),
        ({"prompt": "x", "n": 100_000}, "n=100000 must be at most 1024"),
    ):
        with pytest.raises(RequestError, match=message):
            make_request(row, PLACE, DEFAULTS)


def output(**changes: Any) -> Any:
    return {"text": "a", "token_ids": [1], "finish_reason": "stop", "num_cached_tokens": 4} | changes


def test_answer_columns_report_what_was_asked_for() -> None:
    added = {"text": "a", "token_ids": [1], "finish_reason": "stop", "num_cached_tokens": 4, "error": None}
    assert answer_columns([output()], SamplingParams()) == added
    two = answer_columns([output(), output(text="b")], SamplingParams(n=2))
    assert [each["text"] for each in two["outputs"]] == ["a", "b"]
    position = {1: Logprob(-0.5, 1, "a")}
    scored = answer_columns(
        [output(logprobs=[position], prompt_logprobs=[None, position])], SamplingParams(logprobs=0, prompt_logprobs=0)
    )
    entry = [{"token_id": 1, "logprob": -0.5, "rank": 1, "text": "a"}]
    assert scored["token_logprobs"] == [entry] and scored["prompt_token_logprobs"] == [None, entry]
    failed = output(finish_reason="error", error="NaN")
    assert answer_columns([output(), failed], SamplingParams(n=2)) == error_columns("NaN")
    assert error_columns("NaN")["text"] is None


# -- the output folder -------------------------------------------------------------------------------------------


def test_open_output_resumes_only_the_same_job_and_only_once_at_a_time(tmp_path: Path) -> None:
    output = tmp_path / "a/out"
    for _ in range(2):
        open_output(output, {"model": "m", "units": [1]})
    with pytest.raises(ConfigError, match=r'model was "m", now "other".*another output folder'):
        open_output(output, {"model": "other", "units": [1]})
    with held_alone(output), pytest.raises(ConfigError, match="in use by another command"), held_alone(output):
        pass
    with held_alone(output):
        pass


def test_open_output_keeps_out_of_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"not empty and has no _job\.json"):
        open_output(tmp_path, {})
    with pytest.raises(ConfigError, match="not empty"):
        open_output(tmp_path / "thesis.txt", {})
