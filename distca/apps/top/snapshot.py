"""A control plane's view of its cluster at one moment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from distca.v1 import cluster_pb2, jobs_pb2, membership_pb2

_PLACEMENTS = {
    jobs_pb2.PLACEMENT_POOL: "pool",
    jobs_pb2.PLACEMENT_IN_PLACE: "in-place",
    jobs_pb2.PLACEMENT_MIXED: "mixed",
}


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """A live attention server, with the load of its last heartbeat.

    Attributes:
        job: whose rank's process it shares, or None for a server of the pool.
        rank: of that job.
        busy_ratio: share of the time in kernels, 0 to 1.
        moved_bytes_per_second: sent and received over the data plane.
    """

    server_id: str
    host: str
    device: str
    version: str
    draining: bool
    job: str | None
    rank: int | None
    seconds_since_heartbeat: float
    busy_ratio: float
    queued_tasks: int
    open_ticks: int
    buffer_bytes: int
    moved_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class BalanceView:
    """Max over mean busy seconds of the servers in one phase; None for what is not known."""

    phase: str
    home_imbalance: float | None
    predicted_imbalance: float | None
    measured_imbalance: float | None


@dataclass(frozen=True, kw_only=True)
class StepView:
    """The latest step that every rank has finished.

    Attributes:
        step_seconds: of the slowest rank.
        wait_seconds: the longest that a rank was blocked on core attention; None if none knows.
        moved_bytes: between processes in the whole step.
    """

    step: int
    step_seconds: float
    wait_seconds: float | None
    tokens: int
    moved_bytes: int
    balance: tuple[BalanceView, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def moved_bytes_per_second(self) -> float:
        return self.moved_bytes / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class JobView:
    """An open job; steps are None before the first."""

    job_id: str
    name: str
    placement: str
    tolerance: float
    n_ranks: int
    n_joined_ranks: int
    planned_step: int | None
    finished_step: int | None
    epoch: int
    recovering: bool
    last_step: StepView | None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Control plane, servers and jobs at one moment.

    Attributes:
        address: of the control plane.
        unix_seconds: its clock.
        planner_state: how its default planner runs: compiled, compiling or uncompiled; empty if it
            does not say.
    """

    address: str
    version: str
    unix_seconds: float
    uptime_seconds: float
    servers: tuple[ServerView, ...]
    jobs: tuple[JobView, ...]
    planner_state: str = ""

    @property
    def n_serving(self) -> int:
        """Servers that take new work."""
        return sum(not server.draining for server in self.servers)

    @property
    def moved_bytes_per_second(self) -> float:
        """The traffic of all servers; each transfer between two of them counts at both."""
        return sum(server.moved_bytes_per_second for server in self.servers)

    def as_json(self) -> dict[str, Any]:
        """A dictionary for scripts: the fields by their names here, and the sums beside them."""
        return {
            **dataclasses.asdict(self),
            "n_serving": self.n_serving,
            "moved_bytes_per_second": self.moved_bytes_per_second,
        }


def snapshot_from(answer: cluster_pb2.DescribeClusterResponse, address: str) -> Snapshot:
    """Reads what the control plane at ``address`` answered."""
    names = {job.job_id: job.name for job in answer.jobs}
    return Snapshot(
        address=address,
        version=answer.version,
        unix_seconds=answer.unix_seconds,
        uptime_seconds=answer.uptime_seconds,
        servers=tuple(_server(status, names) for status in answer.servers),
        jobs=tuple(_job(status) for status in answer.jobs),
        planner_state=answer.planner_state,
    )


def _server(status: membership_pb2.ServerStatus, job_names: dict[str, str]) -> ServerView:
    in_place = bool(status.in_place_job_id)
    return ServerView(
        server_id=status.server.server_id,
        host=status.server.host,
        device=status.server.device,
        version=status.server.version,
        draining=status.draining,
        job=job_names.get(status.in_place_job_id, status.in_place_job_id) if in_place else None,
        rank=status.in_place_rank if in_place else None,
        seconds_since_heartbeat=status.seconds_since_heartbeat,
        busy_ratio=status.load.busy_ratio,
        queued_tasks=status.load.queued_tasks,
        open_ticks=status.load.open_ticks,
        buffer_bytes=status.load.buffer_bytes,
        moved_bytes_per_second=status.load.moved_bytes_per_second,
    )


def _job(status: cluster_pb2.JobStatus) -> JobView:
    return JobView(
        job_id=status.job_id,
        name=status.name,
        placement=_PLACEMENTS.get(status.placement, "unknown"),
        tolerance=status.tolerance,
        n_ranks=status.n_ranks,
        n_joined_ranks=status.n_joined_ranks,
        planned_step=status.planned_step if status.planned_step >= 0 else None,
        finished_step=status.finished_step if status.finished_step >= 0 else None,
        epoch=status.epoch,
        recovering=status.recovering,
        last_step=_step(status.last_step) if status.HasField("last_step") else None,
    )


def _step(status: jobs_pb2.StepStatus) -> StepView:
    return StepView(
        step=status.step,
        step_seconds=status.step_seconds,
        wait_seconds=status.wait_seconds if status.HasField("wait_seconds") else None,
        tokens=status.tokens,
        moved_bytes=status.moved_bytes,
        balance=tuple(
            BalanceView(
                phase=phase.phase,
                home_imbalance=phase.home_imbalance or None,
                predicted_imbalance=phase.predicted_imbalance or None,
                measured_imbalance=phase.measured_imbalance or None,
            )
            for phase in status.phases
        ),
    )
