"""What `nanovllm batch` does without Ray: its plan of units, its rows and columns, its folder, its resources."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from nanovllm.capacity.machine import Machine
from nanovllm.cluster.batch_engine import Turns
from nanovllm.cluster.batch_files import JsonLinesRows, held_alone, open_output
from nanovllm.cluster.batch_rows import (
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
from nanovllm.cluster.options import BatchOptions
from nanovllm.cluster.resources import (
    EngineNeeds,
    Node,
    check_room,
    choose_device,
    default_num_engines,
    plan_memory,
    plan_placement,
)
from nanovllm.config import Config
from nanovllm.core.logprobs import Logprob
from nanovllm.demo.retrieval_model import build_retrieval_model
from nanovllm.errors import ConfigError, RequestError
from nanovllm.sampling_params import SamplingParams, StructuredOutputs

GIB = 2**30
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


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("", []),
        (".", [[0]]),
        ("....", [[0, 1, 2], [3]]),
        ("a.a.a", [[0, 2, 4], [1, 3]]),  # a document's rows follow its first one
        ("abab", [[0, 2], [1, 3]]),  # b would make five rows
        ("aaaaa.", [[0, 1, 2, 3, 4], [5]]),  # a large document is not split
        (".aa.", [[0, 1, 2], [3]]),
    ],
)
def test_plan_units_keeps_documents_together_within_the_limit(documents: str, expected: list[list[int]]) -> None:
    units = plan_units(scanned(documents), UnitLimits(max_rows=3))
    assert lines_of(units) == expected


def test_plan_units_long_rows_make_small_units() -> None:
    units = plan_units(scanned("...a", num_bytes=600), UnitLimits(max_rows=100, max_bytes=1200))
    assert lines_of(units) == [[0, 1], [2, 3]]


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


@pytest.mark.parametrize("column", ["text", "error", "outputs"])
def test_scan_refuses_a_column_that_the_output_adds(tmp_path: Path, column: str) -> None:
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


def test_make_request_messages_have_no_limit_of_tokens() -> None:
    messages = [{"role": "user", "content": "x", "name": None}]
    request = make_request({"messages": messages}, PLACE, DEFAULTS)
    assert request.messages == [{"role": "user", "content": "x"}] and request.params.max_tokens is None
    assert make_request({"messages": json.dumps(messages)}, PLACE, DEFAULTS).messages == request.messages


@pytest.mark.parametrize("biases", [{"5": 1.5}, [(5, 1.5)], '{"5": 1.5}', {"5": 1.5, "6": None}])
def test_make_request_logit_bias_has_integer_keys(biases: Any) -> None:
    assert make_request({"prompt": "x", "logit_bias": biases}, PLACE, DEFAULTS).params.logit_bias == {5: 1.5}


def test_make_request_structured_outputs_is_an_object() -> None:
    row = {"prompt": "x", "structured_outputs": {"regex": "a+", "json": None}}
    assert make_request(row, PLACE, DEFAULTS).params.structured_outputs == StructuredOutputs(regex="a+")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "the row has none of them; give one of prompt, messages, prompt_token_ids"),
        ({"prompt": "x", "messages": []}, "the row has prompt and messages"),
        ({"messages": [[{"role": "user", "content": "x"}]]}, "one conversation"),
        ({"messages": "{"}, "messages is a string that is not JSON"),
        ({"prompt": "x", "temperature": -1}, "temperature=-1"),
        ({"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias"),
        ({"prompt": "x", "structured_outputs": {"grammar": "y"}}, "structured_outputs has grammar"),
        ({"prompt": "x", "n": 100_000}, "n=100000 must be at most 1024"),
    ],
)
def test_make_request_bad_row_is_refused(row: dict[str, Any], message: str) -> None:
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


def test_answer_columns_failed_answer_leaves_only_the_error() -> None:
    failed = output(finish_reason="error", error="NaN")
    assert answer_columns([output(), failed], SamplingParams(n=2)) == error_columns("NaN")
    assert error_columns("NaN")["text"] is None


# -- turns --------------------------------------------------------------------------------------------------------


def test_turns_let_one_run_alone_between_others() -> None:
    order: list[str] = []

    async def take(turns: Turns, name: str, alone: bool) -> None:
        async with turns.take(alone=alone):
            order.append(f"+{name}")
            await asyncio.sleep(0.01)
            order.append(f"-{name}")

    async def main() -> None:
        turns = Turns()
        tasks = []
        for name, alone in (("a", False), ("b", False), ("c", True), ("d", False)):
            tasks.append(asyncio.create_task(take(turns, name, alone)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert sorted(order[:4]) == ["+a", "+b", "-a", "-b"] and order[:2] == ["+a", "+b"]
    assert order[4:] == ["+c", "-c", "+d", "-d"]  # d came while c was waiting


# -- the output folder -------------------------------------------------------------------------------------------


def test_open_output_resumes_only_the_same_job(tmp_path: Path) -> None:
    output = tmp_path / "a/out"
    open_output(output, {"model": "m", "units": [1]})
    open_output(output, {"model": "m", "units": [1]})
    with pytest.raises(ConfigError, match=r'model was "m", now "other".*another output folder'):
        open_output(output, {"model": "other", "units": [1]})


def test_held_alone_keeps_a_second_command_out(tmp_path: Path) -> None:
    open_output(tmp_path, {})
    with held_alone(tmp_path), pytest.raises(ConfigError, match="in use by another command"), held_alone(tmp_path):
        pass
    with held_alone(tmp_path):
        pass


def test_open_output_keeps_out_of_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"not empty and has no _job\.json"):
        open_output(tmp_path, {})
    with pytest.raises(ConfigError, match="not empty"):
        open_output(tmp_path / "thesis.txt", {})


# -- resources ---------------------------------------------------------------------------------------------------


def test_plan_placement_gpus() -> None:
    nodes = [Node(16, 8, 100 * GIB), Node(16, 4, 100 * GIB), Node(8, 0, GIB)]
    assert default_num_engines(nodes, 2, "cuda") == 6
    needs = plan_placement(nodes, 6, 2, "cuda")
    assert (needs.gpus, needs.cpus, needs.engines_per_node) == (2, 3, 4)
    with pytest.raises(ConfigError, match=r"room for 6 of num_engines=7: each needs 2 GPUs, 3 CPUs.*num_engines to 6"):
        plan_placement(nodes, 7, 2, "cuda")
    with pytest.raises(ConfigError, match=r"room for 0 of num_engines=1.*lower tensor_parallel_size"):
        plan_placement([Node(4, 1, GIB)], 1, 2, "cuda")


@pytest.mark.parametrize(("num_engines", "cpus"), [(1, 8), (2, 8), (3, 4), (4, 4), (5, 2)])
def test_plan_placement_cpus_are_shared_out(num_engines: int, cpus: int) -> None:
    assert plan_placement([Node(8, 0, GIB), Node(8, 0, GIB)], num_engines, 1, "cpu").cpus == cpus


def test_plan_placement_says_what_is_missing_of_memory() -> None:
    with pytest.raises(ConfigError, match=r"each needs 2 GPUs, 3 CPUs and 40\.00 GiB of memory.*cpu_memory_gb"):
        check_room(EngineNeeds(gpus=2, cpus=3, memory_bytes=40 * GIB), [Node(16, 8, 30 * GIB)], 1)


def test_choose_device() -> None:
    with_gpu, without = [Node(1, 0, 1), Node(1, 1, 1)], [Node(1, 0, 1)]
    assert choose_device("auto", with_gpu) == "cuda" and choose_device("auto", without) == "cpu"
    assert choose_device("cpu", with_gpu) == "cpu"
    with pytest.raises(ConfigError, match="device='cuda:1' names one GPU"):
        choose_device("cuda:1", with_gpu)


def plan(machine: Callable[[Config], Machine], per_node: int, node_gib: float, **options: Any) -> EngineNeeds:
    config = Config(model=str(build_retrieval_model()), **options)
    needs = EngineNeeds(gpus=1, cpus=2, engines_per_node=per_node)
    return plan_memory(needs, config, node_gib * GIB, machine)


def test_plan_memory_engines_share_a_machines_memory() -> None:
    """By default, each of two engines would take 70% of the available memory for its pool."""

    def machine(config: Config) -> Machine:
        return Machine.gpu(host_bytes=100 * GIB)

    alone = plan(machine, 1, 100, enable_cpu_offload=True)
    shared = plan(machine, 8, 100, enable_cpu_offload=True)
    assert 8 * shared.memory_bytes <= 100 * GIB and shared.memory_bytes < alone.memory_bytes
    assert shared.options["num_cpu_blocks"] * 8 <= alone.options["num_cpu_blocks"] * 1.01 * 8
    given = plan(machine, 2, 100, enable_cpu_offload=True, cpu_memory_gb=20.0)
    assert 20 * GIB < given.memory_bytes <= 22 * GIB
    with pytest.raises(ConfigError, match="memory is available"):
        plan(machine, 8, 100, enable_cpu_offload=True, cpu_memory_gb=20.0)


def test_plan_memory_on_a_cpu_counts_the_cache() -> None:
    few = plan(lambda config: Machine.cpu(10 * GIB), 2, 8, device="cpu", num_kvcache_blocks=64)
    default = plan(lambda config: Machine.cpu(10 * GIB), 2, 8, device="cpu")
    assert few.memory_bytes < default.memory_bytes <= 4 * GIB
    assert few.options["num_kvcache_blocks"] == 64 < default.options["num_kvcache_blocks"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_engines": 0},
        {"num_engines": 10**6},
        {"document_column": ""},
        {"ray_address": "ray://x:1"},
        {"ray_address": "head"},
    ],
)
def test_batch_options_bad_value_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        BatchOptions(**options)
