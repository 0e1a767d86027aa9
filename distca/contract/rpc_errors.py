"""Failures of calls to the control plane: one error, with a reason that both sides know."""

from __future__ import annotations

from enum import Enum

import grpc
from grpc import StatusCode

ERROR_KIND_KEY = "distca-error"
"""Trailing metadata with the :attr:`Reason.kind` of a refusal."""

RETRY_AFTER_KEY = "retry-after"
"""Trailing metadata of a call that came too early: when to try again, in seconds."""

_IDENTITY = "the URI of 'openssl x509 -noout -ext subjectAltName -in FILE' is its identity"
_ROLES = "use a certificate of the right role; docs/security.md lists what each may do"
_RUNNING = "is the control plane running there, and do address and TLS files match? Try again"
_LIMITS = "try again later, or raise the control plane's limits"


class Reason(Enum):
    """The reasons for which a call fails. The first one of a status also stands for what gRPC
    itself says with it.

    Attributes:
        kind: separates reasons of one status on the wire, and in metrics.
        status: that carries it.
        advice: for people.
    """

    UNAVAILABLE = "unavailable", StatusCode.UNAVAILABLE, _RUNNING
    STANDBY = "standby", StatusCode.UNAVAILABLE, _RUNNING
    SHUTTING_DOWN = "shutting-down", StatusCode.UNAVAILABLE, _RUNNING
    NO_HANDSHAKE = "no-handshake", StatusCode.UNAVAILABLE, _RUNNING
    DEADLINE_EXCEEDED = (
        "deadline-exceeded",
        StatusCode.DEADLINE_EXCEEDED,
        "the call may have taken effect; try again, or raise the timeout if it is busy",
    )
    CANCELLED = (
        "cancelled",
        StatusCode.CANCELLED,
        "nothing to do if this process is shutting down",
    )
    UNIMPLEMENTED = (
        "unimplemented",
        StatusCode.UNIMPLEMENTED,
        "check the address: is it a control plane's, of this version of distca?",
    )
    INVALID_REQUEST = "invalid-request", StatusCode.INVALID_ARGUMENT, "correct the request"
    SPEC_MISMATCH = (
        "spec-mismatch",
        StatusCode.FAILED_PRECONDITION,
        "give all ranks of a job the same settings, and every job a name of its own",
    )
    ALREADY_EXISTS = (
        "already-exists",
        StatusCode.ALREADY_EXISTS,
        "use another name, or end the process that has this one: --replace does",
    )
    NO_IDENTITY = "no-identity", StatusCode.UNAUTHENTICATED, _IDENTITY
    EXPIRED_CERTIFICATE = "expired-certificate", StatusCode.UNAUTHENTICATED, _IDENTITY
    MISSING_TOKEN = "missing-token", StatusCode.UNAUTHENTICATED, _IDENTITY
    WRONG_ROLE = "wrong-role", StatusCode.PERMISSION_DENIED, _ROLES
    OTHER_OWNER = "other-owner", StatusCode.PERMISSION_DENIED, _ROLES
    WRONG_TOKEN = (
        "wrong-token",
        StatusCode.PERMISSION_DENIED,
        "start the job again; for jobs to outlive a restart of the control plane, give it "
        "--state-dir or --token-secret",
    )
    TOO_LARGE = (
        "too-large",
        StatusCode.RESOURCE_EXHAUSTED,
        "send less, or raise max_message_bytes on both sides",
    )
    BACKLOG = "backlog", StatusCode.RESOURCE_EXHAUSTED, "watch again if the reader fell behind"
    QUOTA = "quota", StatusCode.RESOURCE_EXHAUSTED, _LIMITS
    RATE_LIMITED = "rate-limited", StatusCode.RESOURCE_EXHAUSTED, _LIMITS
    NOT_FOUND = "not-found", StatusCode.NOT_FOUND, "check the name"
    UNKNOWN_JOB = (
        "unknown-job",
        StatusCode.NOT_FOUND,
        "open the job again; the reason above says why it was closed, if it was",
    )
    UNKNOWN_SERVER = "unknown-server", StatusCode.NOT_FOUND, "list the servers that there are"
    UNKNOWN_STEP = (
        "unknown-step",
        StatusCode.NOT_FOUND,
        "ask for a recent step that has been planned",
    )
    LEASE_EXPIRED = "lease-expired", StatusCode.NOT_FOUND, "register again"
    FENCED = "fenced", StatusCode.NOT_FOUND, "see the server's log, and register again"
    REPLACED = "replaced", StatusCode.ABORTED, "watch again"
    OTHER = "other", StatusCode.UNKNOWN, "see the control plane's log"

    def __init__(self, kind: str, status: StatusCode, advice: str) -> None:
        self.kind = kind
        self.status = status
        self.advice = advice

    @classmethod
    def of(cls, kind: str) -> Reason:
        """The reason of that :attr:`kind`; OTHER where a newer release knows more."""
        return next((reason for reason in cls if reason.kind == kind), cls.OTHER)

    @property
    def is_away(self) -> bool:
        """Return whether no control plane that leads answers there."""
        return self.status is StatusCode.UNAVAILABLE

    @property
    def is_transient(self) -> bool:
        """Return whether a later attempt, here or at another address, may go well."""
        passing = (Reason.RATE_LIMITED, Reason.DEADLINE_EXCEEDED, Reason.CANCELLED)
        return self.is_away or self in passing


_BY_STATUS = {reason.status: reason for reason in reversed(Reason)}


class RpcError(Exception):
    """A call to the control plane failed.

    Attributes:
        reason: what a caller may decide by.
        method: name of the call, for example ``"OpenJob"``.
        address: ``host:port`` of the control plane.
        details: what the control plane, or gRPC, said.
        retry_after_seconds: when the control plane admits the call, if it came too early.
    """

    def __init__(
        self,
        reason: Reason,
        method: str,
        address: str,
        details: str,
        *,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{method} at {address}: {details.rstrip('.')}; {reason.advice}")
        self.reason = reason
        self.method = method
        self.address = address
        self.details = details
        self.retry_after_seconds = retry_after_seconds


def named_error(error: grpc.RpcError, method: str, address: str) -> RpcError:
    """The failure that ``error`` of gRPC stands for."""
    status = error.code()
    metadata = dict(error.trailing_metadata() or ())
    reason = Reason.of(metadata.get(ERROR_KIND_KEY, ""))
    if reason.status is not status:
        reason = _BY_STATUS.get(status, Reason.OTHER)
    seconds = metadata.get(RETRY_AFTER_KEY)
    return RpcError(
        reason,
        method,
        address,
        error.details() or status.name,
        retry_after_seconds=None if seconds is None else float(seconds),
    )
