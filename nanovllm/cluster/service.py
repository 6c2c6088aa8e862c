"""`nanovllm serve --num-replicas`: this process has the HTTP server, and Ray Serve runs the engines.

    this process    the port, connections, the gate (API keys, limits), the choice of a replica, the drain
    Ray Serve       places the replicas, asks for their health, replaces them, scales them
    replicas        an engine each, with the same HTTP application as a server of one engine

Serve's own HTTP proxies are switched off. Behind them, the limits on connections and slow clients would not hold, and
each part of an answer would pass through one more process.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from nanovllm.async_llm import AsyncLLM
from nanovllm.cluster.front import Front
from nanovllm.cluster.options import ServiceOptions, check_engine
from nanovllm.cluster.ray_connection import connected, nodes_of_cluster
from nanovllm.cluster.replicas import DEPLOYMENT, EngineReplica, ServeReplicas
from nanovllm.cluster.resources import check_room, deployment_options, replica_needs
from nanovllm.config import Config
from nanovllm.errors import EngineError
from nanovllm.server.errors import keep_messages_out
from nanovllm.server.gate import Gate, load_keys
from nanovllm.server.lifecycle import ended_by_sigterm, raise_file_limit, serve_until_stopped
from nanovllm.server.options import ServerOptions

LOCAL_OBJECT_STORE_BYTES = 512 << 20  # bodies and parts of answers above 100 KB pass through it
UPDATE_INTERVAL_S = 0.5
MAX_SILENCE_S = 30.0  # Serve's controller is restarted in less

logger = logging.getLogger(__name__)


def run_service(
    load: Callable[[], AsyncLLM],
    config: Config,
    options: ServerOptions,
    service: ServiceOptions,
    bound: socket.socket,
) -> int:
    """Serve with replicas until a signal arrives, and return the exit status. Call it in the main thread.

    load: makes an engine; it is called in each replica, so it must be importable there. The other arguments are those
    of lifecycle.run_server. Raises ConfigError for what the cluster cannot run, EngineError if no replica starts.
    """
    check_engine(config)
    keep_messages_out("ray.serve")
    num_files = raise_file_limit()
    keys = load_keys(options)
    # Connecting sets Ray's own handler of SIGTERM
    with connected(service.ray_address, LOCAL_OBJECT_STORE_BYTES), ended_by_sigterm():
        app = _application(load, config, options, service)
        name = f"nanovllm-{socket.gethostname()}-{bound.getsockname()[1]}"
        with _deployed(app, name, outlives_process=service.ray_address is not None) as handle:
            replicas = ServeReplicas(handle, name, options.max_wait_s)
            front = Front(replicas, options.served_model_name[0])
            gate = Gate(front, options, keys, front.refused)
            site = ServiceSite(gate, front, replicas, partial(_replace_replicas, app, name))
            return serve_until_stopped(site, options, bound, num_files)


@contextmanager
def _deployed(app: serve.Application, name: str, outlives_process: bool) -> Iterator[Any]:
    """The application's handle, once its replicas are ready. It is deleted in the end, or ends with its cluster."""
    serve.start(proxy_location="Disabled")
    try:
        yield _run(app, name)
    finally:
        if outlives_process:
            serve.delete(name)


def _run(app: serve.Application, name: str) -> Any:
    try:
        return serve.run(app, name=name, route_prefix=None)
    except RuntimeError as error:  # what Serve raises if an application does not start
        raise EngineError(f"the replicas have not started: {_reason(name) or error}") from error


def _reason(app_name: str) -> str:
    """Why a replica has not started, as far as Serve knows: the last line of its traceback."""
    app = serve.status().applications.get(app_name)
    lines = app.deployments[DEPLOYMENT].message.strip().splitlines() if app is not None else []
    return lines[-1] if lines else ""


def _replace_replicas(app: serve.Application, name: str) -> None:
    """Begin a rolling update to the same application: Serve starts all replicas anew, some at a time."""
    target = serve.RunTarget(target=app, name=name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _application(
    load: Callable[[], AsyncLLM], config: Config, options: ServerOptions, service: ServiceOptions
) -> serve.Application:
    assert service.num_replicas is not None, "checked by the command"
    nodes = nodes_of_cluster()
    needs = replica_needs(config, service, nodes)
    check_room(needs, nodes, service.num_replicas, "num_replicas")
    deployment = serve.deployment(EngineReplica, name=DEPLOYMENT, **deployment_options(config, options, service, needs))
    return deployment.bind(load, options)


class ServiceSite:
    """The front and its replicas, as the server's life sees them (lifecycle.Served).

    replace_replicas: begins a rolling update, for which SIGUSR1 asks.
    """

    def __init__(self, gate: Gate, front: Front, replicas: ServeReplicas, replace_replicas: Callable[[], None]) -> None:
        self.gate = gate
        self._front, self._replicas, self._replace_replicas = front, replicas, replace_replicas
        self._update: asyncio.Task[None] | None = None  # the rolling update that was asked for last

    @property
    def num_open(self) -> int:
        return self._front.num_open

    async def warm_up(self) -> None:
        """The replicas have warmed up when Serve calls them ready."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._begin_update)
        await self._replicas.update()

    async def wait_for_failure(self) -> EngineError:
        """Serve replaces replicas that fail. So the service fails only if Serve itself does not answer any more."""
        answered_s = time.monotonic()
        while True:
            await asyncio.sleep(UPDATE_INTERVAL_S)
            try:
                await self._replicas.update()
                answered_s = time.monotonic()
            except (RayError, RayServeException) as error:
                if time.monotonic() - answered_s > MAX_SILENCE_S:
                    return EngineError(f"Ray Serve has not answered for {MAX_SILENCE_S:g} s: {error}")

    async def abort(self) -> None:
        await self._replicas.abort()

    def _begin_update(self) -> None:
        logger.info("nanovllm: replacing all replicas, some at a time")
        self._update = asyncio.ensure_future(self._run_update())

    async def _run_update(self) -> None:
        try:
            await asyncio.to_thread(self._replace_replicas)
        except (RayError, RayServeException) as error:
            logger.error("nanovllm: the replicas cannot be replaced: %s", error)
