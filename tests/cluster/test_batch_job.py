"""`nanovllm batch` on a cluster of two nodes: the same answers whatever happens to the engines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import (
    add_node,
    engine_pids,
    kill_one_engine,
    make_job,
    ray_cluster,
    read_parts,
    run_disturbed,
    sampled_rows,
    wait_for,
    without_cache_hits,
    write_lines,
)
from ray.cluster_utils import Cluster

from nanovllm.cluster.batch_job import run_job

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
    """What one engine answers that nothing disturbs."""
    output = tmp_path_factory.mktemp("expected") / "out"
    summary = run_job(make_job([prompts], output, cluster.address, num_engines=1))
    assert summary[:3] == (NUM_ROWS, 0, 0)
    rows = read_parts(output)
    assert [row["id"] for row in rows] == list(range(NUM_ROWS))
    assert len({row["text"] for row in rows}) > NUM_ROWS / 2, "the answers are too much alike to tell rows apart"
    return without_cache_hits(rows)


@pytest.mark.parametrize("num_engines", [2, 3])
def test_job_answers_do_not_depend_on_the_number_of_engines(
    cluster: Cluster, prompts: Path, expected: list[dict[str, Any]], tmp_path: Path, num_engines: int
) -> None:
    job = make_job([prompts], tmp_path / "out", cluster.address, num_engines=num_engines)
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
        wait_for(lambda: engine_pids([victim]))
        cluster.remove_node(victim, allow_graceful=False)

    run_disturbed(job, kill_node)
    assert without_cache_hits(read_parts(job.output)) == expected
