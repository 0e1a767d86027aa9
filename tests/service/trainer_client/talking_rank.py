"""A rank that has steps and a link to the control plane, and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

from prometheus_client import CollectorRegistry

from attention_node.tick_server import TickServer
from core_attention.manifest import RankManifest
from core_attention.shape import AttentionShape
from data_plane.buffer_pool import BufferPool, host_allocator
from data_plane.liveness import LivenessMonitor
from data_plane.transport import Connection
from distca.contract import rpc
from distca.contract.codec import shape_from_proto
from distca.v1 import jobs_pb2
from tests.support.service_harness import (
    job_spec,
    rank_manifest,
    server_description,
)
from tests.support.waiting import eventually
from trainer_client.link.control_link import ControlLink
from trainer_client.link.planned_step import PlannedStep
from trainer_client.metrics import TrainerMetrics
from trainer_client.options import SessionOptions
from trainer_client.step.examiner import Examiner
from trainer_client.step.rank_steps import RankSteps
from trainer_client.step.servers import ServerLinks

WAIT_SECONDS = 10.0


class TalkingRank:
    """A rank that submits and reports, but begins no step.

    Attributes:
        link, steps: the real ones.
        received: what the control plane has sent, in order.
        progress: of steps that it is to have begun, by step.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        rank: int = 0,
        spec: jobs_pb2.JobSpec | None = None,
        *,
        replace: bool = False,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.received: list[Any] = []
        self.progress: Mapping[int, Sequence[int]] = {}
        self.link = _Link(self, settings, **options)
        spec = spec or job_spec()
        shape = shape_from_proto(spec.shape)
        self.steps = _Steps(self, _options(settings, spec, shape, rank))
        self._request = jobs_pb2.OpenJobRequest(
            replace=replace,
            spec=spec,
            rank=rank,
            host=f"host-{rank}",
            in_place_server=server_description(f"{spec.name}.rank-{rank}", profiles=[]),
        )

    def open(self) -> None:
        self.link.open(self._request, self.steps)

    def close(self, error: str = "") -> None:
        self.link.close(error)
        self.steps.close()

    def submit(
        self, step: int, *, manifest: RankManifest | None = None, forward_only: bool = False
    ) -> None:
        manifest = manifest or rank_manifest(step, self.rank)
        self.steps.submit(manifest, forward_only=forward_only)

    def wait(self, step: int, timeout_seconds: float = WAIT_SECONDS) -> PlannedStep:
        return self.steps.wait_plan(step, timeout_seconds)

    def plan_of(self, step: int) -> PlannedStep | None:
        """The plan of ``step`` that counts now."""
        with self.steps.lock:
            outline = self.steps._machine.outline_of(step)
        return outline.plan if outline is not None else None

    def report(self, step: int) -> None:
        self.link.report(
            step,
            jobs_pb2.RankMeasurement(rank=self.rank, step_seconds=1.0, wait_seconds=0.1, tokens=10),
        )

    def break_stream(self) -> None:
        """What it says from now on is lost, until it has another one."""
        self.link._lifeline.present().interrupt()

    def receives(self, what: Any, times: int = 1) -> None:
        """Waits until something has come."""
        eventually(lambda: self.received.count(what) >= times)


class _Link(ControlLink):
    """Reports ``progress`` in place of the steps' own."""

    def __init__(self, rank: TalkingRank, settings: rpc.RpcSettings, **options: Any) -> None:
        super().__init__(settings, **options)
        self._rank = rank

    def report_progress(self, epoch: int, steps: Sequence[jobs_pb2.StepProgress]) -> None:
        begun = [
            jobs_pb2.StepProgress(step=step, complete_ticks=ticks)
            for step, ticks in self._rank.progress.items()
        ]
        others = [progress for progress in steps if progress.step not in self._rank.progress]
        super().report_progress(epoch, [*begun, *others])


class _Steps(RankSteps):
    """Notes what comes, once it has been treated."""

    def __init__(self, rank: TalkingRank, options: SessionOptions) -> None:
        registry = CollectorRegistry()
        metrics = TrainerMetrics(registry, options.job, options.rank)
        super().__init__(
            options,
            rank.link,
            _NoServers(),
            Mock(spec=TickServer, server_id=f"{options.job}.rank-{options.rank}"),
            BufferPool(host_allocator),
            Mock(spec=Examiner),
            Mock(spec=LivenessMonitor),
            metrics,
        )
        self._received = rank.received

    def opened(self, opened: jobs_pb2.JobOpened) -> None:
        super().opened(opened)
        self._received.append("opened")

    def planned(self, planned: PlannedStep) -> None:
        super().planned(planned)
        self._received.append(("planned", planned.plan.step))

    def recover(self, epoch: int, lost: Sequence[str], why: str) -> None:
        super().recover(epoch, lost, why)
        self._received.append(("recover", list(lost)))

    def finished(self, step: int) -> None:
        super().finished(step)
        self._received.append(("finished", step))


class _NoServers(ServerLinks):
    """Of steps that never begin."""

    def __init__(self) -> None:
        pass

    def close_all(self, why: str, *, finished: bool = False) -> None:
        pass

    def connect(self, *args: Any, **options: Any) -> Mapping[str, Connection]:
        raise AssertionError("a step has begun")


def _options(
    settings: rpc.RpcSettings, spec: jobs_pb2.JobSpec, shape: AttentionShape, rank: int
) -> SessionOptions:
    return SessionOptions(
        control_plane=settings.address,
        job=spec.name,
        rank=rank,
        n_ranks=spec.n_ranks,
        n_layers=spec.n_layers,
        n_nano_batches=spec.n_nano_batches,
        shape=shape,
    )
