"""ServiceSite: the front and its replicas, as the server's life sees them (lifecycle.Served)."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from nanovllm.cluster.front import Front
from nanovllm.cluster.serve_replicas import ServeReplicas
from nanovllm.errors import EngineError
from nanovllm.server.gate import Gate

UPDATE_INTERVAL_S = 0.5
MAX_SILENCE_S = 30.0  # Serve's controller is restarted in less

logger = logging.getLogger(__name__)


class ServiceSite:
    """replace_replicas: begins a rolling update, for which SIGUSR1 asks."""

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
