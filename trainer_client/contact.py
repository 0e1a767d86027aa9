"""One contact of a rank with a control plane: a channel, a lease, and a stream of events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from distca import rpc
from distca.v1 import jobs_pb2, jobs_pb2_grpc
from trainer_client.step_book import HandedIn


class Contact:
    """A control plane that answers, from reaching it to losing it.

    Args:
        settings: how to reach it.
        token: gives the rank's token, which goes with every call.

    Attributes:
        address: ``host:port`` of the control plane.
        job_id, lease_id, lease_seconds: of the rank.
        events: the job's events, once watched.

    Raises:
        distca.rpc.ControlPlaneUnavailable: nobody answers.
    """

    def __init__(self, settings: rpc.RpcSettings, token: Callable[[], bytes]) -> None:
        self.address = settings.address
        self.job_id = ""
        self.lease_id = ""
        self.lease_seconds = 0.0
        self.events: rpc.EventStream | None = None
        self._channel: grpc.Channel = rpc.open_channel(settings, token)
        self._jobs = jobs_pb2_grpc.JobsStub(self._channel)
        try:
            rpc.wait_until_ready(self._channel, settings)
        except BaseException:
            self._channel.close()
            raise

    def join(self, request: jobs_pb2.OpenJobRequest) -> bytes:
        """Opens the job, for the first time or to come back to it; returns the rank's token."""
        response = self.call("OpenJob", request)
        self.job_id, self.lease_id = response.job_id, response.rank_lease_id
        self.lease_seconds = response.lease_seconds
        return bytes(response.token)

    def keep(self, job_id: str, lease_id: str) -> None:
        """Goes on with the lease of an earlier contact, if the control plane still knows it."""
        self.job_id, self.lease_id = job_id, lease_id
        self.renew()

    def renew(self) -> None:
        """Renews the lease; a call that takes longer than a third of it is of no use."""
        self.lease_seconds = self.call(
            "RenewRank",
            jobs_pb2.RenewRankRequest(job_id=self.job_id, rank_lease_id=self.lease_id),
            timeout_seconds=self.lease_seconds / 3 or None,
        ).lease_seconds

    def submit(self, handed_in: HandedIn) -> None:
        """Hands in a manifest."""
        self.call(
            "SubmitManifest",
            jobs_pb2.SubmitManifestRequest(
                job_id=self.job_id,
                rank_lease_id=self.lease_id,
                manifest=handed_in.manifest,
                forward_only=handed_in.forward_only,
            ),
        )

    def watch(self) -> None:
        """Begins the stream of events."""
        self.events = self._jobs.WatchRank(
            jobs_pb2.WatchRankRequest(job_id=self.job_id, rank_lease_id=self.lease_id)
        )

    def report_step(self, request: jobs_pb2.ReportStepRequest) -> None:
        """Tells what was measured; fills in job and lease."""
        request.job_id, request.lease_id = self.job_id, self.lease_id
        self.call("ReportStep", request)

    def report_lost(self, server_id: str, epoch: int, cause: str) -> None:
        """Tells that a server is lost."""
        self.call(
            "ReportServerLost",
            jobs_pb2.ReportServerLostRequest(
                job_id=self.job_id,
                rank_lease_id=self.lease_id,
                server_id=server_id,
                epoch=epoch,
                cause=cause,
            ),
        )

    def report_progress(self, epoch: int, steps: Sequence[jobs_pb2.StepProgress]) -> None:
        """Answers a recovery."""
        self.call(
            "ReportProgress",
            jobs_pb2.ReportProgressRequest(
                job_id=self.job_id, rank_lease_id=self.lease_id, epoch=epoch, steps=steps
            ),
        )

    def leave(self, error: str) -> None:
        """Leaves the job."""
        self.call(
            "CloseJob",
            jobs_pb2.CloseJobRequest(job_id=self.job_id, rank_lease_id=self.lease_id, error=error),
        )

    def call(self, method: str, request: Any, *, timeout_seconds: float | None = None) -> Any:
        """Makes a call of the Jobs service.

        Raises:
            distca.rpc.RpcError: it failed; Cancelled if the contact has ended.
        """
        try:
            return getattr(self._jobs, method)(request, timeout=timeout_seconds)
        except ValueError as error:
            # gRPC says so of a channel that another thread has closed meanwhile.
            raise rpc.Cancelled(method, self.address, str(error)) from error

    def interrupt(self) -> None:
        """Ends the stream of events; the thread that reads it goes on with what is next."""
        if self.events is not None:
            self.events.cancel()

    def end(self) -> None:
        """Ends everything."""
        self.interrupt()
        self._channel.close()
