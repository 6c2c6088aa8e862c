"""`nanovllm batch` on a cluster of two nodes: the same answers whatever happens to the engines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_jobs import (
    DeadlyRows,
    NoStart,
    add_node,
    engine_pids,
    kill_one_engine,
    make_job,
    ray_cluster,
    read_parts,
    run_disturbed,
    sampled_rows,
    without_cache_hits,
    write_lines,
)
from ray.cluster_utils import Cluster
from waiting import wait_until

from nanovllm.entrypoints.cluster.batch_job import run_job
from nanovllm.errors import ConfigError, EngineError

NUM_ROWS = 2000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(num_nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("input") / "prompts.jsonl", sampled_rows(NUM_ROWS))


@pytest.fixture(scope="module")
def expected(cluster: Cluster, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what one engine answers that nothing disturbs."""
    output = tmp_path_factory.mktemp("expected") / "out"
    summary = run_job(make_job([prompts], output, cluster.address, num_engines=1))
    assert summary[:3] == (NUM_ROWS, 0, 0)
    rows = read_parts(output)
    assert [row["id"] for row in rows] == list(range(NUM_ROWS))
    assert len({row["text"] for row in rows}) > NUM_ROWS / 2, "the answers are too much alike to tell rows apart"
    return without_cache_hits(rows)


def test_job_answers_do_not_depend_on_the_number_of_engines(
    cluster: Cluster, prompts: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Here with three engines. Two are in the next tests, which also kill one of them."""
    job = make_job([prompts], tmp_path / "out", cluster.address, num_engines=3)
    run_job(job)
    assert without_cache_hits(read_parts(job.output)) == expected


def test_job_killed_engine_is_replaced_and_no_row_is_lost(
    cluster: Cluster, prompts: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = make_job([prompts], tmp_path / "out", cluster.address, num_engines=2)
    run_disturbed(job, lambda: kill_one_engine(cluster), num_parts=3)
    assert without_cache_hits(read_parts(job.output)) == expected
    assert sorted(path.name for path in job.output.iterdir() if path.name.startswith(".")) == []


def test_job_killed_node_has_its_units_run_elsewhere(
    cluster: Cluster, prompts: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    victim = add_node(cluster)
    cluster.wait_for_nodes()
    job = make_job([prompts], tmp_path / "out", cluster.address, num_engines=3)  # two CPUs each: one on each node

    def kill_node() -> None:
        wait_until(lambda: engine_pids([victim]))
        cluster.remove_node(victim, allow_graceful=False)

    run_disturbed(job, kill_node)
    assert without_cache_hits(read_parts(job.output)) == expected


def test_job_rows_that_end_their_engine_get_an_error_and_the_others_an_answer(
    cluster: Cluster, prompts: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Without their part, the rows are run again."""
    job = make_job([prompts], tmp_path / "out", cluster.address, num_engines=2)
    assert run_job(replace(job, engine_class=DeadlyRows)).num_errors == 100
    rows = read_parts(job.output)
    assert without_cache_hits(rows[:500] + rows[600:]) == expected[:500] + expected[600:]
    assert all("3 engines have failed with the rows of this part" in row["error"] for row in rows[500:600])
    (job.output / "part-00005.jsonl").unlink()
    written = {path: path.stat().st_mtime_ns for path in job.output.glob("part-*")}
    assert run_job(job)[:3] == (NUM_ROWS, NUM_ROWS - 100, 0)
    assert {path: path.stat().st_mtime_ns for path in written} == written, "finished parts were run again"
    assert without_cache_hits(read_parts(job.output)) == expected
    assert run_job(job) == (NUM_ROWS, NUM_ROWS, 0, 0)  # nothing is left to do


def test_job_without_an_engine_that_starts_ends(cluster: Cluster, prompts: Path, tmp_path: Path) -> None:
    job = make_job([prompts], tmp_path / "out", cluster.address, num_engines=1)
    with pytest.raises(EngineError, match=r"3 engines have not started; .*RuntimeError: no engine today"):
        run_job(replace(job, engine_class=NoStart))


def test_job_parquet_in_parquet_out(cluster: Cluster, tmp_path: Path) -> None:
    """Two files, documents, a bad row, a conversation. The folder is a table that others can read."""
    text = "The passkey is 4711.\nThe passkey is"
    chat = [{"role": "user", "content": "Hello there, you."}]
    columns = {"prompt": [text, None, text, text], "messages": [None, chat, None, None], "top_k": [None, 5, -7, 3]}
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in paths:
        table = pa.table(columns | {"book": [path.name, None, "x", path.name], "when": pa.array([1] * 4, pa.date32())})
        pq.write_table(table, path)
    job = make_job(paths, tmp_path / "out", cluster.address, num_engines=2, document_column="book", unit_rows=3)
    assert run_job(replace(job, sampling={"max_tokens": 5})).num_errors == 2
    table = pq.read_table(job.output)
    assert table.schema.field("when").type == pa.date32()
    books = ["a.parquet", "a.parquet", None, "x", "x", "b.parquet", "b.parquet", None]
    assert table.column("book").to_pylist() == books
    assert table.column("text").to_pylist() == [" 4711", " 4711", "I com", None, None, " 4711", " 4711", "I com"]
    assert [error is not None for error in table.column("error").to_pylist()] == [book == "x" for book in books]


def test_job_without_room_is_refused_at_once(cluster: Cluster, prompts: Path, tmp_path: Path) -> None:
    job = make_job([prompts], tmp_path / "out", cluster.address, num_engines=5)
    with pytest.raises(ConfigError, match=r"room for 4 of num_engines=5: each needs 1 CPUs"):
        run_job(job)
