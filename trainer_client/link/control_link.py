"""The trainer's link to the control plane: the job's lease, manifests out, plans in.

Three threads: one renews the rank's lease, one watches the job's events
(:mod:`distca.contract.lifeline`), one sends manifests and reports so that the training loop never
waits for gRPC (:mod:`trainer_client.link.outbox`). Training goes on while the control plane is
away; the rank comes back to its job with what a control plane that knows nothing must be told.
Whatever ends the job is kept in ``failure``, and everybody who waits for the link looks at it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from core_attention.manifest import RankManifest
from distca.contract import rpc
from distca.contract.codec import first_tick_from_bytes, plan_from_proto, rank_manifest_to_proto
from distca.contract.lifeline import Lifeline
from distca.v1 import jobs_pb2
from trainer_client.errors import PlanNotReady, SessionClosed
from trainer_client.link.contact import RankContact
from trainer_client.link.outbox import CONTACT_LOST, Letter, Outbox, is_contact_lost
from trainer_client.step.step_book import HandedIn, PlannedStep, StepBook

logger = logging.getLogger(__name__)

__all__ = ["ControlLink", "PlannedStep"]

FLUSH_SECONDS = 5.0
"""How long closing waits for reports that are under way."""


StepNews = (
    jobs_pb2.RankMeasurement
    | jobs_pb2.ServerMeasurement
    | jobs_pb2.StepGivenUp
    | jobs_pb2.StepWaiting
)
"""What a rank has to tell of a step."""


class ControlLink:
    """One rank's membership in one job.

    Args:
        settings: how to reach the control plane; with several addresses, its standbys too.
        on_opened: called with the job's description before any plan.
        on_planned: called with each plan that counts, ahead of its use.
        on_recover: called with epoch, lost servers and reason when all plans of lower epochs have
            become void. The rank stops, closes its connections and returns how far it is in its
            running and retained steps.
        on_finished: called with a step that every rank has finished, as it has those before.
        on_failed: called with a step that gets no plan any more, and why.
        control_plane_timeout_seconds: how long the control plane may be away.
        held_timeout_seconds: how long opening waits for the end of an earlier job of the name.

    All callbacks are made on the watching thread, in the order of events.

    Attributes:
        job_id: of the job, once it is open.
        token: what shows that this process is the rank; goes with every call. Secret.
        timeouts: of the control plane, by their names in ``distca.contract.timeouts``.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        *,
        on_opened: Callable[[jobs_pb2.JobOpened], None],
        on_planned: Callable[[PlannedStep], None],
        on_recover: Callable[
            [int, Sequence[str], str], Sequence[jobs_pb2.StepProgress]
        ] = lambda epoch, lost, reason: (),
        on_finished: Callable[[int], None] = lambda step: None,
        on_failed: Callable[[int, str], None] = lambda step, why: None,
        control_plane_timeout_seconds: float = 600.0,
        held_timeout_seconds: float = 45.0,
    ) -> None:
        self._settings = settings
        self._lifeline: Lifeline[RankContact] = Lifeline(
            settings,
            first=self._join,
            again=self._come_back,
            renew=lambda contact: contact.renew(next_step=self._book.next_step),
            on_event=self._handle,
            on_broken=self._fail,
            away_seconds=control_plane_timeout_seconds,
            held_seconds=held_timeout_seconds,
        )
        self._outbox = Outbox(self._lifeline)
        self._on_opened = on_opened
        self._on_planned = on_planned
        self._on_recover = on_recover
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._request = jobs_pb2.OpenJobRequest()
        self._patience = self._lifeline.patience("")
        self._changed = threading.Condition()
        self._book = StepBook(0)
        self._failure: Exception | None = None
        self._left = False
        self._opened = threading.Event()
        self.job_id = ""
        self.token = b""
        self.timeouts: Mapping[str, float] = {}

    @property
    def failure(self) -> Exception | None:
        """What ended the job, or None while it runs."""
        return self._failure

    @property
    def connected(self) -> bool:
        """Whether the control plane can be reached, as far as is known."""
        return self._lifeline.contact is not None

    @property
    def epoch(self) -> int:
        """The highest epoch seen; plans of lower ones are void."""
        return self._book.epoch

    def open(self, request: jobs_pb2.OpenJobRequest) -> None:
        """Joins the job and starts the threads; returns once the job's description is here.

        Waits while an earlier job has the name whose processes may be gone.

        Raises:
            distca.contract.rpc.AlreadyExists: a job has the name that lives, or that has not
                ended in time.
            distca.contract.rpc.RpcError: the control plane cannot be reached or refuses.
        """
        self._request.CopyFrom(request)
        self._book = StepBook(request.spec.n_nano_batches)
        self._patience = self._lifeline.patience(f"rank {request.rank} of job {request.spec.name}")
        self._lifeline.join(again=(rpc.ControlPlaneUnavailable, rpc.RateLimited))
        self._lifeline.start(renewing="distca-lease")
        self._outbox.start()
        deadline = time.monotonic() + self._settings.connect_seconds
        while not self._opened.wait(0.1):
            self.check()
            if time.monotonic() > deadline:
                raise rpc.DeadlineExceeded(
                    "WatchRank", self._settings.address, "the job's description did not come"
                )

    def submit(self, manifest: RankManifest, *, forward_only: bool) -> None:
        """Hands in a coming step's manifest; a refusal is raised by :meth:`wait_plan`."""
        self.check()
        step = manifest.step
        handed_in = HandedIn(rank_manifest_to_proto(manifest), forward_only)
        with self._changed:
            self._book.hand_in(step, handed_in)
        self._outbox.put(
            Letter(
                f"the manifest of step {step}",
                lambda contact: self._submit(contact, step, handed_in),
            )
        )

    def report(
        self,
        step: int,
        measurement: StepNews,
    ) -> None:
        """Sends what the rank or its in-place server measured in a step, that the rank gave it up,
        or waits in it; a refusal is logged only."""
        if self._left:
            return
        request = jobs_pb2.ReportStepRequest(step=step)
        match measurement:
            case jobs_pb2.RankMeasurement():
                request.rank.CopyFrom(measurement)
            case jobs_pb2.ServerMeasurement():
                request.server.CopyFrom(measurement)
            case jobs_pb2.StepGivenUp():
                request.given_up.CopyFrom(measurement)
            case jobs_pb2.StepWaiting():
                request.waiting.CopyFrom(measurement)
        self._outbox.put(
            Letter(f"the report of step {step}", lambda contact: contact.report_step(request))
        )

    def report_lost(self, server_id: str, epoch: int, cause: str) -> None:
        """Tells that a server was lost in the plans of ``epoch``; never blocks. It is told until
        the control plane has taken it, or the epoch is over."""
        self._outbox.put(
            Letter(
                f"the loss of server {server_id}",
                lambda contact: contact.report_lost(server_id, epoch, cause),
                over=lambda: self._book.is_over(epoch),
            )
        )

    def fetch_step(self, step: int) -> jobs_pb2.GetStepResponse:
        """The whole plan of a recent step and what all members measured in it so far.

        Raises:
            distca.contract.rpc.UnknownStep: it is not planned yet, or forgotten.
            distca.contract.rpc.RpcError: the control plane is away, or fails.
        """
        return self._lifeline.present().fetch_step(step)

    def plan_of(self, step: int) -> PlannedStep | None:
        """The plan of ``step`` that counts now; None if there is none."""
        with self._changed:
            return self._book.plan_of(step)

    def is_finished(self, step: int) -> bool:
        """Whether every rank that has not left has finished ``step`` and those before."""
        return self._book.is_finished(step)

    def wait_plan(self, step: int, timeout_seconds: float) -> PlannedStep:
        """The plan of ``step``, which begins; earlier steps that have not begun are left out.

        Time in which the control plane is away does not count.

        Raises:
            PlanNotReady: the manifest was not submitted or was refused, no plan can be made, or
                ``timeout_seconds`` passed; then the message names the ranks that are late.
            SessionClosed: the job ended.
        """
        remaining_seconds = timeout_seconds
        self.check()
        with self._changed:
            if not self._book.is_known(step):
                raise PlanNotReady(f"step {step}: submit its manifest before running it")
            while remaining_seconds > 0:
                self.check()
                refusal = self._book.take_refusal(step)
                if refusal is not None:
                    raise PlanNotReady(f"step {step}: {refusal}")
                planned = self._book.plan_of(step)
                if planned is not None:
                    self._book.begin(step)
                    return planned
                present, began = self.connected, time.monotonic()
                self._changed.wait(min(0.5, remaining_seconds))
                if present:
                    remaining_seconds -= time.monotonic() - began
            self.check()
            taken = self._book.is_taken(step)
        if not taken:
            raise PlanNotReady(f"step {step}: the manifest was not taken in {timeout_seconds:g} s")
        raise PlanNotReady(
            f"step {step}: no plan in {timeout_seconds:g} s; {self._who_is_late(step)}"
        )

    def check(self) -> None:
        """Raises what ended the job, if something did."""
        if self._left:
            raise SessionClosed("the session is closed")
        if self._failure is not None:
            raise SessionClosed(str(self._failure)) from self._failure

    def close(self, error: str) -> None:
        """Leaves the job; ``error`` tells the other ranks why, empty if all is done."""
        if self._left:
            return
        self._left = True
        if self.job_id and self._failure is None:
            self._outbox.put(Letter("leaving the job", lambda contact: self._leave(contact, error)))
        self._outbox.close(FLUSH_SECONDS)
        self._lifeline.end()

    def _join(self, settings: rpc.RpcSettings) -> RankContact:
        """The first contact."""
        contact = RankContact(settings, lambda: self.token)
        try:
            self.token = self._patience.ask(
                lambda waited: contact.join(self._request, waited_seconds=waited)
            )
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
            except CONTACT_LOST:
                self._resume(contact)
            contact.watch()
        except BaseException:
            contact.end()
            raise
        return contact

    def _resume(self, contact: RankContact) -> None:
        """Opens the job again, and tells a control plane that may know nothing the steps."""
        request = jobs_pb2.OpenJobRequest()
        request.CopyFrom(self._request)
        with self._changed:
            request.resume.job_id, request.resume.epoch = self.job_id, self._book.epoch
        self.token = contact.join(request)
        with self._changed:
            handed_in = self._book.handed_in()
        for step, item in handed_in:
            self._submit(contact, step, item)

    def _submit(self, contact: RankContact, step: int, handed_in: HandedIn) -> None:
        try:
            contact.submit(handed_in)
        except rpc.RpcError as error:
            if is_contact_lost(error):
                raise
            with self._changed:
                self._book.refuse(step, f"the manifest was refused: {error}")
                self._changed.notify_all()
            return
        with self._changed:
            self._book.manifest_taken(step)

    def _leave(self, contact: RankContact, error: str) -> None:
        self._lifeline.expects_end = True
        contact.leave(error)

    def _handle(self, event: jobs_pb2.PlanEvent) -> None:
        match event.WhichOneof("event"):
            case "job_opened":
                if not self._opened.is_set():
                    self._on_opened(event.job_opened)
                    self._opened.set()
            case "step_planned":
                self._planned(event.step_planned)
            case "step_failed":
                with self._changed:
                    self._book.refuse(event.step_failed.step, event.step_failed.error)
                    self._changed.notify_all()
                self._on_failed(event.step_failed.step, event.step_failed.error)
            case "recover":
                self._recover(event.recover)
            case "step_finished":
                with self._changed:
                    self._book.finish(event.step_finished.step)
                self._on_finished(event.step_finished.step)
            case "job_closed":
                reason = event.job_closed.error or "every rank has left"
                self._fail(SessionClosed(f"job {self.job_id} was closed: {reason}"))

    def _planned(self, message: jobs_pb2.StepPlanned) -> None:
        plan = plan_from_proto(message.plan)
        planned = PlannedStep(
            plan,
            message.forward_only,
            first_tick_from_bytes(message.first_tick, plan.manifest.n_documents),
        )
        with self._changed:
            if not self._book.counts(planned):
                return
        # First, since whoever waits begins the step at once. No other thread changes what counts.
        self._on_planned(planned)
        with self._changed:
            self._book.plan(planned)
            self._changed.notify_all()

    def _recover(self, message: jobs_pb2.Recover) -> None:
        epoch = message.epoch
        with self._changed:
            if self._book.is_over(epoch):
                return
            answer = self._book.reported if epoch == self._book.epoch else None
            if answer is None:
                self._book.recover(epoch)
        if answer is None:
            logger.warning("job %s: recovery %d: %s", self.job_id, epoch, message.reason)
            listed = self._on_recover(epoch, list(message.lost_server_ids), message.reason)
            with self._changed:
                answer = self._book.answer(listed)
        self._outbox.put(
            Letter(
                f"the progress for recovery {epoch}",
                lambda contact: contact.report_progress(epoch, answer),
                over=lambda: self._book.is_over(epoch),
            )
        )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
                if not self._left:
                    logger.error("job %s ended: %s", self.job_id, error)
            self._changed.notify_all()
        self._lifeline.finish()

    def _who_is_late(self, step: int) -> str:
        try:
            job = self._lifeline.present().describe_job()
        except rpc.RpcError as error:
            return f"and the control plane does not answer: {error}"
        joined = set(job.joined_ranks)
        absent = sorted(set(range(job.spec.n_ranks)) - joined)
        if absent:
            return f"ranks {absent} have not joined the job"
        for pending in job.pending_steps:
            if pending.step == step:
                return f"ranks {list(pending.missing_ranks)} have not submitted their manifests"
        return "all manifests are there, so planning itself is slow: see the control plane's log"
