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
BYTE_INTERVAL_S = 5.0  # between the bytes of a slow request
SPARE_FILES = 200
PAUSE_S = 0.5  # between opening or closing the connections and the next window


class IdleConnections:
    """Connections to the server that stay open. A third sends nothing, a third a slow head, a third a slow body.

    The server may close them. They are then opened again, and counted.
    """

    def __init__(self, client: HttpClient, num_connections: int, byte_interval_s: float = BYTE_INTERVAL_S) -> None:
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
        while True:
            async with self._opening:
                reader, writer = await asyncio.open_connection(address.host, address.port, ssl=self._client.ssl)
            self.num_open += 1
            try:
                writer.write(sent)
                ended = asyncio.ensure_future(reader.read())
                while not ended.done():
                    await asyncio.wait([ended], timeout=self._byte_interval_s)
                    writer.write(slow)
            finally:
                self.num_open -= 1
                ended.cancel()
                writer.transport.abort()
            self.num_closed_by_server += 1


def allow_files(num_files: int) -> None:
    """Raise this process's limit of open files, which a server that it starts inherits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files > hard != resource.RLIM_INFINITY:
        raise WorkloadError(f"{num_files} open files are needed, and the limit is {hard}; raise it with ulimit -Hn")
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


async def measure_idle_connections(bench: Bench) -> Json:
    """The rate of running streams with the connections open, relative to the mean of the rates before and after.

    The mean allows for streams that become slower as their contexts grow.
    """
    runs = []
    args = bench.args
    for run in range(args.runs + args.warm_up):
        async with RunningStreams(bench, args.streams, args.seed + run) as streams:
            before = await streams.watch(args.window_s)
            async with IdleConnections(bench.client, args.idle_connections) as idle:
                await asyncio.sleep(PAUSE_S)
                beside = await streams.watch(args.window_s)
                num_open, num_closed = idle.num_open, idle.num_closed_by_server
            await asyncio.sleep(PAUSE_S)
            after = await streams.watch(args.window_s)
        without = (streams.tok_per_s(before) + streams.tok_per_s(after)) / 2
        if run >= args.warm_up:
            figures = {"without_tok_per_s": without, "with_tok_per_s": streams.tok_per_s(beside)}
            figures |= {"with_over_without": figures["with_tok_per_s"] / without}
            figures["streams_ended"] = streams.num_ended
            runs.append(figures | {"open_connections": num_open, "closed_by_server": num_closed})
    result = over_runs(runs)
    print(
        f"{args.streams} streams: {result['without_tok_per_s']:,.1f} tok/s, beside {result['open_connections']:.0f} "
        f"idle or slow connections {result['with_tok_per_s']:,.1f}, ratio {result['with_over_without']:.3f} "
        f"({result['with_over_without_min']:.3f} to {result['with_over_without_max']:.3f}); the server closed "
        f"{result['closed_by_server']:.0f}"
    )
    return result
