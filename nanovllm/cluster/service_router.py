"""PrefixRouter: PrefixRouting behind Ray Serve's interface, in the front's process and Serve's router thread."""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanovllm.cluster.prefix_routing import PrefixRouting
from nanovllm.cluster.request_keys import RequestKey


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
