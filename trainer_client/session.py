"""A session: one rank's part in one job, from joining it to leaving it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch

from attention_node.executor import KernelCall
from attention_node.hello import PROTOCOL_VERSION
from attention_node.metrics import NodeMetrics
from attention_node.served_job import StepBusy
from attention_node.tick_server import Host
from core_attention.manifest import RankManifest
from core_attention.plan import PlanServer
from data_plane.buffer_pool import BufferPool
from data_plane.liveness import LivenessMonitor
from data_plane.metrics import DataPlaneMetrics
from data_plane.transports import open_transport
from distca import __version__
from distca.contract import rpc
from distca.contract.codec import pipelining_to_proto, profile_to_proto, shape_to_proto
from distca.contract.identity import in_place_server_id
from distca.contract.settings import ClientTls, values_of
from distca.contract.timeouts import check_order, known_timeouts
from distca.process import tracing
from distca.process.certificates import watch_certificates
from distca.process.monitoring import MetricsEndpoint, process_registry
from distca.v1 import data_plane_pb2, jobs_pb2, membership_pb2
from trainer_client.errors import SessionError
from trainer_client.hooks.checkpointing import forget_step
from trainer_client.hooks.collectives import HostMeetings
from trainer_client.link.control_link import ControlLink
from trainer_client.link.own_transport import transport_of
from trainer_client.link.planned_step import PlannedStep
from trainer_client.metrics import TickWait, TrainerMetrics
from trainer_client.options import Placement, SessionOptions
from trainer_client.step.examiner import Examiner
from trainer_client.step.in_place import InPlaceServer
from trainer_client.step.lane import current_step
from trainer_client.step.rank_steps import WAITING_SECONDS, RankSteps
from trainer_client.step.running_step import RunningStep
from trainer_client.step.servers import ServerLinks
from trainer_client.step.step_report import StepReport, lengths

logger = logging.getLogger(__name__)

_SERVING_CHECK_SECONDS = 1e-3
_REPORTS = 8
_DEVICE_SECONDS = 1.0
"""How long to wait for the GPU to finish a step that the host thread has already left."""


class _ServerHost(Host):
    """The session, as the server in its process calls it."""

    def __init__(self, link: ControlLink, server_id: str) -> None:
        self._link = link
        self._server_id = server_id

    def step_finished(self, busy: StepBusy) -> None:
        """See ``Host``."""
        self._link.report(
            busy.step,
            jobs_pb2.ServerMeasurement(
                server_id=self._server_id,
                forward_busy_seconds=busy.forward_seconds,
                backward_busy_seconds=busy.backward_seconds,
                backward_layers=busy.backward_layers,
            ),
        )


class Session:
    """One rank's membership in a job; open it with :meth:`open`, use it as a context manager.

    Not thread-safe: one training loop drives it. Its own threads renew the lease, receive plans
    and run the in-place server.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self._process = os.getpid()
        self.metrics_registry = process_registry("trainer")
        watch_certificates(
            self.metrics_registry, own=[options.certificate_file], authorities=[options.ca_file]
        )
        self._device = torch.device(options.device)
        # A GPU computes behind the thread that launches its work.
        self._runs_ahead = self._device.type == "cuda"
        # First, since it reads the TLS files: the transport starts a thread.
        control_plane = rpc.RpcSettings(
            address=options.control_plane,
            connect_seconds=options.start_timeout_seconds,
            **values_of(ClientTls, options),
        )
        self._link = ControlLink(
            control_plane,
            control_plane_timeout_seconds=options.control_plane_timeout_seconds,
            in_place_load=lambda: self._in_place.load(),
        )
        self._pool = BufferPool.on_device(self._device)
        self._metrics = TrainerMetrics(self.metrics_registry, options.job, options.rank)
        self._data_metrics = DataPlaneMetrics(
            self.metrics_registry,
            floor_bytes_per_second=options.min_gigabytes_per_second * 1e9,
        )
        self._data_metrics.watch_pool("messages", self._pool)
        self._endpoint: MetricsEndpoint | None = None
        self._transport = open_transport(
            transport_of(options, control_plane),
            device=options.device,
            one_host=options.one_host,
            data_host=options.data_host,
            metrics=self._data_metrics,
        )
        self._servers = ServerLinks(
            self._transport,
            options,
            self._make_hello,
            lambda: self._link.token,
        )
        self._examiner = Examiner(options, self._metrics, self._link.report_lost)
        self._liveness = LivenessMonitor(
            quiet_seconds=options.ping_quiet_seconds,
            ping_timeout_seconds=options.ping_timeout_seconds,
        )
        self._meetings: HostMeetings | None = None
        self._running: RunningStep | None = None
        self._handed_in: set[int] = set()
        self._submits = False
        self._last_step = -1
        self._entered: int | None = None
        self._open: set[int] = set()
        self._unreported: dict[int, RunningStep] = {}
        self.reports: deque[StepReport] = deque(maxlen=_REPORTS)
        """Those of the last steps that have ended, oldest first."""
        self._closed = False
        try:
            self._in_place = self._make_server()
        except BaseException:
            self._transport.close()
            self._liveness.close()
            raise
        self._steps = self._make_steps()

    def _make_steps(self) -> RankSteps:
        return RankSteps(
            self.options,
            self._link,
            self._servers,
            self._in_place.ticks,
            self._pool,
            self._examiner,
            self._liveness,
            self._metrics,
        )

    def _make_server(self) -> InPlaceServer:
        options = self.options
        server_id = in_place_server_id(options.job, options.rank)
        return InPlaceServer(
            server_id,
            options.rank,
            options.tick_shape,
            options.windows,
            self._device,
            self._pool,
            _ServerHost(self._link, server_id),
            standby=options.placement is Placement.POOL,
            profile_dir=options.profile_dir,
            metrics=NodeMetrics(self.metrics_registry, server_id),
            moved_bytes=lambda: self._data_metrics.moved_bytes,
            stalled_seconds=lambda: self._transport.stalled_seconds,
            on_call=self._kernel_called,
        )

    @classmethod
    def open(cls, options: SessionOptions) -> Session:
        """Joins the job; returns at once, whether or not the other ranks have joined.

        A job of the name of which a process is gone, such as before a restart, makes place; one
        that lives keeps its name, unless ``options.replace`` ends it.

        Raises:
            distca.contract.rpc.RpcError: the control plane cannot be reached, or refuses: another
                job has the name, and lives (ALREADY_EXISTS).
        """
        session = cls(options)
        try:
            session._join()
        except BaseException:
            session.close("the rank could not join")
            raise
        return session

    @property
    def job_id(self) -> str:
        return self._link.job_id

    @property
    def next_step(self) -> int:
        """The number after the last step begun or submitted; 0 at first."""
        return max(self._handed_in | {self._last_step}) + 1

    def submit(self, manifest: RankManifest, *, forward_only: bool = False) -> None:
        """Hands in what this rank holds in a coming step; returns at once.

        Submit some steps ahead: the plan is then made and delivered while earlier steps run.

        Args:
            manifest: of this rank.
            forward_only: the step has no backward pass (evaluation).
        """
        self._check_process()
        if manifest.rank != self.options.rank:
            raise ValueError(
                f"the manifest is of rank {manifest.rank}, the session of {self.options.rank}"
            )
        if manifest.n_nano_batches != self.options.n_nano_batches:
            raise ValueError(
                f"the manifest of step {manifest.step} has {manifest.n_nano_batches} "
                f"nano-batches; the job has {self.options.n_nano_batches}"
            )
        if manifest.step <= self._last_step:
            raise ValueError(
                f"the manifest is of step {manifest.step}, and step {self._last_step} has begun; "
                "steps run once each, in increasing order"
            )
        self._submits = True
        self._steps.submit(manifest, forward_only=forward_only)
        self._handed_in.add(manifest.step)

    @contextmanager
    def step(self, step: int) -> Iterator[RunningStep]:
        """Runs a step: forward and, unless it was submitted as forward-only, backward.

        Steps run in increasing order; one that was submitted may be left out.

        Raises:
            PlanNotReady: its plan did not come before ``plan_timeout_seconds``; it may be run
                again, unless the message says that it has no plan.
            SessionClosed: the job ended; also in the place of another RuntimeError, such as that of
                a collective, if a rank's process is gone.
        """
        self._check_process()
        if self._entered is not None:
            raise SessionError(
                f"step {step} is begun inside step {self._entered}, which others wait for; "
                "evaluate after it, or under torch.no_grad outside of any step"
            )
        if step <= self._last_step:
            raise SessionError(
                f"step {step} comes after step {self._last_step}; steps run once each, in "
                "increasing order: if it has not run, submit its documents again, as step "
                f"{self.next_step}"
            )
        running = self.begin(step)
        token = current_step.set(running)
        self._entered = step
        why = ""
        try:
            yield running
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self.await_cause(error)
            raise
        finally:
            current_step.reset(token)
            self._entered = None
            self.end(running, why)
            # A step that failed may have left the device with work that never ends.
            self.report_ended(_DEVICE_SECONDS if running.complete else 0.0)
        running.check_ended()

    def await_cause(self, error: BaseException) -> None:
        """Raises SessionClosed in the place of an error of a collective whose other end is gone."""
        if isinstance(error, RuntimeError) and not isinstance(error, SessionError):
            self._link.await_end(self.options.rank)

    def begin(self, step: int) -> RunningStep:
        """Begins a step, which may run beside others that are open, each in nano-batches of its
        own; :meth:`end` ends it. Later steps must come later."""
        return self._begin(lambda seconds: self._steps.wait_plan(step, seconds))

    def join(self, manifest: RankManifest, joining: jobs_pb2.Joining, *, forward_only: bool) -> int:
        """Hands in what this rank holds in a coming step that the control plane numbers: it joins
        the step that is open then. Returns which hand-in it is.

        Args:
            manifest: of this rank; its number does not count.
            joining: says in how many nano-batches its documents are, from the first on, whether the
                forward has begun, where the rank's round is, and in which places it has steps open;
                at most one hand-in is ahead of its forward.
            forward_only: the step has no backward pass.
        """
        self._check_process()
        return self._steps.join(manifest, joining, forward_only=forward_only)

    def tell(self, joining: jobs_pb2.Joining) -> None:
        """Says that the forward of a hand-in has begun, or one without rows, and where the rank's
        round is."""
        self._steps.tell(joining)

    def begin_joined(self, sequence: int) -> RunningStep:
        """As :meth:`begin`, for the step that a hand-in has joined. Hand-ins before it that got a
        plan are left out; servers do not wait for them."""

        def wait(seconds: float) -> PlannedStep:
            planned = self._steps.wait_joined(sequence, seconds)
            self.skip_before(sequence)
            return planned

        return self._begin(wait)

    def skip_before(self, sequence: int) -> None:
        """Leaves out the hand-ins before ``sequence`` that have got a plan and were not begun."""
        for planned in self._steps.void_before(sequence):
            running = self._begin(lambda _, planned=planned: planned)  # type: ignore[misc]
            self.stop(running)
            self.end(running)

    def _begin(self, wait: Callable[[float], PlannedStep]) -> RunningStep:
        began = time.perf_counter()
        planned = wait(self.options.plan_timeout_seconds)
        plan_wait_seconds = time.perf_counter() - began
        self._metrics.plan_waited_for(plan_wait_seconds)
        self._last_step = max(self._last_step, planned.plan.step)
        self._handed_in = {number for number in self._handed_in if number > self._last_step}
        running = self._running = self._steps.begin(planned)
        running.plan_wait_seconds = plan_wait_seconds
        self._open.add(running.step)
        return running

    def stop(self, running: RunningStep) -> None:
        """No more is computed of an open step, as when its graph is gone, and servers expect
        no more of it. Call :meth:`end` then."""
        self._steps.stop(running)
        running.stopped = True

    def end(self, running: RunningStep, why: str = "") -> None:
        """Ends an open step. On a GPU, returns once this process's server owes nothing of it.

        Args:
            running: the step.
            why: the error that it ends with; empty if there is none.
        """
        if self._running is running:
            self._running = None
        self._open.discard(running.step)
        self._steps.end(running, why or running.given_up or running.unfinished)
        forget_step(running)
        running.seconds = time.perf_counter() - running.began_seconds
        self._unreported[running.step] = running
        if self._runs_ahead and running.complete:
            # What the loop does next may hold up the device, and with it whoever is served.
            # Steps before it may be open here and elsewhere: nobody waits for those.
            step = running.step
            self._await_end(self._last_step, lambda: self._in_place.ticks.is_serving(step, step))

    def report_ended(self, device_seconds: float | None = None) -> None:
        """Reports steps that have ended, in order: not those after a step that is open.

        Args:
            device_seconds: how long a GPU may take to come to the end of one; None: steps that it
                has not come to are left for a later call, as long as few are.
        """
        before = min(self._open, default=self._last_step + 1)
        for step in sorted(step for step in self._unreported if step < before):
            running = self._unreported[step]
            is_late = step < self._last_step - self.options.n_nano_batches
            is_over = all(wait.ended.query() for wait in running.device_waits[-1:])
            if device_seconds is None and not (is_late or is_over):
                return
            self._report(self._unreported.pop(step), device_seconds or 0.0)

    def fetch_step(self, step: int) -> jobs_pb2.GetStepResponse:
        """The whole plan of a recent step and what all members measured in it so far.

        Raises:
            distca.contract.rpc.RpcError: it is not planned yet, or forgotten.
        """
        return self._link.fetch_step(step)

    def last_step(self) -> jobs_pb2.StepStatus | None:
        """The latest step that every rank has reported; None before the first, and while no
        control plane answers."""
        try:
            job = self._link.describe_job()
        except rpc.RpcError:
            return None
        return job.last_step if job.HasField("last_step") else None

    def close(self, error: str = "") -> None:
        """Leaves the job and ends the session's threads. Idempotent; does nothing in a fork of the
        process that opened it, whose session goes on.

        Without an error, the rank first serves the others to the end of the last step that it has
        run itself, and sends them again what they may lose, for at most ``tick_timeout_seconds``.

        Args:
            error: why, for the other ranks' messages; empty when training is done.
        """
        if self._closed or self._is_fork():
            return
        self._closed = True
        try:
            if not error:
                self.report_ended(_DEVICE_SECONDS)
                self._serve_to_the_end()
        finally:
            self._leave(error)

    def _is_fork(self) -> bool:
        """Returns whether this process inherited the session: without its threads, and gRPC's locks
        as they happened to be."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._is_fork():
            raise SessionError(
                f"the session belongs to process {self._process}, and this is its fork "
                f"{os.getpid()}; let forks, such as workers of a DataLoader, make batches alone"
            )

    def _leave(self, error: str) -> None:
        self._examiner.close()
        if self._meetings is not None:
            self._meetings.close()
        self._link.close(error)
        self._steps.close()
        why = f"the session failed: {error}" if error else "the session is closed"
        self._servers.close_all(why, finished=not error)
        self._in_place.close()
        self._transport.close()
        self._liveness.close()
        self._pool.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(f"{kind.__name__}: {error}" if kind else "")

    def _join(self) -> None:
        options = self.options
        if options.metrics_port is not None:
            self._endpoint = MetricsEndpoint(
                options.metrics_host,
                options.metrics_port,
                self.metrics_registry,
            )
            logger.info("metrics of rank %d on port %d", options.rank, self._endpoint.port)
        request = jobs_pb2.OpenJobRequest(
            replace=options.replace,
            spec=jobs_pb2.JobSpec(
                name=options.job,
                n_ranks=options.n_ranks,
                n_layers=options.layer_ticks,
                n_nano_batches=options.n_nano_batches,
                head_groups=options.head_groups,
                windows=options.windows,
                shape=shape_to_proto(options.tick_shape),
                placement=f"PLACEMENT_{options.placement.name}",
                tolerance=options.tolerance,
                planner=options.planner,
                min_forward_tokens=options.min_forward_tokens,
                min_backward_tokens=options.min_backward_tokens,
                softmax_scale=options.scale,
                transport=self._transport.name,
                pipelining=(
                    pipelining_to_proto(options.pipelining) if options.pipelining else None
                ),
            ),
            rank=options.rank,
            host=socket.gethostname(),
            tensor_parallel_ranks=options.tensor_parallel_ranks,
        )
        if options.checksums is not None:
            request.spec.checksums = options.checksums
        address = self._transport.listen(
            options.data_host, options.data_port, self._in_place.ticks.accept
        )
        profile = self._in_place.profile
        request.in_place_server.CopyFrom(
            membership_pb2.ServerDescription(
                server_id=self._in_place.ticks.server_id,
                data_address=str(address),
                host=socket.gethostname(),
                device=self._in_place.device_name,
                profiles=[profile_to_proto(profile)] if profile else [],
                version=__version__,
                transport=self._transport.name,
            )
        )
        self._link.open(request, self._steps)
        check_order({**known_timeouts(options), **self._link.timeouts})
        logger.info("rank %d joined job %s as %s", options.rank, options.job, self.job_id)
        if self._runs_ahead:
            self._meetings = HostMeetings(
                self.job_id, options.n_ranks, self._link.check, options.collective_timeout_seconds
            )
            self._meetings.open()

    def _serve_to_the_end(self) -> None:
        # Of steps that it submits the rank may not have run the last ones, as others have not. Of
        # those that it joins it runs all; others run more, without it, and need its server.
        last = self._last_step if self._submits else self._steps.first_unknown - 1
        self._await_end(
            last, lambda: self._in_place.ticks.is_serving(last) or self._steps.may_be_asked(last)
        )

    def _await_end(self, last: int, is_needed: Callable[[], bool]) -> None:
        """Waits while other ranks need this process to end steps up to ``last``."""
        idle_since = time.monotonic()
        deadline = idle_since + self.options.tick_timeout_seconds
        while is_needed():
            if self._link.failure is not None or self._steps.is_finished(last):
                return
            if self._in_place.ticks.open_ticks or self._steps.may_be_asked(last):
                idle_since = time.monotonic()
            elif self._link.away_seconds and time.monotonic() > idle_since + WAITING_SECONDS:
                # Others have gone home, and could not say so.
                return
            if time.monotonic() > deadline:
                logger.warning("other ranks' part of step %d is unfinished", last)
                return
            time.sleep(_SERVING_CHECK_SECONDS)

    def _report(self, running: RunningStep, device_seconds: float) -> None:
        waits = self._waits_of(running, device_seconds)
        exposed_seconds: float | None = running.wait_seconds
        if self._runs_ahead:
            known = waits is not None
            exposed_seconds = sum(each.exposed_seconds for each in waits or ()) if known else None
        running.report = StepReport(
            step=running.step,
            tokens=sum(running.n_rows(n) for n in range(self.options.n_nano_batches)),
            step_seconds=running.seconds,
            plan_wait_seconds=running.plan_wait_seconds,
            wait_seconds=running.wait_seconds,
            exposed_seconds=exposed_seconds,
            send_seconds=running.send_seconds,
            sent_bytes=running.sent_bytes,
            received_bytes=running.received_bytes,
            recoveries=running.recoveries,
            replayed_ticks=running.replayed_ticks,
            recovery_seconds=running.recovery_seconds,
            trace=running.trace,
        )
        self.reports.append(running.report)
        tracing.record(
            "distca.step",
            self.job_id,
            running.step,
            began_at=running.began_seconds,
            ended_at=running.began_seconds + running.seconds,
            error="" if running.complete else "the step was not run to its end",
            rank=self.options.rank,
            wait_seconds=running.wait_seconds,
            send_seconds=running.send_seconds,
            plan_wait_seconds=running.plan_wait_seconds,
        )
        self._metrics.step_ended(
            complete=running.complete,
            tokens=running.report.tokens,
            seconds=running.seconds,
            send_seconds=running.send_seconds,
            exposed_seconds=exposed_seconds,
            waits=waits or (),
        )
        if not running.complete:
            return
        if not running.stopped:
            self._metrics.tasks_served(running.served_tasks())
        self._link.report(
            running.step,
            jobs_pb2.RankMeasurement(
                rank=self.options.rank,
                step_seconds=running.seconds,
                wait_seconds=exposed_seconds,
                tokens=running.report.tokens,
            ),
        )

    def _waits_of(self, running: RunningStep, seconds: float) -> Sequence[TickWait] | None:
        """Returns how long the step's ticks held up the rank; None if a GPU does not report it in
        time."""
        return lengths(running.device_waits, seconds) if self._runs_ahead else running.waits

    def _make_hello(self, server: PlanServer, first_step: int, epoch: int) -> bytes:
        return data_plane_pb2.Hello(
            version=PROTOCOL_VERSION,
            job_id=self.job_id,
            rank=self.options.rank,
            server_id=server.server_id,
            first_step=first_step,
            epoch=epoch,
        ).SerializeToString()

    def _kernel_called(self, call: KernelCall) -> None:
        running = self._running
        if running is not None:
            running.record(
                "in-place server", "kernel", call.begin_seconds, call.end_seconds, str(call.phase)
            )
