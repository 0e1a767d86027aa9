"""The present state, for ``distca top`` and ``distca doctor``: reads the coordinator's state."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import grpc

from control_plane.access.caller import caller_of
from control_plane.jobs.coordinator import Coordinator
from control_plane.jobs.job import Job
from control_plane.jobs.requests import last_step_to_proto, spec_to_proto, status_to_proto
from distca import __version__
from distca.v1 import cluster_pb2, cluster_pb2_grpc


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Answers what there is now.

    Args:
        coordinator: whose state is shown.
        planner_state: how the default planner runs.
        wall_clock: seconds since 1970 UTC.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        planner_state: Callable[[], str],
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._planner_state = planner_state
        self._wall_clock = wall_clock
        self._clock = clock
        self._started = clock()

    async def DescribeCluster(
        self, request: cluster_pb2.DescribeClusterRequest, context: grpc.aio.ServicerContext
    ) -> cluster_pb2.DescribeClusterResponse:
        shown = partial(status_to_proto, with_address=caller_of(context).sees_addresses)
        return cluster_pb2.DescribeClusterResponse(
            version=__version__,
            unix_seconds=self._wall_clock(),
            uptime_seconds=self._clock() - self._started,
            planner_state=self._planner_state(),
            servers=[
                shown(member, seconds_since_heartbeat=seconds)
                for member, seconds in self._coordinator.servers()
            ],
            jobs=[job_status(job) for job in self._coordinator.jobs()],
        )


def job_status(job: Job) -> cluster_pb2.JobStatus:
    """A job as it stands."""
    spec = spec_to_proto(job.spec)
    return cluster_pb2.JobStatus(
        job_id=job.job_id,
        name=spec.name,
        placement=spec.placement,
        tolerance=spec.tolerance,
        n_ranks=spec.n_ranks,
        n_joined_ranks=len(job.leases.joined),
        planned_step=-1 if job.planned_step is None else job.planned_step,
        finished_step=job.finished_step,
        epoch=job.epoch,
        recovering=job.is_recovering,
        last_step=last_step_to_proto(job),
    )
