"""ServeReplicas: the replicas of a Serve application, as the front sees them."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from nanovllm.cluster.app_call import WholeRequest
from nanovllm.cluster.front import ReplicaLostError, no_replica
from nanovllm.cluster.request_keys import request_key
from nanovllm.errors import EngineError
from nanovllm.server.errors import Refusal
from nanovllm.server.gate import ASGIMessage

DEPLOYMENT = "EngineReplica"
METRICS_TIMEOUT_S = 5.0  # a replica that does not answer in this time is left out
_NO_REPLICA = (DeploymentUnavailableError, ReplicaUnavailableError)


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
