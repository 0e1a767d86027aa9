"""The control plane process: build, serve, stop. :func:`run` is its one entry point."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc

from control_plane.access.access import AccessInterceptor, Gate
from control_plane.access.calls_in_flight import CallsInFlight
from control_plane.access.connections import Connections
from control_plane.access.fair_threads import FairThreads
from control_plane.access.job_keys import job_keys
from control_plane.access.rate_limit import RateLimit
from control_plane.cold_start.planner import ColdPlanner, PlannerState
from control_plane.errors import RefusedError
from control_plane.jobs.coordinator import Coordinator
from control_plane.leadership.epochs import next_generation
from control_plane.leadership.kubernetes_api import cluster_api
from control_plane.leadership.kubernetes_lease import KubernetesLease
from control_plane.leadership.leader_label import LeaderLabel
from control_plane.leadership.leadership import Alone, FileLock, Leadership
from control_plane.metrics.metrics import Metrics
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import Planner
from control_plane.service.cluster_service import ClusterService
from control_plane.service.grpc_server import build_server
from control_plane.service.refusals import Refusals
from control_plane.service.service import JobsService, MembershipService
from control_plane.settings import ControlPlaneSettings
from core_attention.whole_file import write_whole
from distca.contract.addresses import split_address
from distca.contract.rpc import server_options
from distca.contract.rpc_errors import Reason
from distca.contract.timeouts import default_seconds
from distca.contract.tls import server_credentials
from distca.errors import DistcaError
from distca.machine_errors import ListenError, using
from distca.process.certificates import watch_certificates
from distca.process.health_service import HealthService
from distca.process.interrupt import heeded
from distca.process.memory import keep_returning_memory
from distca.process.monitoring import (
    Health,
    MetricsEndpoint,
    process_registry,
)
from distca.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
)

logger = logging.getLogger(__name__)

_SERVICES = (
    membership_pb2.DESCRIPTOR.services_by_name["Membership"].full_name,
    jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].full_name,
    cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name,
)
"""The services of the health check, besides the process as a whole."""

_ASK_SECONDS = default_seconds("ask_seconds")

_LOOPBACK_OF_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def run(settings: ControlPlaneSettings, planners: Mapping[str, Planner] = PLANNERS) -> None:
    """Serve until SIGTERM or SIGINT, then inform members and stop."""
    keep_returning_memory()
    if asyncio.run(_serve(settings, planners)) is signal.SIGINT:
        raise KeyboardInterrupt


async def _serve(
    settings: ControlPlaneSettings, planners: Mapping[str, Planner]
) -> signal.Signals | None:
    """Serves; the signal that ended it."""
    stop = asyncio.Event()
    came: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        came.append(number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    control_plane = ControlPlane(settings, planners)
    await control_plane.start()
    # What is loaded stays: else collections go through it at any time, for tens of milliseconds.
    gc.collect()
    gc.freeze()
    leading, stopping = (asyncio.create_task(c) for c in (control_plane.lead(), stop.wait()))
    try:
        await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            leading.result()
        logger.info("stopping")
    finally:
        leading.cancel()
        stopping.cancel()
        await asyncio.gather(leading, stopping, return_exceptions=True)
        await control_plane.stop()
    return came[0] if came else None


class ControlPlane:
    """A control plane on the running event loop, whose clock is its own.

    Attributes:
        address, metrics_address: where this machine reaches it, once started.
    """

    def __init__(
        self, settings: ControlPlaneSettings, planners: Mapping[str, Planner] = PLANNERS
    ) -> None:
        self.metrics = Metrics(process_registry("control-plane"))
        tls = settings.tls
        watch_certificates(
            self.metrics.registry,
            own=[tls.certificate_file if tls else None],
            authorities=[tls.client_ca_file if tls else None],
        )
        # Others are plain Python.
        self._cold = {
            name: ColdPlanner(name, on_change=self.metrics.planner_changed)
            for name, planner in planners.items()
            if PLANNERS.get(name) is planner
        }
        self._clock = asyncio.get_running_loop().time
        keys = job_keys(settings.access.token_secret_file, settings.state_dir)
        self.coordinator = Coordinator(
            settings.coordinator, {**planners, **self._cold}, self.metrics, self._clock, keys
        )
        self._settings = settings
        self._refusals = Refusals(self.metrics.registry, self._clock)
        self._connections = Connections(
            self._clock, patience_seconds=settings.access.handshake_seconds
        )
        self._leadership = _leadership(settings)
        self._has_taken_over = False
        self._threads = FairThreads(2, "messages")
        self._health = HealthService(_SERVICES)
        self._server: grpc.aio.Server | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._listen_address = settings.listen_address
        self.address = ""
        self.metrics_address: str | None = None

    async def start(self) -> None:
        """Listens, and writes the address file. Leads if it is alone, else stands by."""
        try:
            self._server = self._build_server(self._settings.listen_address)
            if (default := self._default_planner) is not None:
                await asyncio.to_thread(default.start)
            await self._server.start()
            metrics = self._settings.metrics_address
            metrics_at = "no port" if metrics is None else self._start_metrics(metrics)
            if isinstance(self._leadership, Alone):
                await self.take_over()
            if self._settings.address_file is not None:
                self._write_addresses(self._settings.address_file)
        except BaseException:
            await self.stop()
            raise
        logger.info("listening on %s, metrics on %s", self._listen_address, metrics_at)

    async def stop(self) -> None:
        """Reports NOT_SERVING, ends all streams, lets calls finish, and frees the ports."""
        await self._end_service()
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in self._cold.values()))
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self._leadership.release()
        if self._server is not None:
            await self._server.stop(self._settings.stop_seconds)
        self._threads.close()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)

    async def lead(self) -> None:
        """Waits until it is this control plane's turn, and leads for as long as it may."""
        await self.take_over()
        why = await self._leadership.lost()
        # At once, before anything is told in the name of who leads now.
        await self._end_service()
        raise DistcaError(f"{why}; another control plane may lead now")

    async def take_over(self) -> None:
        """Waits until it is this control plane's turn, and leads from then on. Idempotent."""
        if self._has_taken_over:
            return
        await self._leadership.acquire()
        self.coordinator.lead(next_generation(self._settings.state_dir))
        self._has_taken_over = True
        self._sweeper = asyncio.create_task(self._sweep())
        self._health.serving()
        logger.info("leading at %s", self._listen_address)

    async def _end_service(self) -> None:
        self._health.over()
        await self.coordinator.shut_down()

    def _build_server(self, address: str) -> grpc.aio.Server:
        server = build_server(
            server_options(self._settings.max_message_bytes), [self._access_interceptor()]
        )
        jobs_pb2_grpc.add_JobsServicer_to_server(
            JobsService(self.coordinator, self._threads, self._refusals), server
        )
        membership_pb2_grpc.add_MembershipServicer_to_server(
            MembershipService(self.coordinator), server
        )
        cluster_pb2_grpc.add_ClusterServicer_to_server(
            ClusterService(self.coordinator, self._planner_state), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        tls = self._settings.tls
        try:
            if tls is None:
                port = server.add_insecure_port(address)
            else:
                credentials = server_credentials(tls, self._connections.begun)
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            host, number = split_address("listen_address", address, any_port=True)
            raise ListenError("listen_address", host, number, error) from error
        self._listen_address = _with_port(address, port)
        self.address = _reachable(self._listen_address)
        self._warn_if_open()
        return server

    @property
    def _default_planner(self) -> ColdPlanner | None:
        return self._cold.get(self._settings.coordinator.default_planner)

    def _planner_state(self) -> str:
        default = self._default_planner
        return PlannerState.COMPILED if default is None else default.state

    def _access_interceptor(self) -> AccessInterceptor:
        access = self._settings.access
        gate = Gate(
            self.coordinator,
            RateLimit(per_second=access.registrations_per_second, burst=access.registration_burst),
            self._clock,
            certificates_required=self._settings.authenticates,
            leads=lambda: self._has_taken_over and self._leadership.is_held,
        )
        return AccessInterceptor(
            gate,
            CallsInFlight(access.max_calls_per_identity),
            self._refusals,
            self._connections,
        )

    def _warn_if_open(self) -> None:
        if not self._settings.authenticates:
            # To this machine alone: that is how everybody starts.
            level = logging.INFO if _is_loopback(self._settings.listen_address) else logging.WARNING
            logger.log(
                level,
                "gRPC on %s asks for no client certificates: whoever reaches it may do everything; "
                "give tls_certificate, tls_key and tls_client_ca outside of development",
                self._listen_address,
            )

    def _start_metrics(self, address: str) -> str:
        """Returns where it listens."""
        host, port = split_address("metrics_address", address, any_port=True)
        loop = asyncio.get_running_loop()
        health = Health(serves=lambda: self._health.serves, is_alive=lambda: _goes_on(loop))
        self._endpoint = MetricsEndpoint(
            host, port, self.metrics.registry, field="metrics_address", health=health
        )
        listens_at = _with_port(address, self._endpoint.port)
        self.metrics_address = _reachable(listens_at)
        return listens_at

    def _write_addresses(self, path: Path) -> None:
        """Whole or not at all, so that who waits for the file can read it once it is there."""
        with using("address_file", path):
            write_whole(path, json.dumps({"grpc": self.address, "metrics": self.metrics_address}))

    async def _sweep(self) -> None:
        """Lets leases run out in time, at most a thirtieth of their length late."""
        interval_seconds = self.coordinator.lease_seconds / 30
        while True:
            await asyncio.sleep(interval_seconds)
            if not self._leadership.is_held:
                # Members are elsewhere: their silence here says nothing.
                continue
            try:
                self.coordinator.sweep()
                self._count_refusals()
            except Exception:
                # A mistake in closing one job must not let all others live for ever.
                logger.exception("looking for expired leases failed")

    def _count_refusals(self) -> None:
        for _ in range(self._connections.take_failed()):
            self._refusals.refused(
                "connection",
                "TLS clients",
                RefusedError(
                    Reason.NO_HANDSHAKE,
                    "a connection brought no call: its certificate is missing, expired or of "
                    "another authority, or the client trusts another one",
                ),
            )
        self._refusals.sweep()


def _goes_on(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the loop still takes its turns; asked from other threads."""
    its_turn = threading.Event()
    try:
        loop.call_soon_threadsafe(its_turn.set)
    except RuntimeError:  # the loop is closed
        return False
    return its_turn.wait(_ASK_SECONDS)


def _leadership(settings: ControlPlaneSettings) -> Leadership:
    if settings.leader_lock is not None:
        return FileLock(settings.leader_lock)
    if settings.leader_lease:
        namespace, _, name = settings.leader_lease.partition("/")
        identity = f"{socket.gethostname()}-{os.getpid()}"
        api = cluster_api()
        pod = settings.leader_pod
        label = LeaderLabel(api, namespace, pod) if pod else None
        return KubernetesLease(api, namespace, name, identity, label=label)
    return Alone()


def _is_loopback(address: str) -> bool:
    host, _ = split_address("listen_address", address, any_port=True)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_port(address: str, port: int) -> str:
    """``address`` with the port that was taken where it asks for any."""
    return f"{address.rpartition(':')[0]}:{port}"


def _reachable(address: str) -> str:
    """``host:port`` under which this machine reaches a listener on ``address``."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK_OF_ANY.get(host, host)}:{port}"
