"""Ray Serve's router for replicas: by the pages of the prompt (`prefix_choice`). Imports ray."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from samewise.scale.prefix_choice import PrefixChoice
from samewise.scale.records import Job


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray is not checked
    """Ranks the replicas for each job; Ray Serve sends it to the first that is not full."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._choice = PrefixChoice()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica a rank, the best first."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        queues = self.replica_queue_len_cache
        loads = {name: queues.get(replica.replica_id) for name, replica in replicas.items()}
        job = _job(pending_request)
        if job is None:
            return [candidate_replicas]
        return [[replicas[name]] for name in self._choice.rank(job.pages, loads, job.avoid, job.loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember which pages the replica has now."""
        super().on_request_routed(pending_request, replica_id, result)
        job = _job(pending_request)
        if job is not None:
            self._choice.sent(replica_id.unique_id, job.pages)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that are gone."""
        self._choice.keep([replica.replica_id.unique_id for replica in replicas])
        super().update_replicas(replicas)


def _job(pending: PendingRequest | None) -> Job | None:
    """The job of a call; None for a call that is none."""
    arguments = () if pending is None else pending.args
    return arguments[0] if arguments and isinstance(arguments[0], Job) else None


__all__ = ["PrefixRouter"]
