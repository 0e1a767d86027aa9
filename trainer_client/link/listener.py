"""What receives what a rank's link to the control plane brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distca.v1 import jobs_pb2
from trainer_client.link.planned_step import HandedInStep, PlannedStep


class RankListener(Protocol):
    """Called on the watching thread, in the order of events; for manifests, on the sending one."""

    @property
    def epoch(self) -> int:
        """The highest seen; plans of lower ones are void."""

    @property
    def position(self) -> tuple[int, Sequence[int]]:
        """The step before which all have been begun or left out; and if it has been begun itself,
        how many ticks of each nano-batch have been sent."""

    def manifests(self) -> Sequence[tuple[int, HandedInStep]]:
        """Of unfinished steps, in order: what the control plane may have to be sent again."""

    def opened(self, opened: jobs_pb2.JobOpened) -> None:
        """The job is there; called once, before anything else."""

    def manifest_taken(self, step: int) -> None:
        """The control plane has the manifest of ``step``."""

    def manifest_refused(self, step: int, why: str) -> None:
        """The control plane does not take the manifest of ``step``."""

    def planned(self, planned: PlannedStep) -> None:
        """A plan has come, perhaps again."""

    def failed(self, step: int, why: str) -> None:
        """A step gets no plan any more."""

    def recover(self, epoch: int, lost: Sequence[str], why: str) -> None:
        """Plans of epochs below ``epoch`` are void, since the servers ``lost`` are gone; perhaps
        again. The rank stops, closes its connections and reports its progress."""

    def finished(self, step: int) -> None:
        """Every rank has finished ``step`` and those before."""

    def broken(self) -> None:
        """The link has ended; ``failure`` says why."""
