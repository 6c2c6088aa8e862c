"""BatchEngine: runs one engine of a job, in a process of Ray or of the command. Writes a part for each unit.

Rows and answers stay in this process; only counts are returned. A part is written under a scratch name and then
renamed, so that no reader sees half a part. A unit that runs twice writes the same part twice.

The engine starts when the first unit arrives, and sizes itself for its share of the machine. A refusal to start is
returned as the unit's failure. If the engine fails, the process exits, and another process starts an engine with the
same units. TryCount counts the failures of a unit. A unit that has failed twice runs alone. After a unit's third
failure, the unit's part is written with an error in each row, and the job continues. If engines do not start, the job
ends.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.capacity.machine import Machine
from nanovllm.config import Config
from nanovllm.entrypoints.cluster.batch_files import UnitRows, replace_file
from nanovllm.entrypoints.cluster.batch_rows import (
    NO_DOCUMENT,
    RowDefaults,
    RowPlace,
    RowRequest,
    Unit,
    answer_columns,
    error_columns,
    make_request,
    runs_of,
)
from nanovllm.entrypoints.cluster.resources import sizes_within
from nanovllm.errors import CheckpointError, ConfigError, EngineError, RequestError
from nanovllm.plan.outputs import RequestOutput
from nanovllm.request_stream import RequestStream
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.answer_parts import with_reasoning_tags
from nanovllm.text.frontend import Prompt

NUM_UNITS = 2  # run concurrently, so that the end of one unit overlaps with the beginning of the next
MAX_TRIES = 3  # failures of a unit before its rows get an error, and of a start before the job ends
NUM_DOCUMENTS = 2  # read concurrently; more documents would evict each other's KV from the cache
NUM_ROWS = 1024  # rows in the engine at a time; the other rows of a huge document wait


class RowAnswerer:
    """Answers rows in an engine, in an order that lets them share KV.

    Any number of units may be answered at once, on one event loop.
    """

    def __init__(self, engine: AsyncLLM, defaults: RowDefaults) -> None:
        self._engine, self._defaults = engine, defaults
        self._documents = asyncio.Semaphore(NUM_DOCUMENTS)
        self._rows = asyncio.Semaphore(NUM_ROWS)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    async def answer_unit(
        self, rows: Sequence[Mapping[str, Any] | RequestError], places: Sequence[RowPlace]
    ) -> list[dict[str, Any]]:
        """Return the added columns of each row; a row that cannot run gets an error.

        Rows without a document are submitted together. The first row of a document is submitted before the document's
        other rows, so that the other rows find the document in the prefix cache. Raises EngineError if the engine
        fails.
        """
        added: list[dict[str, Any]] = [{} for _ in rows]

        async def answer(i: int, begun: asyncio.Event | None = None) -> None:
            added[i] = await self._answer_row(rows[i], places[i], begun)

        async def answer_document(run: Sequence[int]) -> None:
            async with self._documents:
                begun = asyncio.Event()
                first = asyncio.create_task(answer(run[0], begun))
                await begun.wait()
                await asyncio.gather(first, *map(answer, run[1:]))

        has_document = {i for i, place in enumerate(places) if place.document != NO_DOCUMENT}
        runs = runs_of(places)
        await asyncio.gather(*(answer_document(run) if run[0] in has_document else answer(run[0]) for run in runs))
        return added

    async def _answer_row(
        self, row: Mapping[str, Any] | RequestError, place: RowPlace, begun: asyncio.Event | None
    ) -> dict[str, Any]:
        """Answer one row, and set `begun` as soon as the row's prompt has been computed or the row has ended."""
        try:
            async with self._rows:
                if isinstance(row, RequestError):
                    raise row
                request = make_request(row, place, self._defaults)
                prompt, params = await self._prompt(request)
                stream = await self._engine.submit(prompt, params, with_tokens=begun is not None)
                outputs = await (stream.outputs() if begun is None else _outputs(stream, begun))
                return answer_columns(outputs, params)
        except RequestError as error:
            return error_columns(str(error))
        finally:
            if begun is not None:
                begun.set()

    async def _prompt(self, request: RowRequest) -> tuple[Prompt, SamplingParams]:
        """Return the prompt, and the parameters, which for a chat have the tags of the answer's reasoning."""
        if request.messages is None:
            assert request.prompt is not None, "a request has messages or a prompt"
            return request.prompt, request.params
        llm = self._engine.llm
        (token_ids,) = await asyncio.to_thread(llm.chat_token_ids, request.messages)
        return token_ids, with_reasoning_tags(llm.text, request.params, token_ids)


async def _outputs(stream: RequestStream, begun: asyncio.Event) -> list[RequestOutput]:
    """Collect the outputs of `stream`, and set `begun` at the first token."""
    ended: dict[int, RequestOutput] = {}
    async for update in stream:
        begun.set()
        if update.output is not None:
            ended[update.index] = update.output
    return [ended[index] for index in sorted(ended)]


# -- units ---------------------------------------------------------------------------------------------------------


class JobFailedError(EngineError):
    """The job has to end, because further engines would fail in the same way."""


class TryCount:
    """Counts failed tries, of a unit or of a start, in a file of the output folder, because a try may end its process.

    The file has a line for each try: the reason why the try failed, or nothing if the process died without a reason.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def reasons(self) -> list[str]:
        if not self._path.exists():
            return []
        return self._path.read_text().split("\n")[1:]

    def last_reason(self) -> str:
        return next(filter(None, reversed(self.reasons())), "the process died, perhaps out of memory")

    def begin(self) -> None:
        self._append("\n")

    def note(self, error: Exception) -> None:
        """Note why the latest try is about to end."""
        self._append(" ".join(f"{type(error).__name__}: {error}".split()))

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)

    def _append(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text)


@dataclass(frozen=True)
class EngineJob:
    """The part of a job that the job's engines need."""

    model: str
    options: Mapping[str, Any]  # fields of Config
    sampling: Mapping[str, Any]  # fields of SamplingParams that the flags gave
    input_paths: Sequence[Path]
    output: Path
    format: type[UnitRows]
    num_part_digits: int
    tensor_parallel_size: int
    find_machine: Callable[[Config], Machine]
    engines_per_node: int = 1
    memory_bytes: int | None = None  # memory of its machine that each engine may use, or None for all of it

    def part_path(self, unit_idx: int) -> Path:
        return self.output / f"part-{unit_idx:0{self.num_part_digits}}{self.format.suffix}"

    def scratch_path(self, unit_idx: int, purpose: str) -> Path:
        """Return the path of a file that is removed when the job ends or is resumed."""
        return self.output / f".{self.part_path(unit_idx).name}-{purpose}"


class BatchEngine:
    """A callable class, as `Dataset.map_batches` takes it, with one unit in each batch."""

    def __init__(self, job: EngineJob) -> None:
        self._job = job
        self._answerer: RowAnswerer | None = None
        self._starting = asyncio.Lock()
        self._entering = asyncio.Lock()
        self._free_turns = asyncio.Semaphore(NUM_UNITS)

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Run the unit of `batch`, and return its counts. `failure` says why the job must end; "" if the unit ran."""
        unit_idx, unit = int(batch["unit"][0]), Unit(packed=batch["places"][0])
        counts = {"unit": unit_idx, "num_rows": len(unit), "num_errors": 0, "num_tokens": 0, "failure": ""}
        counts["is_refusal"] = False  # True for a failure that the user can correct
        try:
            counts |= await self._try_unit(unit_idx, unit)
        except JobFailedError as error:
            counts["failure"] = str(error)
        except (ConfigError, CheckpointError) as error:
            counts |= {"failure": str(error), "is_refusal": True}
        except OSError as error:
            counts |= {"failure": f"on {socket.gethostname()}: {error}", "is_refusal": True}
        return {name: [value] for name, value in counts.items()}

    async def _try_unit(self, unit_idx: int, unit: Unit) -> dict[str, int]:
        """Write the unit's part, and return its counts. After MAX_TRIES failures, every row of the part has an error.

        An engine that dies ends all units that run in it, so a unit's last try runs alone.
        """
        tries = TryCount(self._job.scratch_path(unit_idx, "tries"))
        num_failed = len(tries.reasons())
        if num_failed > MAX_TRIES:
            where = unit.describe([path.name for path in self._job.input_paths])
            raise JobFailedError(f"{where}: engines fail while they read these rows; take the rows out of the input")
        async with self._turn(alone=num_failed >= MAX_TRIES - 1):
            answerer = await self._started_answerer(unit_idx)
            with self._counted(tries):
                places = unit.places
                rows = await asyncio.to_thread(self._job.format, self._job.input_paths, places)
                if num_failed < MAX_TRIES:
                    added = await self._answer(answerer, rows, places)
                else:
                    message = f"{MAX_TRIES} engines have failed with the rows of this part; the last reason known is: "
                    added = [error_columns(message + tries.last_reason()) for _ in places]
                await asyncio.to_thread(self._write, unit_idx, rows, added)
        num_tokens = sum(len(columns["token_ids"] or ()) for columns in added)
        return {"num_errors": sum(columns["error"] is not None for columns in added), "num_tokens": num_tokens}

    async def _answer(
        self, answerer: RowAnswerer, rows: UnitRows, places: Sequence[RowPlace]
    ) -> Sequence[Mapping[str, Any]]:
        return await answerer.answer_unit(rows.rows, places)

    @contextmanager
    def _counted(self, tries: TryCount) -> Iterator[None]:
        """Count a try, and reset the count after a success. An error that the user cannot correct ends the process."""
        tries.begin()
        try:
            yield
        except (ConfigError, CheckpointError, OSError):
            raise
        except Exception as error:
            tries.note(error)
            self._exit(error)
        tries.forget()

    @asynccontextmanager
    async def _turn(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait until a unit may run: concurrently with NUM_UNITS - 1 other units, or alone."""
        num_turns = NUM_UNITS if alone else 1
        async with self._entering:  # one unit at a time, because two units could each hold the turns the other needs
            for _ in range(num_turns):
                await self._free_turns.acquire()
        try:
            yield
        finally:
            for _ in range(num_turns):
                self._free_turns.release()

    async def _started_answerer(self, unit_idx: int) -> RowAnswerer:
        """Start the engine if it has not started. Raises JobFailedError once MAX_TRIES engines have not started."""
        async with self._starting:
            if self._answerer is None:
                tries = TryCount(self._job.scratch_path(unit_idx, "starts"))
                if len(tries.reasons()) >= MAX_TRIES:
                    raise JobFailedError(
                        f"{MAX_TRIES} engines have not started; the last reason known is: {tries.last_reason()}"
                    )
                with self._counted(tries):
                    engine = await asyncio.to_thread(self._start_engine)
                defaults = RowDefaults(self._job.sampling, engine.llm.sampling_defaults, engine.llm.config.seed)
                self._answerer = RowAnswerer(engine, defaults)
            return self._answerer

    def _start_engine(self) -> AsyncLLM:
        """Start an engine that keeps to its share of the machine."""
        job = self._job
        _keep_to_share_of_cpus(job.tensor_parallel_size, job.engines_per_node)
        sizes: dict[str, Any] = {}
        if job.memory_bytes is not None:
            config = Config(model=job.model, **job.options)
            sizes = sizes_within(job.memory_bytes, config, job.find_machine(config))
        return AsyncLLM(job.model, **{**job.options, **sizes})

    def close(self) -> None:
        """Close the engine, if it has started."""
        if self._answerer is not None:
            self._answerer.close()

    def _write(self, unit_idx: int, rows: UnitRows, added: Sequence[Mapping[str, Any]]) -> None:
        scratch = self._job.scratch_path(unit_idx, f"{socket.gethostname()}-{os.getpid()}")
        rows.write(scratch, added)
        replace_file(self._job.part_path(unit_idx), scratch)

    def _exit(self, error: Exception) -> None:
        """End this process, so that another one replaces it. The ranks of the engine end with it."""
        print(f"the engine failed and is replaced: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _keep_to_share_of_cpus(tensor_parallel_size: int, engines_per_node: int) -> None:
    """Let the engines on the GPUs of a machine use different cpus, above all for attention on the CPU.

    Each of k engines takes every k-th cpu, and so some cpus of every memory node. If k divides the number of cores,
    both threads of a core go to the same engine. The engine's GPUs, which Ray lists in the environment, determine the
    engine's share.
    """
    gpus = [int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number.isdigit()]
    cpus = sorted(os.sched_getaffinity(0))
    if gpus and 1 < engines_per_node <= len(cpus):
        share = min(gpus) // tensor_parallel_size % engines_per_node
        os.sched_setaffinity(0, cpus[share::engines_per_node])
