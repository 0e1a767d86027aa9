"""The node's process: builds the parts, serves until it is stopped, closes.

A node ends in one of three ways: SIGTERM, SIGINT or an operator's drain let planned steps finish
and exit with 0, or 130 after SIGINT; losing the control plane raises
:class:`attention_node.pool_link.PoolLinkLost`.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import threading
import time
from types import FrameType

import psutil
import torch

from attention_node.announced_jobs import AnnouncedJobs
from attention_node.executor import Executor
from attention_node.load_meter import LoadMeter
from attention_node.metrics import NodeMetrics
from attention_node.plan_threads import PlanThreads
from attention_node.pool_link import PoolLink, PoolLinkLost
from attention_node.rehearsal import rehearse
from attention_node.served_job import JobDescription, StepBusy
from attention_node.settings import NodeSettings
from attention_node.tick_server import Host, TickServer
from core_attention.cost_model import CostProfile
from core_attention.kernels.select import select_kernel
from core_attention.profiling import load_or_measure
from core_attention.shape import AttentionShape
from core_attention.whole_file import write_whole
from data_plane.buffer_pool import BufferPool
from data_plane.metrics import DataPlaneMetrics
from data_plane.owner_thread import SWITCH_INTERVAL_SECONDS
from data_plane.transport import Address
from data_plane.transports import open_transport
from distca import __version__
from distca.contract import rpc
from distca.contract.codec import first_tick_from_bytes, plan_from_proto, profile_to_proto
from distca.contract.settings import ClientTls, values_of
from distca.contract.timeouts import default_seconds
from distca.errors import DistcaError
from distca.machine_errors import using
from distca.process.certificates import watch_certificates
from distca.process.interrupt import heeded
from distca.process.memory import keep_returning_memory
from distca.process.monitoring import Health, MetricsEndpoint, process_registry
from distca.v1 import jobs_pb2, membership_pb2

logger = logging.getLogger(__name__)

QUIET_SECONDS = 0.5
"""How long a draining node must be idle: a plan made just before may still come."""

UNSERVED_SECONDS = default_seconds("unserved_seconds")
"""How long a draining node without a control plane waits for a rank, which may be about to connect
again."""


def run(settings: NodeSettings) -> None:
    """Serves until SIGTERM, SIGINT, a drain, or the loss of the control plane."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    keep_returning_memory()
    node = AttentionNode(settings)
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not node.joined:  # there is nothing to drain, and joining may wait for long
            raise SystemExit(128 + number)
        came.append(number)
        node.stop()

    for number in heeded(signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        node.start()
        node.wait()
    finally:
        node.close()
    if came[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt


class AttentionNode(Host):
    """A pool server: executor, data plane, health, metrics and membership.

    Attributes:
        joined: whether it has become a member.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._stopping = threading.Event()
        self._lost: PoolLinkLost | None = None
        self.joined = False
        device = torch.device(settings.device)
        kernel = select_kernel(device)
        for shape in settings.profile_shapes:
            kernel.check(shape, shape.rule)
        self._kernel, self._device = kernel, device
        self._profiles: list[CostProfile] = []
        self._registry = registry = process_registry("attention-node")
        watch_certificates(
            registry, own=[settings.certificate_file], authorities=[settings.ca_file]
        )
        self._metrics = NodeMetrics(registry, settings.server_id)
        data_metrics = DataPlaneMetrics(registry)
        self._pool = BufferPool.on_device(device, settings.buffer_limit_bytes or None)
        data_metrics.watch_pool("messages", self._pool)
        self._executor = Executor(kernel, device, on_call=self._metrics.kernel_called)
        self._ticks = TickServer(
            settings.server_id,
            self._executor,
            self._pool,
            self,
            self._metrics,
            reply_deadline_seconds=settings.reply_timeout_seconds,
        )
        self._meter = LoadMeter(
            self._executor, self._ticks, self._pool, lambda: data_metrics.moved_bytes
        )
        self._transport = open_transport(
            settings.transport,
            device=settings.device,
            one_host=settings.one_host,
            data_host=settings.rows_host,
            metrics=data_metrics,
        )
        self._endpoint: MetricsEndpoint | None = None
        self._membership: PoolLink | None = None
        self._announced = AnnouncedJobs()
        self._plans = PlanThreads(self._break)
        self._serves = False

    def start(self) -> None:
        """Listens, measures its cost profiles, then registers: a server that cannot be reached is
        not announced. Health checks meanwhile say that it lives and does not serve yet."""
        settings = self._settings
        data_address = self._transport.listen(
            settings.rows_host, settings.data_port, self._ticks.accept
        )
        self._endpoint = MetricsEndpoint(
            settings.data_host,
            settings.metrics_port,
            self._registry,
            health=Health(serves=lambda: self._serves),
        )
        self._profiles = [self._measure(shape) for shape in settings.profile_shapes]
        self._membership = PoolLink(
            rpc.RpcSettings(
                address=settings.control_plane,
                connect_seconds=settings.connect_seconds,
                **values_of(ClientTls, settings),
            ),
            self._describe(data_address),
            load=self._meter.read,
            lost_ranks=lambda: self._ticks.lost_ranks,
            on_event=self._handle,
            on_registered=lambda: self._announced.registered(now=time.monotonic()),
            on_fenced=lambda: self._ticks.close("the control plane has fenced the server"),
            on_drain=self.stop,
            on_lost=self._lose,
            away_seconds=settings.control_plane_timeout_seconds,
            replace=settings.replace,
        )
        self._membership.join()
        self.joined = True
        self._serves = True
        self._write_addresses(
            {
                "server_id": settings.server_id,
                "data": str(data_address),
                "metrics": str(Address(settings.data_host, self._endpoint.port)),
            }
        )

    def stop(self) -> None:
        """Makes :meth:`wait` return once planned steps are done; safe in a signal handler."""
        self._stopping.set()

    def wait(self) -> None:
        """Blocks until the node is to end, then lets planned steps finish."""
        while not self._stopping.wait(1.0):
            self._check_executor()
            self._drop_forgotten_jobs()
        if self._lost is not None:
            raise self._lost
        self._serves = False
        if self._membership is not None:
            self._membership.drain()
        unfinished = self._wait_until_drained(time.monotonic() + self._settings.drain_seconds)
        if unfinished:
            logger.warning("leaving with steps unfinished: %s", unfinished)
        else:
            logger.info("drained")

    def close(self) -> None:
        """Leaves the pool and ends everything. Idempotent."""
        self._serves = False
        if self._membership is not None:
            self._membership.leave()
        self._ticks.close()
        self._executor.close()
        self._transport.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _check_executor(self) -> None:
        seconds = self._executor.oldest_ready_seconds
        if seconds > self._settings.stuck_seconds:
            raise DistcaError(
                f"the executor has finished none of its work for {seconds:.0f} s, stuck_seconds is "
                f"{self._settings.stuck_seconds:g}: the device hangs or is too slow"
            )

    def _drop_forgotten_jobs(self) -> None:
        for job_id in self._announced.forgotten(self._ticks.job_ids, now=time.monotonic()):
            self._ticks.close_job(job_id, "the control plane does not know it any more")

    def _wait_until_drained(self, deadline: float) -> str:
        """Waits until nothing has been left to do for a while, since a plan may still be under way,
        or nobody has been there to do it for; returns why steps are unfinished, or nothing."""
        busy_at = served_at = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if not (self._plans.idle and self._ticks.idle):
                busy_at = now
            elif now - busy_at > QUIET_SECONDS:
                return ""
            is_member = self._membership is not None and self._membership.connected
            if self._ticks.has_ranks or is_member:
                served_at = now
            elif now - served_at > UNSERVED_SECONDS:
                return (
                    "neither a rank nor the control plane has been there for "
                    f"{UNSERVED_SECONDS:g} s"
                )
            time.sleep(0.05)
        return f"drain_seconds, {self._settings.drain_seconds:g}, have passed"

    def _measure(self, shape: AttentionShape) -> CostProfile:
        kernel, device = self._kernel, self._device
        kernel.warm_up(shape, shape.rule)
        rehearse(kernel, shape, device)
        folder = self._settings.profile_dir
        with using("profile_dir", folder):
            return load_or_measure(folder, kernel, shape, device)

    def _describe(self, data_address: Address) -> membership_pb2.ServerDescription:
        return membership_pb2.ServerDescription(
            server_id=self._settings.server_id,
            data_address=str(data_address),
            host=socket.gethostname(),
            device=self._profiles[0].device,
            memory_bytes=_memory_bytes(torch.device(self._settings.device)),
            capacity_rows=self._settings.planned_rows,
            profiles=[profile_to_proto(profile) for profile in self._profiles],
            version=__version__,
            transport=self._transport.name,
        )

    def _handle(self, event: jobs_pb2.PlanEvent) -> None:
        match event.WhichOneof("event"):
            case "job_opened":
                self._announced.opened(event.job_opened.job_id, event.job_opened.owner)
                self._ticks.open_job(JobDescription.from_proto(event.job_opened))
            case "step_planned":
                planned = event.step_planned
                owner = self._announced.owner(planned.plan.job_id)
                self._plans.add(owner, lambda: self._add_plan(planned))
            case "recover":
                self._ticks.recover(event.recover.job_id, event.recover.epoch)
            case "job_closed":
                self._ticks.close_job(event.job_closed.job_id, event.job_closed.error)

    def _add_plan(self, planned: jobs_pb2.StepPlanned) -> None:
        plan = plan_from_proto(planned.plan)
        self._ticks.add_plan(
            planned.plan.job_id,
            plan,
            forward_only=planned.forward_only,
            first_tick=first_tick_from_bytes(planned.first_tick, plan.manifest.n_documents),
        )

    def step_finished(self, busy: StepBusy) -> None:
        """See :class:`Host`."""
        if self._membership is not None:
            self._membership.report(busy)

    def rank_lost(self, job_id: str, rank: int) -> None:
        """See :class:`Host`."""
        if self._membership is not None:
            self._membership.report_rank_lost(job_id, rank)

    def _break(self, error: Exception) -> None:
        if self._membership is not None:
            self._membership.broken(error)

    def _lose(self, error: PoolLinkLost) -> None:
        self._lost = error
        self._stopping.set()

    def _write_addresses(self, addresses: dict[str, str]) -> None:
        path = self._settings.address_file
        logger.info("serving: %s", addresses)
        if path is not None:
            with using("address_file", path):
                write_whole(path, json.dumps(addresses))


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)
