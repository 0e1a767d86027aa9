"""One contact of a rank with a control plane: what it says and asks there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from distca.contract import rpc
from distca.contract.contact import Contact
from distca.contract.server_loss import ServerLoss, cause_to_proto
from distca.contract.timeouts import default_seconds
from distca.v1 import jobs_pb2, membership_pb2
from trainer_client.link.planned_step import HandedInStep

FETCH_SECONDS = default_seconds("fetch_seconds")
"""The training loop waits for what it only shows."""


class RankContact(Contact):
    """A control plane that a rank has reached; every call raises ``distca.contract.rpc.RpcError``.

    Attributes:
        job_id: of the rank's job, once it has joined.
        timeouts: of the control plane, by their names in ``distca.contract.timeouts``.
    """

    LOST = frozenset({rpc.Reason.LEASE_EXPIRED, rpc.Reason.FENCED, rpc.Reason.UNKNOWN_JOB})

    job_id = ""
    timeouts: Mapping[str, float] = MappingProxyType({})

    def __init__(self, settings: rpc.RpcSettings, token: Callable[[], bytes] = lambda: b"") -> None:
        self._said: SimpleQueue[jobs_pb2.WatchRankRequest | None] = SimpleQueue()
        super().__init__(settings, token)

    def pool_transports(self) -> list[str]:
        """The transports that the pool's servers use, each once."""
        answer = self.call(self._jobs.DescribePool, jobs_pb2.DescribePoolRequest())
        return list(answer.transports)

    def join(self, request: jobs_pb2.OpenJobRequest) -> bytes:
        """Opens the job, for the first time or to come back to it; returns the rank's token."""
        response = self.call(self._jobs.OpenJob, request)
        self.job_id, self.lease_id = response.job_id, response.rank_lease_id
        self.lease_seconds = response.lease_seconds
        self.timeouts = {
            "lease_seconds": response.lease_seconds,
            "stall_seconds": response.stall_seconds,
            "answer_seconds": response.answer_seconds,
        }
        return bytes(response.token)

    def keep(self, job_id: str, lease_id: str) -> None:
        """Goes on with the lease of an earlier contact, if the control plane still knows it."""
        self.job_id, self.lease_id = job_id, lease_id
        self.renew()

    def renew(
        self,
        *,
        next_step: int = 0,
        sent_ticks: Sequence[int] = (),
        in_place_load: membership_pb2.ServerLoad | None = None,
    ) -> None:
        """Renews the lease, and says that the rank has left the steps before ``next_step`` behind,
        how many ticks it has sent of each nano-batch of that one, and the load of its in-place
        server."""
        self.lease_seconds = self.call(
            self._jobs.RenewRank,
            self._own(
                jobs_pb2.RenewRankRequest(
                    next_step=next_step, sent_ticks=sent_ticks, in_place_load=in_place_load
                )
            ),
            timeout_seconds=self.renewal_deadline_seconds,
        ).lease_seconds

    def watch(self) -> None:
        """Begins the stream of events, which takes what the rank says."""
        self.say()
        self.events = self._jobs.WatchRank(iter(self._said.get, None))

    def say(
        self, *, hand_in: HandedInStep | None = None, progress: jobs_pb2.Progress | None = None
    ) -> None:
        """Says something on the stream, in order; returns at once. Where that has ended it is lost,
        and the next one begins with it."""
        self._said.put(self._own(jobs_pb2.WatchRankRequest(hand_in=hand_in, progress=progress)))

    def interrupt(self) -> None:
        """As of the base; ends the thread of gRPC that waits for something to say."""
        self._said.put(None)
        super().interrupt()

    def report_step(self, request: jobs_pb2.ReportStepRequest) -> None:
        """Reports what was measured; fills in job and lease."""
        request.job_id, request.lease_id = self.job_id, self.lease_id
        self.call(self._jobs.ReportStep, request)

    def report_lost(self, loss: ServerLoss) -> None:
        """Reports a lost server."""
        request = jobs_pb2.ReportServerLostRequest(
            server_id=loss.server_id,
            epoch=loss.epoch,
            detail=loss.detail,
            cause=cause_to_proto(loss.cause),
        )
        self.call(self._jobs.ReportServerLost, self._own(request))

    def leave(self, error: str) -> None:
        """Leaves the job."""
        self.call(self._jobs.CloseJob, self._own(jobs_pb2.CloseJobRequest(error=error)))

    def fetch_step(self, step: int) -> jobs_pb2.GetStepResponse:
        """The plan of a step and what was measured in it."""
        request = jobs_pb2.GetStepRequest(job_id=self.job_id, step=step)
        response: jobs_pb2.GetStepResponse = self.call(
            self._jobs.GetStep, request, timeout_seconds=FETCH_SECONDS
        )
        return response

    def describe_job(self) -> jobs_pb2.DescribeJobResponse:
        """The job's state."""
        request = jobs_pb2.DescribeJobRequest(job_id=self.job_id)
        response: jobs_pb2.DescribeJobResponse = self.call(
            self._jobs.DescribeJob, request, timeout_seconds=FETCH_SECONDS
        )
        return response

    def _own(self, request: Any) -> Any:
        """A request with the rank's job and lease filled in."""
        request.job_id, request.rank_lease_id = self.job_id, self.lease_id
        return request
