"""`nanovllm serve --num-replicas`: this process runs the HTTP server, and Ray Serve runs the engines.

    this process    the port, connections, the gate (API keys, limits), the choice of a replica, the drain
    Ray Serve       places, checks, replaces and scales the replicas
    replicas        an engine each, with the same HTTP application as a server of one engine

Serve's own HTTP proxies are disabled. With a proxy between the clients and this process, the limits on connections and
slow clients would have no effect, and each part of an answer would pass through one more process.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Message as ASGIMessage

from nanovllm.async_llm import AsyncLLM
from nanovllm.config import Config
from nanovllm.entrypoints.cluster import front as front_module
from nanovllm.entrypoints.cluster.front import (
    AppCall,
    Front,
    PartInterval,
    PrefixRouting,
    ReplicaLostError,
    RequestKey,
    WholeRequest,
    no_replica,
    request_key,
)
from nanovllm.entrypoints.cluster.resources import (
    ServiceOptions,
    check_engine,
    check_room,
    connected,
    deployment_options,
    nodes_of_cluster,
    replica_needs,
)
from nanovllm.entrypoints.server.app import make_app, warm_up
from nanovllm.entrypoints.server.errors import Refusal, keep_messages_out
from nanovllm.entrypoints.server.gate import Gate, load_keys
from nanovllm.entrypoints.server.lifecycle import raise_file_limit, serve_until_stopped
from nanovllm.entrypoints.server.log_lines import set_up_log
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.entrypoints.server.request_log import RequestLog
from nanovllm.errors import EngineError
from nanovllm.utils.interrupt import ended_by_sigterm

LOCAL_OBJECT_STORE_BYTES = 512 << 20  # the object store has bodies and parts of answers above 100 KB
UPDATE_INTERVAL_S = 0.5
MAX_SILENCE_S = 30.0  # a restart of Serve's controller takes less time

DEPLOYMENT = "EngineReplica"
METRICS_TIMEOUT_S = 5.0  # replicas that do not answer within this time are left out
_NO_REPLICA = (DeploymentUnavailableError, ReplicaUnavailableError)

logger = logging.getLogger(__name__)


def run_service(
    load: Callable[[], AsyncLLM], config: Config, options: ServerOptions, service: ServiceOptions, bound: socket.socket
) -> int:
    """Serve with replicas until a signal arrives, and return the exit status. Call it in the main thread.

    load: makes an engine. Each replica imports and calls `load`. For the other arguments see lifecycle.run_server.
    Raises ConfigError for options that the cluster cannot run, and EngineError if no replica starts.
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
    """Yield the application's handle once all replicas are ready. Finally delete the application unless Ray ends."""
    serve.start(proxy_location="Disabled")
    try:
        yield _run(app, name)
    finally:
        if outlives_process:
            serve.delete(name)


def _run(app: serve.Application, name: str) -> Any:
    try:
        return serve.run(app, name=name, route_prefix=None)
    except RuntimeError as error:  # Serve raises RuntimeError if an application does not start
        raise EngineError(f"the replicas have not started: {_reason(name) or error}") from error


def _reason(app_name: str) -> str:
    """Return the last line of the traceback of a replica that has not started, or "" if Serve has none."""
    app = serve.status().applications.get(app_name)
    lines = app.deployments[DEPLOYMENT].message.strip().splitlines() if app is not None else []
    return lines[-1] if lines else ""


def _replace_replicas(app: serve.Application, name: str) -> None:
    """Begin a rolling update to the same application: Serve restarts all replicas, some at a time."""
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
    """The front and its replicas, which implement lifecycle.Served.

    replace_replicas: begins a rolling update, after SIGUSR1.
    """

    def __init__(
        self, gate: Gate, front: Front, replicas: "ServeReplicas", replace_replicas: Callable[[], None]
    ) -> None:
        self.gate = gate
        self._front, self._replicas, self._replace_replicas = front, replicas, replace_replicas
        self._update: asyncio.Task[None] | None = None  # the latest rolling update

    @property
    def num_open(self) -> int:
        return self._front.num_open

    async def warm_up(self) -> None:
        """Listen for SIGUSR1. Replicas warm up before Serve reports them as ready."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._begin_update)
        await self._replicas.update()

    async def wait_for_failure(self) -> EngineError:
        """Return the error once Serve itself no longer answers. Serve replaces replicas that fail."""
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


# -- the replicas, and how the front calls them ------------------------------------------------------------------------


class EngineReplica:
    """The actor that runs one engine and its HTTP application, without the server around it.

    Ray Serve starts, checks and ends the actor. The front (front.py) sends requests to the actor.
    """

    async def __init__(self, load: Callable[[], AsyncLLM], options: ServerOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        set_up_log(options.log_level, options.log_format)
        keep_messages_out("ray.serve", front_module.__name__)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._interval = PartInterval()
        self._engine = load()
        app = make_app(self._engine, options, self._name)
        self._app, self._metrics = RequestLog(app), app.state.service.metrics
        await warm_up(self._engine)

    async def answer(
        self, key: RequestKey, without: frozenset[str], request: WholeRequest
    ) -> AsyncGenerator[str | list[ASGIMessage], None]:
        """Yield this replica's name, then the messages of the answer. Only the router reads `key` and `without`.

        Raises EngineError if the engine has failed, so that the front asks another replica.
        """
        yield self._name
        self.check_health()
        parts = AppCall(self._app, request, self._interval).parts()
        has_begun = False
        try:
            async for part in parts:
                if not has_begun:
                    self.check_health()  # if the engine has just failed, this part is its error
                    has_begun = True
                yield part
        finally:
            await parts.aclose()

    async def metrics(self) -> str:
        return self._metrics.render().decode()

    def check_health(self) -> None:
        """Raise EngineError if the engine has failed. Serve then replaces the replica."""
        if self._engine.failure is not None:
            raise EngineError(str(self._engine.failure))

    async def abort(self) -> None:
        """End all open answers early, with their text so far."""
        await self._engine.aclose()

    async def __del__(self) -> None:  # Serve awaits it when the replica ends
        if hasattr(self, "_engine"):  # False if loading has failed
            await self._engine.aclose()


class PrefixRouter(RequestRouter):
    """Chooses the replica for each call of EngineReplica.answer, whose first two arguments are for the router."""

    def initialize_state(self, max_queue_gap: int) -> None:
        self._routing = PrefixRouting(max_queue_gap)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._forget_lost_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget_lost_replicas()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the others, which Serve tries if the chosen replica does not answer."""
        key, without = _routing_arguments(pending_request)
        queues = await self._queues(candidate_replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        eligible = {name: queue for name, queue in queues.items() if name not in without} or queues
        if not eligible:
            return [candidate_replicas]
        chosen = by_name[self._routing.choose(key, eligible)]
        # The next request may be routed before this request is sent. The replica reports the true number on acceptance
        self.replica_queue_len_cache.update(chosen.replica_id, eligible[chosen.replica_id.unique_id] + 1)
        return [[chosen], [replica for replica in candidate_replicas if replica is not chosen]]

    async def _queues(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Return the number of open requests of each replica that answers. Serve caches a number for 10 s."""
        cache = self.replica_queue_len_cache
        unknown = [replica for replica in replicas if cache.get(replica.replica_id) is None]
        await self._probe_queue_lens(unknown, 0)
        lengths = {replica.replica_id.unique_id: cache.get(replica.replica_id) for replica in replicas}
        return {name: length for name, length in lengths.items() if length is not None}

    def _forget_lost_replicas(self) -> None:
        self._routing.forget_all_but({replica_id.unique_id for replica_id in self.curr_replicas})


def _routing_arguments(request: PendingRequest | None) -> tuple[RequestKey, frozenset[str]]:
    if request is None:
        return RequestKey(), frozenset()
    key, without, *_ = request.args
    assert isinstance(key, RequestKey), "only EngineReplica.answer is called through the router"
    return key, without


class ServeReplicas:
    """Implements front.Replicas, for one event loop. `num_ready` is the number at the last `update`."""

    def __init__(self, handle: Any, app_name: str, max_wait_s: float) -> None:
        self.num_ready = 0
        self._handle, self._app_name, self._max_wait_s = handle, app_name, max_wait_s
        self._stream = handle.options(method_name="answer", stream=True)

    async def update(self) -> None:
        """Ask Serve's controller for the number of ready replicas. Raises Ray's errors if there is no answer."""
        status = await asyncio.to_thread(serve.status)
        app = status.applications.get(self._app_name)
        deployment = app.deployments.get(DEPLOYMENT) if app is not None else None
        self.num_ready = deployment.replica_states.get("RUNNING", 0) if deployment is not None else 0

    async def answer(self, request: WholeRequest, without: Collection[str]) -> AsyncGenerator[list[ASGIMessage], None]:
        if not self.num_ready:
            raise no_replica()
        key = request_key(request.scope["method"], request.scope["path"], request.body, request.cache_salt)
        response = self._stream.remote(key, frozenset(without), request)
        replica = None
        try:
            replica = await asyncio.wait_for(anext(response), self._max_wait_s)
            async for part in response:
                yield part
        except asyncio.TimeoutError as error:
            message = f"no replica took the request within max_wait_s={self._max_wait_s:g} seconds; ask later"
            raise Refusal(503, "wait", message, retry_after_s=1) from error
        except BackPressureError as error:
            raise Refusal(
                429, "queue", "too many requests wait for a replica; ask again later", retry_after_s=1
            ) from error
        except _NO_REPLICA as error:
            raise no_replica() from error
        except (RayError, EngineError) as error:
            raise ReplicaLostError(replica) from error
        finally:
            response.cancel()  # no effect on a finished answer

    async def metrics(self) -> list[str]:
        try:
            texts = await self._handle.broadcast("metrics").results_async(
                timeout_s=METRICS_TIMEOUT_S, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            return []
        return [text for text in texts if isinstance(text, str)]

    async def abort(self) -> None:
        """Let every replica give its open answers their last event."""
        with suppress(DeploymentUnavailableError, TimeoutError):
            await self._handle.broadcast("abort").results_async(timeout_s=METRICS_TIMEOUT_S, return_exceptions=True)
