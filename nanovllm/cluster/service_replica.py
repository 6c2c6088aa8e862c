"""EngineReplica: the actor that runs one engine and its HTTP application, without the server around it.

Ray Serve starts it, asks for its health, and ends it. The front (front.py) sends it requests.
"""

from collections.abc import AsyncGenerator, Callable

from ray import serve

from nanovllm.async_llm import AsyncLLM
from nanovllm.cluster import app_call
from nanovllm.cluster.app_call import AppCall, Pace, WholeRequest
from nanovllm.cluster.request_keys import RequestKey
from nanovllm.errors import EngineError
from nanovllm.server.app import make_app, warm_up
from nanovllm.server.errors import keep_messages_out
from nanovllm.server.gate import ASGIMessage
from nanovllm.server.options import ServerOptions


class EngineReplica:
    async def __init__(self, load: Callable[[], AsyncLLM], options: ServerOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        keep_messages_out("ray.serve", app_call.__name__)
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
