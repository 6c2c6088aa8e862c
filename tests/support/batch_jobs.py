"""Jobs of `nanovllm batch` with the built-in model on the CPU, a cluster for them, and what disturbs them.

Ray is imported only where a test needs it.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import wait_until

from nanovllm.config import Config
from nanovllm.engine.setup import find_machine
from nanovllm.entrypoints.cluster.batch_engine import BatchEngine, RowAnswerer
from nanovllm.entrypoints.cluster.batch_files import UnitRows
from nanovllm.entrypoints.cluster.batch_job import BatchJob, JobSummary, UnitRunner, run_job
from nanovllm.entrypoints.cluster.batch_process import units_in_process
from nanovllm.entrypoints.cluster.batch_rows import RowPlace, UnitLimits
from nanovllm.entrypoints.cluster.resources import BatchOptions
from nanovllm.models.retrieval_model import build_retrieval_model

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]
ENGINE_OPTIONS = {"device": "cpu", "num_kvcache_blocks": 64, "max_model_len": 4096, "max_num_batched_tokens": 2048}
OBJECT_STORE_BYTES = 80 * 2**20
FAST_HEALTH_CHECKS = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}


class DeadlyRows(BatchEngine):
    """Its process is killed by the unit of rows 500 to 599."""

    async def _answer(self, answerer: RowAnswerer, rows: UnitRows, places: Sequence[RowPlace]) -> Any:
        if places[0].line == 500:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super()._answer(answerer, rows, places)


class SlowUnits(BatchEngine):
    """Its units from row 1,000 on take 20 s longer."""

    async def _answer(self, answerer: RowAnswerer, rows: UnitRows, places: Sequence[RowPlace]) -> Any:
        if places[0].line >= 1000:
            await asyncio.sleep(20)
        return await super()._answer(answerer, rows, places)


class HeldUnits(BatchEngine):
    """Its units from row 500 on wait while the file `held_file` exists."""

    async def _answer(self, answerer: RowAnswerer, rows: UnitRows, places: Sequence[RowPlace]) -> Any:
        while places[0].line >= 500 and held_file(self._job.output).exists():
            await asyncio.sleep(0.05)
        return await super()._answer(answerer, rows, places)


def held_file(output: Path) -> Path:
    return output.with_name(f"{output.name} is held")


class NoStart(BatchEngine):
    """Its engine never starts."""

    def _start_engine(self) -> Any:
        raise RuntimeError("no engine today")


@contextmanager
def ray_cluster(num_nodes: int) -> Iterator["Cluster"]:
    """A cluster of raylets with two CPUs each, in a folder of its own. All of it is gone in the end."""
    from ray.cluster_utils import Cluster

    before, folder = dict(os.environ), Path(f"/tmp/nvb{os.getpid()}")
    os.environ |= {"RAY_TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests/support'}"  # the actors import what these tests import
    folder.mkdir()
    cluster = Cluster()
    try:
        for i in range(num_nodes):
            add_node(cluster, **({"_system_config": FAST_HEALTH_CHECKS} if i == 0 else {}))
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.clear()
        os.environ |= before


def add_node(cluster: "Cluster", **options: Any) -> Any:
    return cluster.add_node(
        num_cpus=2, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, memory=4 * 2**30, **options
    )


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sampled_rows(num_rows: int) -> list[dict[str, Any]]:
    """Short prompts whose answers are sampled, half of them with a seed of their own."""
    draw = random.Random(0)
    return [
        {
            "id": i,
            "prompt": f"The passkey is {draw.randrange(10**6)}. The key is",
            "temperature": 20.0,
            "max_tokens": draw.randrange(2, 5),
            "seed": i if i % 2 else None,
        }
        for i in range(num_rows)
    ]


def make_job(
    inputs: Sequence[Path], output: Path, address: str | None, *, unit_rows: int = 100, **options: Any
) -> BatchJob:
    """`address`: of a Ray cluster, or None for one engine without Ray. `options`: fields of BatchOptions."""
    run_units: UnitRunner = units_in_process
    if address is not None:
        from nanovllm.entrypoints.cluster.batch_ray import units_on_ray as run_units
    return BatchJob(
        inputs=inputs,
        output=output,
        options=BatchOptions(ray_address=address, **options),
        config=Config(model=str(build_retrieval_model()), **ENGINE_OPTIONS),
        given=ENGINE_OPTIONS,
        cpu_defaults={},
        sampling={},
        find_machine=find_machine,
        run_units=run_units,
        limits=UnitLimits(max_rows=unit_rows),
    )


def read_parts(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(output.glob("part-*")) for line in path.open()]


def without_cache_hits(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the part of an answer that does not depend on which rows ran before in the same engine."""
    return [{name: value for name, value in row.items() if name != "num_cached_tokens"} for row in rows]


def run_disturbed(job: BatchJob, disturb: Callable[[], None], num_parts: int = 1) -> JobSummary:
    """Run a job, and call `disturb` in another thread when there are `num_parts` parts, and more are to come."""
    errors: list[BaseException] = []
    held = held_file(job.output)
    held.touch()

    def watch() -> None:
        try:
            wait_until(lambda: len(list(job.output.glob("part-*"))) >= num_parts)
            disturb()
        except BaseException as error:
            errors.append(error)
        finally:
            held.unlink()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    summary = run_job(replace(job, engine_class=HeldUnits))
    thread.join()
    assert not errors, errors
    return summary


def engine_pids(nodes: Sequence[Any]) -> list[int]:
    """The processes of the engines' actors on these nodes of a cluster."""
    raylets = {process.process.pid for node in nodes for process in node.all_processes["raylet"]}
    return [pid for pid, parent, name in _processes() if parent in raylets and name.startswith("ray::MapWorker")]


def _processes() -> Iterator[tuple[int, int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes().decode(errors="replace")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has just ended
            continue
        yield int(folder.name), parent, name


def kill_one_engine(cluster: "Cluster") -> None:
    os.kill(wait_until(lambda: engine_pids(cluster.list_all_nodes()))[0], signal.SIGKILL)
