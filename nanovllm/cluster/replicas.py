"""The replicas of a service on Ray Serve: the actor of each, the choice among them, and how the front calls them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Message as ASGIMessage

from nanovllm.async_llm import AsyncLLM
from nanovllm.cluster import front
from nanovllm.cluster.front import AppCall, Pace, ReplicaLostError, WholeRequest, no_replica
from nanovllm.cluster.routing import PrefixRouting, RequestKey, request_key
from nanovllm.errors import EngineError
from nanovllm.server.app import make_app, warm_up
from nanovllm.server.errors import Refusal, keep_messages_out
from nanovllm.server.options import ServerOptions

DEPLOYMENT = "EngineReplica"
METRICS_TIMEOUT_S = 5.0  # a replica that does not answer in this time is left out
_NO_REPLICA = (DeploymentUnavailableError, ReplicaUnavailableError)


class EngineReplica:
    """The actor that runs one engine and its HTTP application, without the server around it.

    Ray Serve starts it, asks for its health, and ends it. The front (front.py) sends it requests.
    """

    async def __init__(self, load: Callable[[], AsyncLLM], options: ServerOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        keep_messages_out("ray.serve", front.__name__)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._pace = Pace()
        self._engine = load()
        self._app = make_app(self._engine, options, self._name)
        await warm_up(self._engine)

    async def answer(
        self, key: RequestKey, without: frozenset[str], request: WholeRequest
    ) -> AsyncGenerator[str | list[ASGIMessage], None]:
        """This replica's name, then the messages of the answer. `key` and `without` are for the router.

        Raises EngineError if the engine has failed, so that the front asks another replica.
        """
        yield self._name
        self.check_health()
        parts = AppCall(self._app, request, self._pace).parts()
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
        return self._app.state.service.metrics.render().decode()

    def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        if self._engine.failure is not None:
            raise EngineError(str(self._engine.failure))

    async def abort(self) -> None:
        """End all open answers with what there is of them."""
        await self._engine.aclose()

    async def __del__(self) -> None:  # Serve awaits it when the replica ends
        if hasattr(self, "_engine"):  # it has loaded
            await self._engine.aclose()


class PrefixRouter(RequestRouter):
    """Requests are calls of EngineReplica.answer: their first two arguments are for the router."""

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
        """The chosen replica, and then the others, which Serve tries if the first does not answer."""
        key, without = _routing_arguments(pending_request)
        queues = await self._queues(candidate_replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        eligible = {name: queue for name, queue in queues.items() if name not in without} or queues
        if not eligible:
            return [candidate_replicas]
        chosen = by_name[self._routing.choose(key, eligible)]
        # The next request may be routed before this one is sent. The replica reports its true number when it accepts.
        self.replica_queue_len_cache.update(chosen.replica_id, eligible[chosen.replica_id.unique_id] + 1)
        return [[chosen], [replica for replica in candidate_replicas if replica is not chosen]]

    async def _queues(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """The number of open requests of each replica that tells it. Serve forgets what it was told 10 s ago."""
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
    """Satisfies front.Replicas. Used on one event loop. `num_ready` is as of the last `update`."""

    def __init__(self, handle: Any, app_name: str, max_wait_s: float) -> None:
        self.num_ready = 0
        self._handle, self._app_name, self._max_wait_s = handle, app_name, max_wait_s
        self._stream = handle.options(method_name="answer", stream=True)

    async def update(self) -> None:
        """Ask Serve's controller how many replicas take requests. Raises what Ray raises if it does not answer."""
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
            response.cancel()  # does nothing to an answer that has ended

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
