"""The trainer's link to the control plane: the job's lease, manifests out, plans in.

Three threads: one renews the rank's lease, one watches the job's events, one sends manifests and
reports so that the training loop never waits for gRPC. Training goes on while the control plane is
away: the watching thread looks for it, at all its addresses, and comes back to the job with what a
control plane that knows nothing must be told. Whatever ends the job is kept in ``failure``, and
everybody who waits for the link looks at it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core_attention.manifest import RankManifest
from distca import rpc
from distca.codec import first_tick_from_bytes, plan_from_proto, rank_manifest_to_proto
from distca.reconnect import Addresses, is_transient, reach
from distca.v1 import jobs_pb2
from trainer_client.contact import RankContact
from trainer_client.errors import PlanNotReady, SessionClosed
from trainer_client.step_book import HandedIn, PlannedStep, StepBook

logger = logging.getLogger(__name__)

__all__ = ["ControlLink", "PlannedStep"]

FLUSH_SECONDS = 5.0
"""How long closing waits for reports that are under way."""

_CONTACT_LOST = (rpc.LeaseExpired, rpc.UnknownJob)
"""Beside what is transient: the control plane has restarted, or took this rank for dead."""


@dataclass(frozen=True)
class _Letter:
    """Something to tell the control plane, again and again until it is taken.

    Attributes:
        what: for the log.
        send: tells it once.
        over: whether nobody needs to know any more.
    """

    what: str
    send: Callable[[RankContact], None]
    over: Callable[[], bool] = lambda: False


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

    All callbacks are made on the watching thread, in the order of events.

    Attributes:
        job_id: of the job, once it is open.
        token: what shows that this process is the rank; goes with every call. Secret.
        timeouts: of the control plane, by their names in ``distca.timeouts``.
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
    ) -> None:
        self._settings = settings
        self._addresses = Addresses(settings)
        self._on_opened = on_opened
        self._on_planned = on_planned
        self._on_recover = on_recover
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._timeout_seconds = control_plane_timeout_seconds
        self._request = jobs_pb2.OpenJobRequest()
        self._changed = threading.Condition()
        self._book = StepBook(0)
        self._contact: RankContact | None = None
        self._failure: Exception | None = None
        self._left = False
        self._gone = threading.Event()
        self._closing = threading.Event()
        self._opened = threading.Event()
        self._letters: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
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
        return self._contact is not None

    @property
    def _is_over(self) -> bool:
        """Whether no control plane is needed any more."""
        return self._closing.is_set() or self._failure is not None or self._gone.is_set()

    @property
    def epoch(self) -> int:
        """The highest epoch seen; plans of lower ones are void."""
        return self._book.epoch

    def open(self, request: jobs_pb2.OpenJobRequest) -> None:
        """Joins the job and starts the threads; returns once the job's description is here.

        Raises:
            distca.rpc.RpcError: the control plane cannot be reached or refuses.
        """
        self._request.CopyFrom(request)
        self._book = StepBook(request.spec.n_nano_batches)
        deadline = time.monotonic() + self._settings.connect_seconds
        self._contact = reach(
            self._join,
            self._addresses,
            timeout_seconds=self._settings.connect_seconds,
            giving_up=self._closing,
            again=lambda error: isinstance(error, rpc.ControlPlaneUnavailable | rpc.RateLimited),
        )
        for name, target in (
            ("distca-watch", self._watch),
            ("distca-lease", self._renew),
            ("distca-outbox", self._send_letters),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
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
        self._letters.put(
            _Letter(
                f"the manifest of step {step}",
                lambda contact: self._submit(contact, step, handed_in),
            )
        )

    def report(
        self, step: int, measurement: jobs_pb2.RankMeasurement | jobs_pb2.ServerMeasurement
    ) -> None:
        """Sends what the rank or its in-place server measured in a step; a refusal is logged
        only."""
        if self._left:
            return
        request = jobs_pb2.ReportStepRequest(step=step)
        if isinstance(measurement, jobs_pb2.RankMeasurement):
            request.rank.CopyFrom(measurement)
        else:
            request.server.CopyFrom(measurement)
        self._letters.put(
            _Letter(f"the report of step {step}", lambda contact: contact.report_step(request))
        )

    def report_lost(self, server_id: str, epoch: int, cause: str) -> None:
        """Tells that a server was lost in the plans of ``epoch``; never blocks. It is told until
        the control plane has taken it, or the epoch is over."""
        self._letters.put(
            _Letter(
                f"the loss of server {server_id}",
                lambda contact: contact.report_lost(server_id, epoch, cause),
                over=lambda: self._book.is_over(epoch),
            )
        )

    def fetch_step(self, step: int) -> jobs_pb2.GetStepResponse:
        """The whole plan of a recent step and what all members measured in it so far.

        Raises:
            distca.rpc.UnknownStep: it is not planned yet, or forgotten.
            distca.rpc.RpcError: the control plane is away, or fails.
        """
        return self._present_contact().fetch_step(step)

    def plan_of(self, step: int) -> PlannedStep | None:
        """The plan of ``step`` that counts now; None if there is none."""
        with self._changed:
            return self._book.plan_of(step)

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
                present, began = self._contact is not None, time.monotonic()
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
            self._letters.put(
                _Letter("leaving the job", lambda contact: self._leave(contact, error))
            )
        self._letters.put(None)
        for thread in self._threads:
            if thread.name == "distca-outbox":
                thread.join(FLUSH_SECONDS)
        self._closing.set()
        with self._changed:
            contact, self._contact = self._contact, None
            self._changed.notify_all()
        if contact is not None:
            contact.end()
        for thread in self._threads:
            thread.join(2.0)

    # Contact

    def _join(self, settings: rpc.RpcSettings) -> RankContact:
        """The first contact."""
        contact = RankContact(settings, lambda: self.token)
        try:
            self.token = contact.join(self._request)
            self.timeouts = contact.timeouts
            self.job_id = contact.job_id
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
            except _CONTACT_LOST:
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
            if _lost_contact(error):
                raise
            with self._changed:
                self._book.refuse(step, f"the manifest was refused: {error}")
                self._changed.notify_all()
            return
        with self._changed:
            self._book.manifest_taken(step)

    def _leave(self, contact: RankContact, error: str) -> None:
        # Before the call, since it ends the stream of events.
        self._gone.set()
        try:
            contact.leave(error)
        except rpc.RpcError:
            self._gone.clear()
            raise

    def _let_go(self, contact: RankContact, error: Exception) -> None:
        """The control plane is away; the watching thread looks for it."""
        with self._changed:
            if self._contact is not contact:
                return
            self._contact = None
            self._changed.notify_all()
        if not self._closing.is_set():
            logger.warning(
                "job %s: lost the control plane at %s, training goes on: %s",
                self.job_id,
                contact.address,
                error,
            )
        contact.interrupt()

    def _present_contact(self) -> RankContact:
        contact = self._contact
        if contact is None:
            raise rpc.ControlPlaneUnavailable(
                "contact", str(self._addresses), "it is away, and looked for"
            )
        return contact

    def _await_contact(self) -> RankContact | None:
        """The contact, once there is one; None when the link is closed or the job ended."""
        with self._changed:
            while self._contact is None:
                if self._closing.is_set() or self._failure is not None:
                    return None
                self._changed.wait(0.5)
            return self._contact

    # The watching thread

    def _watch(self) -> None:
        contact = self._contact
        try:
            while contact is not None:
                self._follow(contact)
                contact.end()
                if self._is_over:
                    return
                contact = self._look_for_it(contact.lease_id)
        except Exception as error:
            # Whatever breaks this thread would leave the training loop waiting: hand it over.
            self._fail(error)

    def _look_for_it(self, lease_id: str) -> RankContact | None:
        """A new contact, with lease ``lease_id`` if that still runs; None if the link closes."""
        began = time.monotonic()
        try:
            contact = reach(
                lambda settings: self._come_back(lease_id, settings),
                self._addresses,
                timeout_seconds=self._timeout_seconds,
                giving_up=self._closing,
                again=lambda error: is_transient(error) or type(error) is rpc.RpcError,
            )
        except rpc.ControlPlaneUnavailable as error:
            raise SessionClosed(
                f"the control plane has been away for {self._timeout_seconds:g} s: {error}"
            ) from error
        with self._changed:
            if self._closing.is_set():
                contact.end()
                return None
            self._contact = contact
            self._changed.notify_all()
        logger.info(
            "job %s: back at the control plane at %s after %.1f s%s",
            self.job_id,
            contact.address,
            time.monotonic() - began,
            "" if contact.lease_id == lease_id else ", under a new lease",
        )
        return contact

    def _follow(self, contact: RankContact) -> None:
        """Handles events until the stream ends."""
        assert contact.events is not None
        try:
            for event in contact.events:
                self._handle(event)
                if self._failure is not None:
                    return
            if not self._is_over:
                self._let_go(contact, SessionClosed("it ended the stream of events"))
        except rpc.RpcError as error:
            self._let_go(contact, error)

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
        self._letters.put(
            _Letter(
                f"the progress for recovery {epoch}",
                lambda contact: contact.report_progress(epoch, answer),
                over=lambda: self._book.is_over(epoch),
            )
        )

    # The other threads

    def _renew(self) -> None:
        while (contact := self._await_contact()) is not None:
            if self._is_replaced(contact):
                continue
            try:
                contact.renew()
            except rpc.RpcError as error:
                self._let_go(contact, error)

    def _is_replaced(self, contact: RankContact) -> bool:
        """Waits until the lease is to be renewed; whether another contact has come meanwhile."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._contact is not contact, contact.renewal_seconds
            )

    def _send_letters(self) -> None:
        while (letter := self._letters.get()) is not None:
            self._deliver(letter)

    def _deliver(self, letter: _Letter) -> None:
        while not letter.over():
            contact = self._await_contact()
            if contact is None:
                return
            try:
                letter.send(contact)
                return
            except rpc.RpcError as error:
                if not _lost_contact(error):
                    logger.warning("job %s: %s was refused: %s", self.job_id, letter.what, error)
                    return
                self._let_go(contact, error)
                self._closing.wait(0.1)

    def _fail(self, error: Exception) -> None:
        if self._closing.is_set():
            return
        with self._changed:
            if self._failure is None:
                self._failure = error
                if not self._left:
                    logger.error("job %s ended: %s", self.job_id, error)
            self._changed.notify_all()

    def _who_is_late(self, step: int) -> str:
        try:
            job = self._present_contact().describe_job()
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


def _lost_contact(error: rpc.RpcError) -> bool:
    """Whether to find the control plane again and repeat the call, rather than give it up."""
    return is_transient(error) or isinstance(error, _CONTACT_LOST)
