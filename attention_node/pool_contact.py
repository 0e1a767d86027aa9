"""One contact of a pool server with a control plane: what it says and asks there."""

from __future__ import annotations

from distca.contract import rpc
from distca.contract.contact import Contact
from distca.v1 import jobs_pb2, membership_pb2


class PoolContact(Contact):
    """A control plane that a server has reached; calls raise ``distca.contract.rpc.RpcError``."""

    LOST = (rpc.LeaseExpired, rpc.Fenced)

    def register(
        self, description: membership_pb2.ServerDescription, *, waited_seconds: float
    ) -> None:
        """Joins the pool, under a new lease, after waiting for the server's name so long."""
        response = self.call(
            self._membership.RegisterServer,
            membership_pb2.RegisterServerRequest(server=description, waited_seconds=waited_seconds),
        )
        self.lease_id, self.lease_seconds = response.lease_id, response.lease_seconds

    def keep(self, lease_id: str, load: membership_pb2.ServerLoad) -> None:
        """Goes on with the lease of an earlier contact, if the control plane still knows it."""
        self.lease_id = lease_id
        self.beat(load)

    def beat(self, load: membership_pb2.ServerLoad) -> bool:
        """Renews the lease; returns whether the server is to drain."""
        response = self.call(
            self._membership.Heartbeat,
            membership_pb2.HeartbeatRequest(lease_id=self.lease_id, load=load),
            timeout_seconds=self.renewal_deadline_seconds,
        )
        self.lease_seconds = response.lease_seconds
        return bool(response.draining)

    def watch(self) -> None:
        """Begins the stream of events."""
        self.events = self._jobs.WatchServer(jobs_pb2.WatchServerRequest(lease_id=self.lease_id))

    def report_step(self, job_id: str, step: int, measured: jobs_pb2.ServerMeasurement) -> None:
        """Tells what was measured."""
        self.call(
            self._jobs.ReportStep,
            jobs_pb2.ReportStepRequest(
                job_id=job_id, step=step, lease_id=self.lease_id, server=measured
            ),
        )

    def report_rank_lost(self, job_id: str, rank: int) -> None:
        """Tells that the connection to a rank was reset."""
        self.call(
            self._membership.ReportRankLost,
            membership_pb2.ReportRankLostRequest(lease_id=self.lease_id, job_id=job_id, rank=rank),
        )

    def drain(self, server_id: str) -> None:
        """Asks for no more plans."""
        self.call(
            self._membership.DrainServer,
            membership_pb2.DrainServerRequest(server_id=server_id, lease_id=self.lease_id),
        )

    def deregister(self) -> None:
        """Ends the lease."""
        self.call(
            self._membership.DeregisterServer,
            membership_pb2.DeregisterServerRequest(lease_id=self.lease_id),
        )
