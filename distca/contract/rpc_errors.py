"""Errors of calls to the control plane: one class for each thing that a caller may do about it."""

from __future__ import annotations

import grpc

ERROR_KIND_KEY = "distca-error"
"""Trailing metadata that separates errors of one status; see :data:`_BY_KIND`."""

RETRY_AFTER_KEY = "retry-after"
"""Trailing metadata of a call that came too early: when to try again, in seconds."""


class RpcError(Exception):
    """A call to the control plane failed.

    Attributes:
        method: name of the call, for example ``"OpenJob"``.
        address: ``host:port`` of the control plane.
        details: what the control plane, or gRPC, said.
    """

    advice = "see the control plane's log"

    def __init__(self, method: str, address: str, details: str) -> None:
        super().__init__(f"{method} at {address}: {details.rstrip('.')}; {self.advice}")
        self.method = method
        self.address = address
        self.details = details


class ControlPlaneUnavailable(RpcError):
    """No control plane answers at the address, or it is shutting down."""

    advice = "is the control plane running there, and do address and TLS files match? Try again"


class ProcessUnavailable(ControlPlaneUnavailable):
    """The same of any process that answers for its health."""

    advice = (
        "does a process listen there, do the TLS files match, and is its certificate for this host "
        "or for --tls-server-name? Try again"
    )


class DeadlineExceeded(RpcError):
    """The control plane did not answer in time."""

    advice = "the call may have taken effect; try again, or raise the timeout if it is busy"


class InvalidRequest(RpcError):
    """A field of the request is missing or wrong."""

    advice = "correct the request"


class FailedPrecondition(RpcError):
    """The request contradicts what others agreed on, such as a job's spec."""

    advice = "give all ranks of a job the same settings, and every job a name of its own"


class AlreadyExists(RpcError):
    """Another live server has the id, or a live job the name."""

    advice = "use another name, or end the process that has this one: --replace does"


class Unauthenticated(RpcError):
    """The certificate says nothing of use, or a job's token is missing."""

    advice = "show the certificate's identity with 'distca certs show FILE'"


class PermissionDenied(RpcError):
    """The certificate's role may not do this, or the job is another tenant's."""

    advice = "use a certificate of the right role; docs/security.md lists what each may do"


class WrongToken(PermissionDenied):
    """The token is another job's, or of a control plane that had another token secret."""

    advice = (
        "start the job again; for jobs to outlive a restart of the control plane, give it "
        "--state-dir or --token-secret"
    )


class Unimplemented(RpcError):
    """The other side speaks gRPC and does not know the method."""

    advice = "check the address: is it a control plane's, of this version of distca?"


class ResourceExhausted(RpcError):
    """A message is larger than allowed, or a stream was dropped because its reader fell behind."""

    advice = "watch again if the reader fell behind; raise max_message_bytes on both sides if not"


class RateLimited(ResourceExhausted):
    """Too many members were registered in a short time.

    Attributes:
        retry_after_seconds: when the control plane admits the call.
    """

    advice = "try again after that time, or raise the control plane's registration limits"
    retry_after_seconds = 1.0


class Cancelled(RpcError):
    """The call was cancelled, usually by this side's own shutdown."""

    advice = "nothing to do if this process is shutting down"


class NotFound(RpcError):
    """The request names something that does not exist."""

    advice = "check the name"


class UnknownJob(NotFound):
    """No open job has the id."""

    advice = "open the job again; the reason above says why it was closed, if it was"


class UnknownServer(NotFound):
    """No server with a lease has the id."""

    advice = "list the servers that there are"


class UnknownStep(NotFound):
    """The step has no plan yet, or its plan is forgotten."""

    advice = "ask for a recent step that has been planned"


class LeaseExpired(NotFound):
    """The lease expired, or the control plane has restarted since."""

    advice = "register again"


class Fenced(LeaseExpired):
    """The control plane took the lease away, because the server finished no work."""

    advice = "see the server's log, and register again"


_BY_KIND: dict[str, type[RpcError]] = {
    "unknown-job": UnknownJob,
    "unknown-server": UnknownServer,
    "unknown-step": UnknownStep,
    "lease-expired": LeaseExpired,
    "fenced": Fenced,
    "rate-limited": RateLimited,
    "wrong-token": WrongToken,
}

_BY_STATUS: dict[grpc.StatusCode, type[RpcError]] = {
    grpc.StatusCode.UNAVAILABLE: ControlPlaneUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}


def named_error(error: grpc.RpcError, method: str, address: str) -> RpcError:
    """The one of this module's errors that ``error`` stands for."""
    status = error.code()
    kind: type[RpcError] = _BY_STATUS.get(status, RpcError)
    metadata = dict(error.trailing_metadata() or ())
    specific = _BY_KIND.get(metadata.get(ERROR_KIND_KEY, ""), kind)
    if issubclass(specific, kind):
        kind = specific
    named = kind(method, address, error.details() or status.name)
    if isinstance(named, RateLimited):
        named.retry_after_seconds = float(metadata.get(RETRY_AFTER_KEY, named.retry_after_seconds))
    return named
