"""run_job: `nanovllm batch`. Plans the units, lets engines run them, and sums the counts that the engines return.

`BatchJob.run_units` starts the engines: one in a child process (batch_process.py), or several on Ray (batch_ray.py).
Both replace an engine that dies and run its units again, without limit; BatchEngine limits the tries of a unit and of a
start. The output folder alone records the finished units, so an interrupted job continues with the units that have no
part.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import xxhash

from nanovllm.capacity.machine import Machine
from nanovllm.config import Config
from nanovllm.entrypoints.cluster.batch_engine import BatchEngine, EngineJob
from nanovllm.entrypoints.cluster.batch_files import ANSWER_OPTIONS, JsonLinesRows, UnitRows, held_alone, open_output
from nanovllm.entrypoints.cluster.batch_rows import ScannedRow, Unit, UnitLimits, plan_units
from nanovllm.entrypoints.cluster.resources import BatchOptions
from nanovllm.errors import ConfigError, EngineError
from nanovllm.utils import progress_bar

JSON_SUFFIXES, PARQUET_SUFFIX = (".jsonl", ".ndjson"), ".parquet"
MAX_UNSEEN_S = 60.0  # wait for a file of another machine to become visible here; NFS may take half of this time

# Starts engines, and returns the counts of the units in the order in which the units end
UnitRunner: TypeAlias = Callable[
    ["BatchJob", EngineJob, Mapping[int, Unit]], AbstractContextManager[Iterable[Mapping[str, Any]]]
]


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job, as the flags describe it."""

    inputs: Sequence[Path]
    output: Path
    options: BatchOptions
    config: Config
    given: Mapping[str, Any]  # the fields of `config` that the flags gave
    cpu_defaults: Mapping[str, Any]  # fields for an engine on a CPU, unless the flags gave them
    sampling: Mapping[str, Any]  # the fields of SamplingParams that the flags gave
    find_machine: Callable[[Config], Machine]
    run_units: UnitRunner
    limits: UnitLimits = field(default_factory=UnitLimits)
    engine_class: type[BatchEngine] = BatchEngine  # for tests

    def options_on(self, device: str) -> dict[str, Any]:
        """Return the options of an engine on this device: cpu, cuda or one GPU. The command has no flag --fit."""
        return {**(self.cpu_defaults if device == "cpu" else {}), **self.given, "device": device, "fit": False}


class JobSummary(NamedTuple):
    num_rows: int  # in the whole job
    num_rows_before: int  # answered by earlier runs
    num_errors: int  # in this run
    num_tokens: int  # generated in this run


def run_job(job: BatchJob) -> JobSummary:
    """Run the units that have no part yet.

    Raises ConfigError for a job that cannot run, and EngineError if engines do not start or Ray fails.
    """
    paths = [path.resolve() for path in job.inputs]
    format = format_of(paths)
    units, manifest = _plan(job, paths, format)
    open_output(job.output, manifest)
    engine = EngineJob(
        model=job.config.model,
        options=job.given,
        sampling=job.sampling,
        input_paths=paths,
        output=job.output.resolve(),
        format=format,
        num_part_digits=max(5, len(str(len(units) - 1))),
        tensor_parallel_size=job.config.tensor_parallel_size,
        find_machine=job.find_machine,
    )
    with held_alone(job.output):
        _clean(job.output)
        todo = {unit_idx: unit for unit_idx, unit in enumerate(units) if not engine.part_path(unit_idx).exists()}
        num_rows = sum(map(len, units))
        summary = JobSummary(num_rows, num_rows - sum(map(len, todo.values())), num_errors=0, num_tokens=0)
        if todo:
            summary = _run_units(job, engine, todo, summary)
            _clean(job.output)
        return summary


# -- the plan ------------------------------------------------------------------------------------------------------


def _plan(job: BatchJob, paths: Sequence[Path], format: type[UnitRows]) -> tuple[list[Unit], dict[str, Any]]:
    """Return the units, and the content of _job.json. Reads the whole input."""
    column = job.options.document_column
    digests = [xxhash.xxh3_64() for _ in paths]
    format.check_together(paths)

    def rows() -> Iterator[ScannedRow]:
        for file_idx, path in enumerate(paths):
            yield from format.scan(path, file_idx, column, digests[file_idx])

    units = plan_units(rows(), job.limits)
    if not units:
        raise ConfigError(f"the input {', '.join(map(str, job.inputs))} has no rows")
    if column is not None and not any(place.document >= 0 for unit in units for place in unit.places):
        raise ConfigError(f"no row has the column document_column={column!r}; check its name")
    manifest = {
        "input": [{"path": str(path), "digest": d.hexdigest()} for path, d in zip(paths, digests, strict=True)],
        "model": job.config.model,
        "engine_options": {name: getattr(job.config, name) for name in ANSWER_OPTIONS},
        "sampling": dict(job.sampling),
        "document_column": column,
        "units": {"num_units": len(units), **asdict(job.limits)},
    }
    return units, manifest


def format_of(paths: Sequence[Path]) -> type[UnitRows]:
    """Return the format of the input. Raises ConfigError for a file of another format, or for files of both formats."""
    for path in paths:
        if path.suffix not in (*JSON_SUFFIXES, PARQUET_SUFFIX):
            raise ConfigError(
                f"input {str(path)!r} must be a file of JSON lines (.jsonl, .ndjson) or Parquet (.parquet)"
            )
        if not path.is_file():
            raise ConfigError(f"input {str(path)!r} is not a file; check the path")
    are_parquet = {path.suffix == PARQUET_SUFFIX for path in paths}
    if len(are_parquet) != 1:
        raise ConfigError("the input has files of JSON lines and of Parquet; give one kind, or run two jobs")
    if not are_parquet.pop():
        return JsonLinesRows
    from nanovllm.entrypoints.cluster.batch_parquet import ParquetRows  # needs pyarrow

    return ParquetRows


def _clean(output: Path) -> None:
    """Remove the scratch files of engines that have died."""
    for path in output.glob(".part-*"):
        path.unlink(missing_ok=True)


# -- the units -----------------------------------------------------------------------------------------------------


def _run_units(job: BatchJob, engine: EngineJob, todo: Mapping[int, Unit], summary: JobSummary) -> JobSummary:
    """Run units, and return `summary` with the units' errors and tokens."""
    num_rows, num_before, num_errors, num_tokens = summary
    done: set[int] = set()
    with (
        job.run_units(job, engine, todo) as results,
        progress_bar(total=num_rows, initial=num_before, desc="Rows", unit="row") as bar,
    ):
        for result in results:
            if result["failure"]:
                raise (ConfigError if result["is_refusal"] else EngineError)(result["failure"])
            _check_part(engine, result["unit"])
            if result["unit"] not in done:
                done.add(result["unit"])
                num_errors += result["num_errors"]
                num_tokens += result["num_tokens"]
                bar.set_postfix(errors=num_errors, tokens=num_tokens, refresh=False)
                bar.update(result["num_rows"])
    if missing := [unit_idx for unit_idx in todo if unit_idx not in done]:
        raise EngineError(f"the job ended without units {missing[:5]}; repeat the command to run them")
    return JobSummary(num_rows, num_before, num_errors, num_tokens)


def _check_part(engine: EngineJob, unit_idx: int) -> None:
    """Raise ConfigError if a written part is not visible on this machine."""
    path = engine.part_path(unit_idx)
    deadline_s = time.monotonic() + MAX_UNSEEN_S
    while not path.exists() and path.name not in os.listdir(path.parent):  # listing the folder makes NFS look again
        if time.monotonic() < deadline_s:
            time.sleep(1)
            continue
        raise ConfigError(
            f"an engine has written {path}, but it is not visible here; the output must be in a "
            "folder that all machines of the cluster share"
        )
