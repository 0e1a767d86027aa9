"""The settings of a control plane; validated on creation.

Fields with a help text are command-line options of ``distca control-plane``, which is built from
these classes; importing this module is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from control_plane.planner import DEFAULT_PLANNER
from distca.contract.addresses import split_address
from distca.contract.checks import check_least, check_positive, check_seconds
from distca.contract.settings import DEFAULT_MAX_MESSAGE_BYTES, TlsFiles
from distca.contract.timeouts import default_seconds
from distca.options import option

_AVAILABILITY, _SECURITY = "Availability", "Security"


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """Leases, limits and planning.

    Attributes:
        retained_steps: planned steps of a job that are kept for late readers, 64 or more.
        max_pending_steps: steps of a job that may wait for manifests at a time; also those that
            ranks have run at home while the control plane was away.
        max_ranks_per_identity: without mTLS, of all together.
        max_manifest_bytes_per_identity: of manifests that are kept for its jobs and of what they
            become; finished steps are forgotten before any is refused.
        max_queued_events: events that may wait for one reader before it is dropped.
        broken_stream_seconds: how long a rank whose stream of events has broken may take to
            call again.
        lost_rank_seconds: the same if a server's connection to the rank was reset, too.
        settle_seconds: how long after a first loss a recovery begins: losses rarely come alone.
        leave_seconds: how long the other ranks may take to leave too, when one has left before the
            end of a planned step.
        answer_seconds: how long the ranks may take to say how far they are.
        max_fruitless_recoveries: after so many in a row in which no rank completed a tick, a job is
            closed.
        rejoin_seconds: how long after its start the control plane leaves to servers to register
            again before it plans for jobs from before.
    """

    default_planner: str = option(DEFAULT_PLANNER, "Planner of jobs that name none.", "--planner")
    planning_threads: int = option(2, "Jobs of one identity that are planned at the same time.")
    lease_seconds: float = option(
        default_seconds("lease_seconds"), "Servers and ranks live so long without a heartbeat."
    )
    stall_seconds: float = option(
        default_seconds("stall_seconds"),
        "A server that has work and finishes none for so long is fenced; more than its longest "
        "kernel call takes.",
        rich_help_panel=_AVAILABILITY,
    )
    max_jobs_per_identity: int = option(
        256,
        "Jobs that one identity may have open; without certificates, all together.",
        rich_help_panel=_SECURITY,
    )
    max_ranks_per_identity: int = option(
        2**16, "Ranks that all jobs of one identity together may have.", rich_help_panel=_SECURITY
    )
    max_manifest_bytes_per_identity: int = option(
        512 * 2**20,
        "Bytes that steps kept for the jobs of one identity may come to, 512 a segment.",
        rich_help_panel=_SECURITY,
    )
    retained_steps: int = 64
    max_pending_steps: int = 1024
    max_queued_events: int = 256
    broken_stream_seconds: float = default_seconds("broken_stream_seconds")
    lost_rank_seconds: float = default_seconds("lost_rank_seconds")
    settle_seconds: float = 0.1
    leave_seconds: float = default_seconds("leave_seconds")
    answer_seconds: float = default_seconds("answer_seconds")
    max_fruitless_recoveries: int = 8
    rejoin_seconds: float = default_seconds("rejoin_seconds")

    def __post_init__(self) -> None:
        check_seconds(self)
        check_least(
            self,
            retained_steps=64,
            max_pending_steps=1,
            max_jobs_per_identity=1,
            max_ranks_per_identity=1,
            max_manifest_bytes_per_identity=1,
            max_queued_events=1,
            planning_threads=1,
            max_fruitless_recoveries=1,
        )


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """The limits of one caller, and its proof to be a job's rank. Without mTLS a caller's
    identity is its host.

    Attributes:
        registration_burst: as many as the largest job has ranks.
        max_calls_per_identity: each rank and server has a stream, and some calls besides.
        handshake_seconds: a TLS connection that has brought no call for so long counts as refused.
    """

    PANEL: ClassVar = "Security"

    token_secret_file: Path | None = option(
        None,
        "File of at least 32 random bytes that jobs' tokens derive from. Default: one in the "
        "state folder, or a new one at each start.",
        "--token-secret",
        envvar="DISTCA_TOKEN_SECRET",
    )
    registrations_per_second: float = option(
        200.0, "Servers and ranks that one identity may register in the long run."
    )
    registration_burst: int = option(4096, "How many of them at once.")
    max_calls_per_identity: int = option(
        16384,
        "Calls and streams that one identity may have under way; without certificates, one host.",
    )
    handshake_seconds: float = default_seconds("handshake_seconds")

    def __post_init__(self) -> None:
        check_positive(self, "registrations_per_second", "handshake_seconds")
        check_least(self, registration_burst=1, max_calls_per_identity=1)


@dataclass(frozen=True, kw_only=True)
class ControlPlaneSettings:
    """One control plane process.

    Attributes:
        metrics_address: None for no endpoint.
        address_file: ``{"grpc": "host:port", "metrics": "host:port"}``, null if there is no
            endpoint.
        state_dir: None: the generation of epochs is the time, and the secret random.
        tls: certificates; None is plaintext.
        max_message_bytes: largest gRPC message in either direction.
        stop_seconds: how long calls may go on after a signal to stop.
    """

    listen_address: str = option(
        "0.0.0.0:7700", "host:port of gRPC; port 0 takes any free one.", "--listen"
    )
    metrics_address: str | None = option(
        "0.0.0.0:7701", "host:port of /metrics for Prometheus, likewise.", "--metrics-listen"
    )
    address_file: Path | None = option(
        None, "File to write the bound addresses to, as JSON, once it serves."
    )
    state_dir: Path | None = option(
        None,
        "Folder for what must outlive the process: a token secret and the number of its starts. "
        "Without it or --token-secret jobs end with the process.",
        envvar="DISTCA_STATE_DIR",
    )
    coordinator: CoordinatorSettings = field(default_factory=CoordinatorSettings)
    leader_lock: Path | None = option(
        None,
        "Among several control planes, the one that holds this file's lock leads; the others "
        "stand by. They must share state folder or token secret.",
        rich_help_panel=_AVAILABILITY,
    )
    leader_lease: str = option(
        "",
        "Chooses the leader by a Kubernetes Lease instead: NAMESPACE/NAME.",
        envvar="DISTCA_LEADER_LEASE",
        rich_help_panel=_AVAILABILITY,
    )
    leader_pod: str = option(
        "",
        "Name of this process's pod, in the Lease's namespace: it has the label "
        "distca.io/leader=true while it leads, for a Service to select.",
        envvar="DISTCA_LEADER_POD",
        rich_help_panel=_AVAILABILITY,
    )
    access: AccessSettings = field(default_factory=AccessSettings)
    tls: TlsFiles | None = None
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    stop_seconds: float = default_seconds("stop_seconds")

    @property
    def authenticates(self) -> bool:
        """Return whether callers must show a certificate."""
        return self.tls is not None and self.tls.client_ca_file is not None

    def __post_init__(self) -> None:
        split_address("listen_address", self.listen_address, any_port=True)
        if self.metrics_address is not None:
            split_address("metrics_address", self.metrics_address, any_port=True)
        check_positive(self, "stop_seconds")
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
        check_least(self, max_message_bytes=1)
