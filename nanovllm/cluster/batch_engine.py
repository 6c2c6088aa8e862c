"""BatchEngine: one engine of a job, in an actor of its own. It is given units and writes a part for each.

Rows and answers stay in this process; only counts go back. A part is written under a scratch name and renamed, so
that a part with its name is whole, and a unit that runs twice writes the same part twice.

The engine starts when the first unit arrives. So whatever goes wrong, at its start or later, happens to some unit: the
unit's tries are counted in a file, because they end with the process. If the engine fails, the process exits, Ray
starts another one and hands it the same units again. A unit that has ended too many engines ends the job.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.cluster.batch_answers import RowAnswerer
from nanovllm.cluster.batch_files import UnitRows, replace_file
from nanovllm.cluster.batch_plan import Unit
from nanovllm.cluster.batch_rows import RowDefaults
from nanovllm.cluster.batch_tries import MAX_TRIES, Turns, UnitTries
from nanovllm.errors import CheckpointError, ConfigError

NUM_UNITS = 2  # at once, so that the tail of one overlaps with the head of the next


@dataclass(frozen=True)
class EngineJob:
    """What an engine has to know about its job."""

    model: str
    options: Mapping[str, Any]  # fields of Config
    sampling: Mapping[str, Any]  # fields of SamplingParams that the flags gave
    input_paths: Sequence[Path]
    output: Path
    format: type[UnitRows]
    num_part_digits: int
    tensor_parallel_size: int
    engines_per_node: int
    engine_class: "type[BatchEngine]"

    def part_path(self, unit_idx: int) -> Path:
        return self.output / f"part-{unit_idx:0{self.num_part_digits}}{self.format.suffix}"


class BatchEngine:
    """A callable class for `Dataset.map_batches`, with one unit in each batch."""

    def __init__(self, job: EngineJob) -> None:
        self._job = job
        self._answerer: RowAnswerer | None = None
        self._starting = asyncio.Lock()
        self._turns = Turns()

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Run the unit of `batch`, and return its counts. `failure` says why the job has to end; "" if the unit ran."""
        unit_idx, unit = int(batch["unit"][0]), Unit(packed=batch["places"][0])
        counts = {"unit": unit_idx, "num_rows": len(unit), "num_errors": 0, "num_tokens": 0, "failure": ""}
        counts["is_refusal"] = False  # the failure is the user's to mend
        tries = UnitTries(self._job.output, unit_idx)
        async with self._turns.take(alone=tries.count() > 0):
            if tries.count() >= MAX_TRIES:
                where = unit.describe([path.name for path in self._job.input_paths])
                counts["failure"] = f"{where}: {tries.describe()}; take these rows out, or find out why they fail"
            else:
                tries.begin()
                try:
                    counts |= await self._run(unit_idx, unit)
                except (ConfigError, CheckpointError) as error:
                    counts |= {"failure": str(error), "is_refusal": True}
                except OSError as error:
                    counts |= {"failure": f"on {socket.gethostname()}: {error}", "is_refusal": True}
                except Exception as error:
                    self._exit(tries, error)
                tries.clear()
        return {name: [value] for name, value in counts.items()}

    async def _run(self, unit_idx: int, unit: Unit) -> dict[str, int]:
        """Answer the unit's rows, write its part, and return its counts."""
        places = unit.places
        rows = await asyncio.to_thread(self._job.format, self._job.input_paths, places)
        answerer = await self._started_answerer()
        added = await answerer.answer_unit(rows.rows, places)
        await asyncio.to_thread(self._write, unit_idx, rows, added)
        num_tokens = sum(len(columns["token_ids"] or ()) for columns in added)
        return {"num_errors": sum(columns["error"] is not None for columns in added), "num_tokens": num_tokens}

    async def _started_answerer(self) -> RowAnswerer:
        async with self._starting:
            if self._answerer is None:
                engine = await asyncio.to_thread(self._start_engine)
                defaults = RowDefaults(self._job.sampling, engine.llm.sampling_defaults, engine.llm.config.seed)
                self._answerer = RowAnswerer(engine, defaults)
            return self._answerer

    def _start_engine(self) -> AsyncLLM:
        _keep_to_share_of_cpus(self._job.tensor_parallel_size, self._job.engines_per_node)
        return AsyncLLM(self._job.model, **self._job.options)

    def _write(self, unit_idx: int, rows: UnitRows, added: Sequence[Mapping[str, Any]]) -> None:
        path = self._job.part_path(unit_idx)
        scratch = path.with_name(f".{path.name}-{socket.gethostname()}-{os.getpid()}")
        rows.write(scratch, added)
        replace_file(path, scratch)

    def _exit(self, tries: UnitTries, error: Exception) -> None:
        """End this process, so that Ray replaces it. The ranks of the engine end with it."""
        reason = f"{type(error).__name__}: {error}"
        tries.note(reason)
        print(f"the engine failed and is replaced: {reason}", file=sys.stderr, flush=True)
        os._exit(1)


def _keep_to_share_of_cpus(tensor_parallel_size: int, engines_per_node: int) -> None:
    """Let the engines on the GPUs of a machine use different cpus, above all for attention on the CPU.

    Every k-th cpu is of every memory node, and the two threads of a core go to the same engine if k divides the number
    of cores. Which share it is follows from the engine's GPUs, which Ray lists in the environment.
    """
    gpus = [int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.isdigit()]
    cpus = sorted(os.sched_getaffinity(0))
    if gpus and 1 < engines_per_node <= len(cpus):
        share = min(gpus) // tensor_parallel_size % engines_per_node
        os.sched_setaffinity(0, cpus[share::engines_per_node])
