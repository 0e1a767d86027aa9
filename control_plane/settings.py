"""What the operator of a control plane may choose; validated on creation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

from control_plane.planner.planners import DEFAULT_PLANNER
from distca.contract.rpc import DEFAULT_MAX_MESSAGE_BYTES
from distca.contract.tls import TlsFiles

_LONGEST_PREFIX = 30
"""Of a data network: two addresses."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """Leases, limits and planning.

    Attributes:
        lease_seconds: how long servers and ranks live without a heartbeat.
        retained_steps: planned steps of a job that are kept for late readers, 64 or more.
        max_pending_steps: steps of a job that may wait for manifests at a time.
        max_jobs_per_identity: jobs that one identity may have open; without mTLS, all together.
        max_ranks_per_identity: ranks that all of them together may have.
        max_manifest_bytes_per_identity: of requests whose manifests are kept for its jobs, steps
            that are planned and retained included.
        max_queued_events: events that may wait for one reader before it is dropped.
        planning_threads: jobs that are planned at the same time.
        default_planner: name of the planner of jobs that name none.
        broken_stream_seconds: how long a rank whose stream of events has broken may take to be
            heard again.
        lost_rank_seconds: the same if a server's connection to the rank was reset, too.
        stall_seconds: how long a server may have work and finish none of it before it is fenced.
        settle_seconds: how long after a first loss a recovery begins: losses rarely come alone.
        leave_seconds: how long the other ranks may take to leave too, when one has left before the
            end of a planned step.
        answer_seconds: how long the ranks may take to say how far they are.
        max_fruitless_recoveries: after so many in a row in which no rank completed a tick, a job is
            closed.
        rejoin_seconds: how long after its start the control plane leaves to servers to register
            again before it plans for jobs from before.
    """

    lease_seconds: float = 15.0
    retained_steps: int = 64
    max_pending_steps: int = 64
    max_jobs_per_identity: int = 256
    max_ranks_per_identity: int = 2**16
    max_manifest_bytes_per_identity: int = 512 * 2**20
    max_queued_events: int = 256
    planning_threads: int = 2
    default_planner: str = DEFAULT_PLANNER
    broken_stream_seconds: float = 7.0
    lost_rank_seconds: float = 3.0
    stall_seconds: float = 10.0
    settle_seconds: float = 0.1
    leave_seconds: float = 5.0
    answer_seconds: float = 30.0
    max_fruitless_recoveries: int = 8
    rejoin_seconds: float = 2.5

    def __post_init__(self) -> None:
        for name in (
            "lease_seconds",
            "broken_stream_seconds",
            "lost_rank_seconds",
            "stall_seconds",
            "settle_seconds",
            "leave_seconds",
            "answer_seconds",
            "rejoin_seconds",
        ):
            _check_positive(name, getattr(self, name))
        for name, lowest in (
            ("retained_steps", 64),
            ("max_pending_steps", 1),
            ("max_jobs_per_identity", 1),
            ("max_ranks_per_identity", 1),
            ("max_manifest_bytes_per_identity", 1),
            ("max_queued_events", 1),
            ("planning_threads", 1),
            ("max_fruitless_recoveries", 1),
        ):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {lowest} or more")


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """What one caller may ask for, and what shows that it is a job's rank.

    Attributes:
        registrations_per_second: servers and ranks that one identity (without mTLS: one host) may
            register in the long run.
        registration_burst: how many at once: as many as the largest job has ranks.
        max_calls_per_identity: calls that one identity (without mTLS: one host) may have under way
            at a time; each of its ranks and servers has a stream, and some calls besides.
        handshake_seconds: a TLS connection that has brought no call for so long counts as refused.
        token_secret_file: 32 bytes or more from which jobs' tokens are derived; with it the tokens
            stay good when the control plane starts again. None makes a random secret.
    """

    registrations_per_second: float = 200.0
    registration_burst: int = 4096
    max_calls_per_identity: int = 16384
    handshake_seconds: float = 10.0
    token_secret_file: Path | None = None

    def __post_init__(self) -> None:
        for name in ("registrations_per_second", "handshake_seconds"):
            _check_positive(name, getattr(self, name))
        for name in ("registration_burst", "max_calls_per_identity"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class DataNetworkSettings:
    """The encrypted data network whose addresses and keys members are given.

    Attributes:
        network: that addresses are given out of; None gives out none.
        max_members_per_identity: members that one identity may have.
    """

    network: IPv4Network | None = None
    max_members_per_identity: int = 4096

    def __post_init__(self) -> None:
        if self.network is not None and self.network.prefixlen > _LONGEST_PREFIX:
            raise ValueError(
                f"network is {self.network}, which has no room for members; give a /"
                f"{_LONGEST_PREFIX} or larger, for example 10.99.0.0/16"
            )
        if self.max_members_per_identity < 1:
            raise ValueError(
                f"max_members_per_identity is {self.max_members_per_identity}; it must be 1 or more"
            )


@dataclass(frozen=True, kw_only=True)
class ControlPlaneSettings:
    """One control plane process.

    Attributes:
        listen_address: ``host:port`` of gRPC; port 0 takes a free one.
        metrics_address: ``host:port`` of the Prometheus endpoint ``/metrics``, likewise; None for
            no endpoint.
        coordinator: leases, limits and planning.
        max_message_bytes: largest gRPC message in either direction.
        stop_seconds: how long calls may go on after a signal to stop.
        tls: certificates; None is plaintext.
        access: limits on callers.
        data_network: the encrypted data network; needs certificates of callers.
        state_dir: keeps what must outlive the process: the generation of its epochs, and the token
            secret if no file gives one. None: the generation is the time, and the secret random.
        leader_lock: a file whose lock the one holds that leads of several control planes.
        leader_lease: ``namespace/name`` of a Kubernetes Lease, likewise.
        leader_pod: name of the pod, in the Lease's namespace, that this process runs in: it has the
            label ``distca.io/leader=true`` while it leads.
        address_file: where to write the bound addresses, as JSON, once both ports serve:
            ``{"grpc": "host:port", "metrics": "host:port"}``, null if there is no endpoint.
    """

    listen_address: str = "0.0.0.0:7700"
    metrics_address: str | None = "0.0.0.0:7701"
    coordinator: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    stop_seconds: float = 5.0
    tls: TlsFiles | None = None
    access: AccessSettings = field(default_factory=AccessSettings)
    data_network: DataNetworkSettings = field(default_factory=DataNetworkSettings)
    state_dir: Path | None = None
    leader_lock: Path | None = None
    leader_lease: str = ""
    leader_pod: str = ""
    address_file: Path | None = None

    @property
    def authenticates(self) -> bool:
        """Whether callers must show a certificate."""
        return self.tls is not None and self.tls.client_ca_file is not None

    @property
    def tokens_outlive_it(self) -> bool:
        """Whether several tenants' jobs may come back to the process that runs after this one."""
        has_secret = self.access.token_secret_file is not None or self.state_dir is not None
        return self.authenticates and has_secret

    def __post_init__(self) -> None:
        split_address("listen_address", self.listen_address)
        if self.metrics_address is not None:
            split_address("metrics_address", self.metrics_address)
        _check_positive("stop_seconds", self.stop_seconds)
        if self.leader_lock is not None and self.leader_lease:
            raise ValueError("leader_lock and leader_lease are both given; one of them decides")
        if self.leader_lease and len(list(filter(None, self.leader_lease.split("/")))) != 2:
            raise ValueError(
                f"leader_lease is {self.leader_lease!r}; it must be NAMESPACE/NAME of a Lease"
            )
        if self.leader_pod and not self.leader_lease:
            raise ValueError(
                f"leader_pod is {self.leader_pod!r}, but leader_lease is not given; give both"
            )
        if self.data_network.network is not None and not self.authenticates:
            raise ValueError(
                f"data_network is {self.data_network.network}, but clients show no certificates: "
                "keys that come over plaintext are worth nothing; give tls_certificate, tls_key "
                "and tls_client_ca"
            )
        if self.max_message_bytes < 1:
            raise ValueError(f"max_message_bytes is {self.max_message_bytes}; it must be 1 or more")


def parse_network(text: str) -> IPv4Network | None:
    """The network that ``text`` gives, as ``10.99.0.0/16``; None if it is empty.

    Raises:
        ValueError: it is none.
    """
    if not text:
        return None
    try:
        return IPv4Network(text)
    except ValueError as error:
        raise ValueError(
            f"data_network is {text!r}: {error}; it must be an IPv4 network that nothing else "
            "uses, for example 10.99.0.0/16"
        ) from error


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of ``address``.

    Raises:
        ValueError: it is not ``host:port``.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"{name} is {address!r}; it must be host:port, for example 0.0.0.0:7700")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_positive(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} is {seconds}; it must be a positive number")
