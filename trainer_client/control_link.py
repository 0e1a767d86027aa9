"""The trainer's link to the control plane: the job's lease, manifests out, plans in.

Three threads: one renews the rank's lease, one watches the job's events, one sends manifests and
reports so that the training loop never waits for gRPC. Whatever ends the job is kept in
``failure``, and everybody who waits for the link looks at it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from core_attention.manifest import RankManifest
from core_attention.plan import Plan
from distca import rpc
from distca.codec import plan_from_proto, rank_manifest_to_proto
from distca.v1 import jobs_pb2, jobs_pb2_grpc
from trainer_client.errors import PlanNotReady, SessionClosed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step's plan as this rank needs it."""

    plan: Plan
    forward_only: bool


class ControlLink:
    """One rank's membership in one job.

    Args:
        settings: how to reach the control plane.
        on_opened: called with the job's description before any plan.
        on_planned: called with each plan on the watching thread, ahead of its use.

    Attributes:
        job_id: of the job, once it is open.
        token: what shows that this process is the rank; goes with every call. Secret.
    """

    def __init__(
        self,
        settings: rpc.RpcSettings,
        *,
        on_opened: Callable[[jobs_pb2.JobOpened], None],
        on_planned: Callable[[PlannedStep], None],
    ) -> None:
        self._settings = settings
        self._on_opened = on_opened
        self._on_planned = on_planned
        self._channel: grpc.Channel = rpc.open_channel(settings, token=lambda: self.token)
        self._jobs = jobs_pb2_grpc.JobsStub(self._channel)
        self._changed = threading.Condition()
        self._planned: dict[int, PlannedStep] = {}
        self._unplannable: dict[int, str] = {}
        self._submitted: dict[int, Future[object]] = {}
        self._first_wanted = 0
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._outbox = ThreadPoolExecutor(max_workers=1, thread_name_prefix="distca-outbox")
        self._threads: list[threading.Thread] = []
        self._events: rpc.EventStream | None = None
        self.job_id = ""
        self.token = b""
        self._lease_id = ""

    @property
    def failure(self) -> Exception | None:
        """What ended the job, or None while it runs."""
        return self._failure

    def open(self, request: jobs_pb2.OpenJobRequest) -> None:
        """Joins the job and starts the threads; returns once the job's description is here.

        Raises:
            distca.rpc.RpcError: the control plane cannot be reached or refuses.
        """
        rpc.wait_until_ready(self._channel, self._settings)
        response = self._jobs.OpenJob(request)
        self.job_id, self._lease_id = response.job_id, response.rank_lease_id
        self.token = response.token
        self._events = self._jobs.WatchRank(
            jobs_pb2.WatchRankRequest(job_id=self.job_id, rank_lease_id=self._lease_id)
        )
        opened = threading.Event()
        for name, target in (
            ("distca-watch", lambda: self._watch(opened)),
            ("distca-lease", lambda: self._renew(response.lease_seconds)),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        deadline = time.monotonic() + self._settings.connect_seconds
        while not opened.wait(0.1):
            self.check()
            if time.monotonic() > deadline:
                raise rpc.DeadlineExceeded(
                    "WatchRank", self._settings.address, "the job's description did not come"
                )

    def submit(self, manifest: RankManifest, *, forward_only: bool) -> None:
        """Hands in a coming step's manifest; a refusal is raised by :meth:`wait_plan`."""
        self.check()
        request = jobs_pb2.SubmitManifestRequest(
            job_id=self.job_id,
            rank_lease_id=self._lease_id,
            manifest=rank_manifest_to_proto(manifest),
            forward_only=forward_only,
        )
        self._submitted[manifest.step] = self._outbox.submit(self._jobs.SubmitManifest, request)

    def report(
        self, step: int, measurement: jobs_pb2.RankMeasurement | jobs_pb2.ServerMeasurement
    ) -> None:
        """Sends what the rank or its in-place server measured in a step; a failure is logged
        only."""
        if self._closing.is_set():
            return
        request = jobs_pb2.ReportStepRequest(job_id=self.job_id, step=step, lease_id=self._lease_id)
        if isinstance(measurement, jobs_pb2.RankMeasurement):
            request.rank.CopyFrom(measurement)
        else:
            request.server.CopyFrom(measurement)
        future: Future[object] = self._outbox.submit(self._jobs.ReportStep, request)
        future.add_done_callback(rpc.log_lost_report)

    def fetch_step(self, step: int) -> jobs_pb2.GetStepResponse:
        """The whole plan of a recent step and what all members measured in it so far.

        Raises:
            distca.rpc.UnknownStep: it is not planned yet, or forgotten.
        """
        request = jobs_pb2.GetStepRequest(job_id=self.job_id, step=step)
        response: jobs_pb2.GetStepResponse = self._jobs.GetStep(request)
        return response

    def wait_plan(self, step: int, timeout_seconds: float) -> PlannedStep:
        """The plan of ``step``, taken out of the link; earlier steps are forgotten.

        Raises:
            PlanNotReady: the manifest was not submitted or was refused, no plan can be made, or
                ``timeout_seconds`` passed; then the message names the ranks that are late.
            SessionClosed: the job ended.
        """
        submitted = self._submitted.get(step)
        if submitted is None:
            raise PlanNotReady(f"step {step}: submit its manifest before running it")
        deadline = time.monotonic() + timeout_seconds
        try:
            submitted.result(timeout=timeout_seconds)
        except TimeoutError as error:
            raise PlanNotReady(
                f"step {step}: the manifest was not taken in {timeout_seconds:g} s"
            ) from error
        except (rpc.RpcError, CancelledError) as error:
            self._submitted.pop(step, None)
            self.check()
            raise PlanNotReady(f"step {step}: the manifest was refused: {error}") from error
        with self._changed:
            while step not in self._planned:
                self.check()
                if step in self._unplannable:
                    self._submitted.pop(step, None)
                    raise PlanNotReady(f"step {step}: {self._unplannable.pop(step)}")
                if not self._changed.wait(min(0.5, max(deadline - time.monotonic(), 0.0))):
                    self.check()
                    if time.monotonic() >= deadline:
                        break
            else:
                return self._take(step)
        raise PlanNotReady(
            f"step {step}: no plan in {timeout_seconds:g} s; {self._who_is_late(step)}"
        )

    def _take(self, step: int) -> PlannedStep:
        """Takes out a plan and drops what is known of steps up to it, whose plans may still come
        again or late. Needs the lock."""
        planned = self._planned[step]
        self._first_wanted = step + 1
        for known in (self._planned, self._unplannable, self._submitted):
            for number in [number for number in known if number <= step]:
                del known[number]
        return planned

    def check(self) -> None:
        """Raises what ended the job, if something did."""
        if self._closing.is_set():
            raise SessionClosed("the session is closed")
        if self._failure is not None:
            raise SessionClosed(str(self._failure)) from self._failure

    def close(self, error: str) -> None:
        """Leaves the job; ``error`` tells the other ranks why, empty if all is done."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._outbox.shutdown(wait=True, cancel_futures=True)
        if self.job_id and self._failure is None:
            try:
                self._jobs.CloseJob(
                    jobs_pb2.CloseJobRequest(
                        job_id=self.job_id, rank_lease_id=self._lease_id, error=error
                    )
                )
            except rpc.RpcError as failure:
                logger.warning("leaving job %s: %s", self.job_id, failure)
        if self._events is not None:
            self._events.cancel()
        self._channel.close()
        for thread in self._threads:
            thread.join(2.0)

    def _watch(self, opened: threading.Event) -> None:
        assert self._events is not None
        try:
            for event in self._events:
                self._handle(event)
                if event.WhichOneof("event") == "job_opened":
                    opened.set()
            if not self._closing.is_set():
                self._fail(SessionClosed(f"job {self.job_id}: its event stream ended"))
        except Exception as error:
            # Whatever breaks this thread would leave the training loop waiting: hand it over.
            if not self._closing.is_set():
                self._fail(error)

    def _handle(self, event: jobs_pb2.PlanEvent) -> None:
        match event.WhichOneof("event"):
            case "job_opened":
                self._on_opened(event.job_opened)
            case "step_planned":
                planned = PlannedStep(
                    plan_from_proto(event.step_planned.plan), event.step_planned.forward_only
                )
                self._on_planned(planned)
                with self._changed:
                    if planned.plan.step >= self._first_wanted:
                        self._planned[planned.plan.step] = planned
                    self._changed.notify_all()
            case "step_failed":
                with self._changed:
                    self._unplannable[event.step_failed.step] = event.step_failed.error
                    self._changed.notify_all()
            case "job_closed":
                reason = event.job_closed.error or "every rank has left"
                self._fail(SessionClosed(f"job {self.job_id} was closed: {reason}"))

    def _renew(self, lease_seconds: float) -> None:
        while not self._closing.wait(lease_seconds / 3):
            request = jobs_pb2.RenewRankRequest(job_id=self.job_id, rank_lease_id=self._lease_id)
            try:
                lease_seconds = self._jobs.RenewRank(request).lease_seconds
            except rpc.RpcError as error:
                if not self._closing.is_set():
                    self._fail(error)
                return

    def _fail(self, error: Exception) -> None:
        if self._closing.is_set():
            return
        with self._changed:
            if self._failure is None:
                self._failure = error
                logger.error("job %s ended: %s", self.job_id, error)
            self._changed.notify_all()

    def _who_is_late(self, step: int) -> str:
        try:
            job = self._jobs.DescribeJob(jobs_pb2.DescribeJobRequest(job_id=self.job_id))
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
