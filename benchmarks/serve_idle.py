"""Many idle or slow connections beside running streams (`--workload idle-connections`)."""

import asyncio
import resource
from typing import Any

from benchmarks.serve_figures import over_runs
from benchmarks.serve_http import HttpClient
from benchmarks.serve_streams import RunningStreams
from benchmarks.serve_workloads import Bench, WorkloadError

Json = dict[str, Any]

NUM_OPENING = 50  # connections at a time
BYTES_PER_WINDOW = 3  # of each slow connection, while the streams are watched
SPARE_FILES = 200
PAUSE_S = 0.5  # after opening the connections, and after closing them


class IdleConnections:
    """Connections to the server that stay open. A third sends nothing, a third a slow head, a third a slow body.

    Each slow one sends a byte every `byte_interval_s`, and in this time they send one after the other.

    The server may close them. They are then opened again, and counted.
    """

    def __init__(self, client: HttpClient, num_connections: int, byte_interval_s: float) -> None:
        self._client, self._num_connections, self._byte_interval_s = client, num_connections, byte_interval_s
        self._opening = asyncio.Semaphore(NUM_OPENING)
        self._tasks: list[asyncio.Task[None]] = []
        self.num_open = 0
        self.num_closed_by_server = 0

    async def __aenter__(self) -> "IdleConnections":
        allow_files(self._num_connections + SPARE_FILES)
        self._tasks = [asyncio.create_task(self._keep_open(index)) for index in range(self._num_connections)]
        while self.num_open + self.num_closed_by_server < self._num_connections:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_open(self, index: int) -> None:
        address = self._client.address
        head = self._client.head("POST", "/v1/completions", 10_000)
        sent = (b"", head[:-4], head)[index % 3]  # the second lacks the end of the headers
        slow = (b"", b"a", b" ")[index % 3]
        turn_s = self._byte_interval_s * index / self._num_connections
        while True:
            async with self._opening:
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=self._client.ssl)
            self.num_open += 1
            try:
                writer.write(sent)
                ended = asyncio.ensure_future(reader.read())
                if slow:
                    await self._write_slowly(writer, slow, ended, turn_s)
                await asyncio.wait([ended])
            finally:
                self.num_open -= 1
                ended.cancel()
                writer.transport.abort()
            self.num_closed_by_server += 1

    async def _write_slowly(
        self, writer: asyncio.StreamWriter, byte: bytes, ended: "asyncio.Future[bytes]", turn_s: float
    ) -> None:
        """Write a byte `turn_s` after the start of each interval, until the server has closed the connection.

        The intervals are the same for all connections, whenever they were opened.
        """
        now_s = asyncio.get_running_loop().time
        next_s = now_s() + (turn_s - now_s()) % self._byte_interval_s
        while not ended.done():
            await asyncio.wait([ended], timeout=max(0.0, next_s - now_s()))
            writer.write(byte)
            next_s += self._byte_interval_s


def allow_files(num_files: int) -> None:
    """Raise this process's limit of open files, which a server that it starts inherits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files > hard != resource.RLIM_INFINITY:
        raise WorkloadError(f"{num_files} open files are needed, and the limit is {hard}; raise it with ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


async def measure_idle_connections(bench: Bench) -> Json:
    """The rate of running streams with the connections open, relative to that of the same streams without them.

    Each run measures both, in two passes that differ in nothing else. Which comes first changes from run to run.
    """
    args = bench.args
    runs = []
    for run in range(args.runs + args.warm_up):
        passes = {}
        order = (args.idle_connections, 0) if run % 2 else (0, args.idle_connections)
        for num_connections in order:
            passes[num_connections] = await watch_beside(bench, num_connections, args.seed + run)
        if run >= args.warm_up:
            runs.append(idle_figures(passes[0], passes[args.idle_connections]))
            print_idle(f"  run {len(runs)}, {'with' if order[0] else 'without'} first", runs[-1])
    result = over_runs(runs) | {"each_run": runs}
    print_idle(f"{args.streams} streams", result)
    return result


async def watch_beside(bench: Bench, num_connections: int, seed: int) -> Json:
    """One pass: the rate of the streams beside so many connections, which are opened before the streams begin."""
    window_s = bench.args.window_s
    async with IdleConnections(bench.client, num_connections, window_s / BYTES_PER_WINDOW) as idle:
        await asyncio.sleep(PAUSE_S)
        async with RunningStreams(bench, bench.args.streams, seed) as streams:
            window = await streams.watch(window_s)
            figures = {"open_connections": idle.num_open, "closed_by_server": idle.num_closed_by_server}
    await asyncio.sleep(PAUSE_S)
    return figures | {"tok_per_s": streams.tok_per_s(window), "streams_ended": streams.num_ended}


def idle_figures(without: Json, beside: Json) -> Json:
    """The figures of one run, of its passes without and with the connections."""
    return {
        "without_tok_per_s": without["tok_per_s"],
        "with_tok_per_s": beside["tok_per_s"],
        "with_over_without": beside["tok_per_s"] / without["tok_per_s"],
        "streams_ended": without["streams_ended"] + beside["streams_ended"],
        "open_connections": beside["open_connections"],
        "closed_by_server": beside["closed_by_server"],
    }


def print_idle(name: str, figures: Json) -> None:
    """Print the figures of one run, or of all of them with the range of the ratio."""
    key = "with_over_without"
    spread = f" ({figures[f'{key}_min']:.3f} to {figures[f'{key}_max']:.3f})" if f"{key}_min" in figures else ""
    print(
        f"{name}: {figures['without_tok_per_s']:,.1f} tok/s, beside {figures['open_connections']:.0f} idle or slow "
        f"connections {figures['with_tok_per_s']:,.1f}, ratio {figures[key]:.3f}{spread}; "
        f"the server closed {figures['closed_by_server']:.0f}",
        flush=True,
    )
