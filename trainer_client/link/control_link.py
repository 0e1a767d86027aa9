"""The trainer's link to the control plane: the job's lease, manifests out, plans in.

Three threads: one renews the rank's lease, one watches the job's events
(:mod:`distca.contract.lifeline`), one sends manifests and reports so that the training loop never
waits for gRPC (:mod:`distca.contract.outbox`). Training goes on while the control plane is
away; the rank comes back to its job with what a control plane that knows nothing must get.
Whatever ends the job is kept in ``failure``, and everybody who waits for the link looks at it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from distca.contract import rpc
from distca.contract.codec import first_tick_from_bytes, plan_from_proto
from distca.contract.lifeline import Lifeline
from distca.contract.outbox import Outbox
from distca.contract.server_loss import ServerLoss
from distca.contract.timeouts import default_seconds
from distca.v1 import jobs_pb2, membership_pb2
from trainer_client.errors import SessionClosed
from trainer_client.link.contact import RankContact
from trainer_client.link.planned_step import HandedInStep, PlannedStep

logger = logging.getLogger(__name__)

FLUSH_SECONDS = default_seconds("flush_seconds")
"""How long closing waits for reports that are under way."""

_STREAMS_BREAK_SECONDS = 0.5
"""The operating system closes a killed process's connections all at once, or nearly."""
_END_CHECK_SECONDS = 0.05

StepNews = (
    jobs_pb2.RankMeasurement
    | jobs_pb2.ServerMeasurement
    | jobs_pb2.StepGivenUp
    | jobs_pb2.StepWaiting
)
"""A report of a rank on a step."""
_FIELDS = {
    jobs_pb2.RankMeasurement: "rank",
    jobs_pb2.ServerMeasurement: "server",
    jobs_pb2.StepGivenUp: "given_up",
    jobs_pb2.StepWaiting: "waiting",
}
"""The fields of ReportStepRequest by what they hold."""


class RankListener(Protocol):
    """Called on the watching thread, in the order of events."""

    @property
    def epoch(self) -> int:
        """The highest seen; plans of lower ones are void."""

    @property
    def position(self) -> tuple[int, Sequence[int]]:
        """The step before which all have been begun or left out; and if it has been begun itself,
        how many ticks of each nano-batch have been sent."""

    def manifests(self) -> Sequence[HandedInStep]:
        """The manifests of unfinished steps, in order, which the control plane may have to get
        again."""

    def opened(self, opened: jobs_pb2.JobOpened) -> None:
        """The job is there; called once, before anything else."""

    def refused(self, step: int, sequence: int, why: str) -> None:
        """The control plane does not take a manifest; ``sequence``: of one without a number."""

    def planned(self, planned: PlannedStep) -> None:
        """A plan has come, perhaps again."""

    def failed(self, step: int, why: str, sequence: int) -> None:
        """A step gets no plan any more; ``sequence`` as of :class:`PlannedStep`."""

    def recover(self, epoch: int, lost: Sequence[str], why: str) -> None:
        """Plans of epochs below ``epoch`` are void, since the servers ``lost`` are gone; perhaps
        again. The rank stops, closes its connections and reports its progress."""

    def finished(self, step: int) -> None:
        """Every rank has finished ``step`` and those before."""

    def broken(self) -> None:
        """The link has ended; ``failure`` says why."""


class ControlLink:
    """One rank's membership in one job.

    Args:
        settings: how to reach the control plane; with several addresses, its standbys too.
        control_plane_timeout_seconds: how long the control plane may be away.
        in_place_load: reads the load of the rank's in-place server; None if it has none.

    Attributes:
        job_id: of the job, once it is open.
        token: what shows that this process is the rank; goes with every call. Secret.
        timeouts: of the control plane, by their names in ``distca.contract.timeouts``.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        *,
        control_plane_timeout_seconds: float = default_seconds("control_plane_timeout_seconds"),
        in_place_load: Callable[[], membership_pb2.ServerLoad | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._in_place_load = in_place_load
        self._lifeline: Lifeline[RankContact] = Lifeline(
            settings,
            first=self._join,
            again=self._come_back,
            renew=self._renew,
            on_event=self._handle,
            on_broken=self._fail,
            away_seconds=control_plane_timeout_seconds,
        )
        self._outbox = Outbox(self._lifeline)
        self._request = jobs_pb2.OpenJobRequest()
        self._listener: RankListener | None = None
        self._told: HandedInStep | None = None
        self._failure: Exception | None = None
        self._left = self._is_resuming = False
        self._opened = threading.Event()
        self.job_id = ""
        self.token = b""
        self.timeouts: Mapping[str, float] = {}

    def _renew(self, contact: RankContact) -> None:
        next_step, sent_ticks = self._present.position
        contact.renew(
            next_step=next_step, sent_ticks=sent_ticks, in_place_load=self._in_place_load()
        )

    @property
    def failure(self) -> Exception | None:
        """The error that ended the job, or None while it runs."""
        return self._failure

    @property
    def connected(self) -> bool:
        """Return whether the control plane can be reached, as far as is known."""
        return self._lifeline.contact is not None

    @property
    def away_seconds(self) -> float:
        """How long nobody makes plans for the job, as far as is known: the control plane is away,
        or is back and knows nothing yet. 0 while there is one that does."""
        if self.connected and not self._is_resuming:
            return 0.0
        return time.monotonic() - self._lifeline.lost_at

    def make_sure(self) -> None:
        """Finds out soon whether the control plane answers."""
        self._lifeline.renew_soon()

    def open(self, request: jobs_pb2.OpenJobRequest, listener: RankListener) -> None:
        """Joins the job and starts the threads; returns once the job's description is here.

        Waits while an earlier job has the name whose processes may be gone.

        Args:
            request: names the job and the rank.
            listener: receives what comes.
        """
        self._request.CopyFrom(request)
        self._listener = listener
        self._lifeline.join()
        self._lifeline.start(renewing="distca-lease")
        self._outbox.start()
        deadline = time.monotonic() + self._settings.connect_seconds
        while not self._opened.wait(0.1):
            self.check()
            if time.monotonic() > deadline:
                raise rpc.RpcError(
                    rpc.Reason.DEADLINE_EXCEEDED,
                    "WatchRank",
                    self._settings.address,
                    "the job's description did not come",
                )

    def submit(self, handed_in: HandedInStep) -> None:
        """Hands in a coming step's manifest, which the listener has among its own: where the stream
        ends, the next one begins with them. The listener receives what becomes of it."""
        contact = self._lifeline.contact
        if contact is not None:
            contact.say(hand_in=handed_in)

    def tell(self, joining: jobs_pb2.Joining) -> None:
        """Says that a forward has begun, and where the rank's round is; a later one says it all. A
        stream that begins learns the last one."""
        self._told = HandedInStep(joining=joining)
        self.submit(self._told)

    def report(self, step: int, measurement: StepNews) -> None:
        """Sends what the rank or its in-place server measured in a step, that the rank gave it up,
        or waits in it; a refusal is logged only."""
        if self._left or self._failure is not None:
            return
        request = jobs_pb2.ReportStepRequest(step=step)
        getattr(request, _FIELDS[type(measurement)]).CopyFrom(measurement)
        self._outbox.put(f"the report of step {step}", lambda contact: contact.report_step(request))

    def report_lost(self, loss: ServerLoss) -> None:
        """Reports a lost server; never blocks. The report is repeated until the control plane has
        taken it, or its epoch is over."""
        self._outbox.put(
            f"the loss of server {loss.server_id}",
            lambda contact: contact.report_lost(loss),
            over=lambda: self._present.epoch > loss.epoch,
        )

    def report_progress(self, epoch: int, steps: Sequence[jobs_pb2.StepProgress]) -> None:
        """Answers a recovery; never blocks. A stream that begins asks again."""
        contact = self._lifeline.contact
        if contact is not None:
            contact.say(progress=jobs_pb2.Progress(epoch=epoch, steps=steps))

    def fetch_step(self, step: int) -> jobs_pb2.GetStepResponse:
        """The whole plan of a recent step and what all members measured in it so far."""
        return self._lifeline.present().fetch_step(step)

    def describe_job(self) -> jobs_pb2.DescribeJobResponse:
        """The job's state.

        Raises:
            distca.contract.rpc.RpcError: the control plane is away, or fails.
        """
        return self._lifeline.present().describe_job()

    def who_is_late(self, step: int | None) -> str:
        """The reason why a step has no plan yet, in words; None: the one that is open."""
        try:
            job = self.describe_job()
        except rpc.RpcError as error:
            return f"and the control plane does not answer: {error}"
        joined = set(job.joined_ranks)
        absent = sorted(set(range(job.spec.n_ranks)) - joined)
        if absent:
            return f"ranks {absent} have not joined the job"
        for pending in job.pending_steps:
            if step in (pending.step, None):
                return f"ranks {list(pending.missing_ranks)} have not submitted their manifests"
        return "all manifests are there, so planning itself is slow: see the control plane's log"

    def await_end(self, rank: int) -> None:
        """Waits for the end of the job if another rank's process seems to be gone, and raises it.
        Returns at once, or nearly, if none does.

        Who was in a collective with that rank has an error before the control plane is sure.

        Args:
            rank: this one.
        """
        deadline = time.monotonic() + _STREAMS_BREAK_SECONDS
        is_gone = False
        while time.monotonic() < deadline:
            self.check()
            if not is_gone:
                try:
                    job = self.describe_job()
                except rpc.RpcError:
                    return
                is_gone = any(away != rank for away in job.away_ranks)
                if is_gone:
                    deadline = time.monotonic() + default_seconds("lease_seconds")
            time.sleep(_END_CHECK_SECONDS)

    def check(self) -> None:
        """Raises what ended the job, if something did."""
        if self._left:
            raise SessionClosed("the session is closed")
        if self._failure is not None:
            raise SessionClosed(str(self._failure)) from self._failure

    def close(self, error: str) -> None:
        """Leaves the job; ``error`` is why, for the other ranks; empty if all is done."""
        if self._left:
            return
        self._left = True
        if self.job_id and self._failure is None:
            self._outbox.put("leaving the job", lambda contact: self._leave(contact, error))
        self._outbox.close(FLUSH_SECONDS)
        self._lifeline.end()

    def _join(self, settings: rpc.RpcSettings) -> RankContact:
        """The first contact."""
        contact = RankContact(settings, lambda: self.token)
        try:
            self.token = contact.join(self._request)
            self.timeouts = contact.timeouts
            self.job_id = contact.job_id
            self._lifeline.who = f"job {self.job_id}"
            contact.watch()
        except BaseException:
            contact.end()
            raise
        return contact

    def _come_back(self, lease_id: str, settings: rpc.RpcSettings) -> RankContact:
        """A contact after a loss: with the lease of before, or by opening the job again."""
        contact = RankContact(settings, lambda: self.token)
        try:
            try:
                contact.keep(self.job_id, lease_id)
            except rpc.RpcError as error:
                if error.reason not in RankContact.LOST:
                    raise
                self._resume(contact)
            contact.watch()
        except BaseException:
            contact.end()
            raise
        return contact

    def _resume(self, contact: RankContact) -> None:
        """Opens the job again, at a control plane that may know nothing."""
        request = jobs_pb2.OpenJobRequest()
        request.CopyFrom(self._request)
        self._is_resuming = True
        request.resume.job_id, request.resume.epoch = self.job_id, self._present.epoch
        self.token = contact.join(request)

    @property
    def _present(self) -> RankListener:
        assert self._listener is not None
        return self._listener

    def _leave(self, contact: RankContact, error: str) -> None:
        self._lifeline.expects_end = True
        contact.leave(error)

    def _handle(self, event: jobs_pb2.PlanEvent) -> None:
        listener = self._present
        if event.WhichOneof("event") in ("step_planned", "recover"):
            self._is_resuming = False
        match event.WhichOneof("event"):
            case "job_opened":
                # A control plane that has come back to life describes the same job again.
                if not self._opened.is_set():
                    listener.opened(event.job_opened)
                    self._opened.set()
                else:
                    # Before it can ask how far the rank is.
                    for handed_in in (*listener.manifests(), self._told):
                        if handed_in is not None:
                            self.submit(handed_in)
            case "step_planned":
                listener.planned(_planned_from_proto(event.step_planned))
            case "step_failed":
                failed = event.step_failed
                listener.failed(failed.step, failed.error, failed.sequence)
            case "hand_in_refused":
                refused = event.hand_in_refused
                error = rpc.RpcError(
                    rpc.Reason.of(refused.kind), "WatchRank", self._settings.address, refused.error
                )
                why = f"the manifest was refused: {error}"
                listener.refused(refused.step, refused.sequence, why)
            case "recover":
                recover = event.recover
                listener.recover(recover.epoch, recover.lost_server_ids, recover.reason)
            case "step_finished":
                listener.finished(event.step_finished.step)
            case "job_closed":
                reason = event.job_closed.error or "every rank has left"
                self._fail(SessionClosed(f"job {self.job_id} was closed: {reason}"))

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            if not self._left:
                logger.error("job %s ended: %s", self.job_id, error)
        if self._listener is not None:
            self._listener.broken()
        self._lifeline.finish()


def _planned_from_proto(message: jobs_pb2.StepPlanned) -> PlannedStep:
    plan = plan_from_proto(message.plan)
    first_tick = first_tick_from_bytes(message.first_tick, plan.manifest.n_documents)
    return PlannedStep(plan, message.forward_only, first_tick, message.sequence)
