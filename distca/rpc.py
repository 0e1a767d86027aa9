"""The client's side of gRPC: how trainers, nodes and the command line reach the control plane.

:func:`open_channel` gives a channel on which every unary call has a deadline and every failure is
one of this module's errors, which name the method, the address and what to do; no caller handles
``grpc.RpcError``. The server's matching options stand here too, so that both sides agree on
keepalive: a server answers pings it does not permit by closing the connection
(GOAWAY, too_many_pings).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from distca.tokens import JOB_TOKEN_KEY

logger = logging.getLogger(__name__)

MIN_KEEPALIVE_SECONDS = 10.0
"""The shortest interval between keepalive pings that the control plane permits."""

DEFAULT_MAX_MESSAGE_BYTES = 256 * 2**20
"""gRPC's own limit of 4 MiB is too small for the whole plan of a large job."""

ERROR_KIND_KEY = "distca-error"
"""Trailing metadata that tells apart errors of one status; see :data:`_BY_KIND`."""

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
    """Another live server has the id, or the rank has joined already."""

    advice = "use another name, or wait until the lease of the one before has expired"


class Unauthenticated(RpcError):
    """The certificate says nothing of use, or a job's token is missing."""

    advice = "show the certificate's identity with 'distca certs show FILE'"


class PermissionDenied(RpcError):
    """The certificate's role may not do this, or the job is another tenant's."""

    advice = "use a certificate of the right role; docs/security.md lists what each may do"


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
    """What the request names does not exist."""

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


_BY_KIND: dict[str, type[RpcError]] = {
    "unknown-job": UnknownJob,
    "unknown-server": UnknownServer,
    "unknown-step": UnknownStep,
    "lease-expired": LeaseExpired,
    "rate-limited": RateLimited,
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
}


@dataclass(frozen=True, kw_only=True)
class RpcSettings:
    """How to reach the control plane.

    Attributes:
        address: its ``host:port``; of several, with commas between, a channel takes the first,
            and :mod:`distca.reconnect` tries all.
        connect_seconds: how long :func:`wait_until_ready` waits for a connection.
        call_seconds: deadline of a unary call that sets none itself.
        keepalive_seconds: interval of pings on an idle connection, at least
            :data:`MIN_KEEPALIVE_SECONDS`.
        keepalive_timeout_seconds: how long a ping may go unanswered before the connection counts
            as broken.
        max_message_bytes: largest message in either direction.
        ca_file: certificates that sign the control plane's; None is plaintext.
        certificate_file, key_file: this client's own certificate and key, for mTLS; both or none.
    """

    address: str
    connect_seconds: float = 10.0
    call_seconds: float = 10.0
    keepalive_seconds: float = 30.0
    keepalive_timeout_seconds: float = 10.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ValueError(
                    f"address is {self.address!r}; it must be host:port, for example "
                    "localhost:7700, or several with commas between"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_seconds") and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} is {value}; it must be a positive number")
        if self.keepalive_seconds < MIN_KEEPALIVE_SECONDS:
            raise ValueError(
                f"keepalive_seconds is {self.keepalive_seconds}; the control plane permits "
                f"{MIN_KEEPALIVE_SECONDS} or more"
            )
        if self.max_message_bytes < 1:
            raise ValueError(f"max_message_bytes is {self.max_message_bytes}; it must be 1 or more")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError(
                f"certificate_file is {self.certificate_file} and key_file is {self.key_file}; "
                "mTLS needs both, TLS neither"
            )
        if self.certificate_file is not None and self.ca_file is None:
            raise ValueError(
                f"ca_file is None and certificate_file is {self.certificate_file}; mTLS needs "
                "ca_file, certificate_file and key_file"
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """``address``, or each of several."""
        return tuple(address.strip() for address in self.address.split(","))


def open_channel(settings: RpcSettings, token: Callable[[], bytes] = lambda: b"") -> grpc.Channel:
    """A channel to the control plane; it connects on first use, and again after a failure.

    Calls raise :class:`RpcError` and its subclasses only. Unary calls without a timeout get
    ``settings.call_seconds``; streams have none, their keepalive pings notice a dead peer.

    Args:
        settings: how to reach it.
        token: gives the job's token that goes with every call; none if it is empty.

    Raises:
        OSError: a TLS file cannot be read.
    """
    options = _client_options(settings)
    if settings.ca_file is None:
        channel = grpc.insecure_channel(settings.addresses[0], options)
    else:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=settings.ca_file.read_bytes(),
            private_key=settings.key_file.read_bytes() if settings.key_file else None,
            certificate_chain=(
                settings.certificate_file.read_bytes() if settings.certificate_file else None
            ),
        )
        channel = grpc.secure_channel(settings.addresses[0], credentials, options)
    return grpc.intercept_channel(channel, _Caller(settings, token))


def wait_until_ready(channel: grpc.Channel, settings: RpcSettings) -> None:
    """Waits until ``channel`` has a connection.

    Raises:
        ControlPlaneUnavailable: there is none after ``settings.connect_seconds``.
    """
    ready = grpc.channel_ready_future(channel)
    try:
        ready.result(timeout=settings.connect_seconds)
    except grpc.FutureTimeoutError:
        raise ControlPlaneUnavailable(
            "connect", settings.address, f"no connection after {settings.connect_seconds:g} s"
        ) from None
    finally:
        ready.cancel()


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


def log_lost_report(future: Future[object]) -> None:
    """Done callback of a step report sent in the background: losing one is worth a warning only."""
    if not future.cancelled() and future.exception() is not None:
        logger.warning("a step report was lost: %s", future.exception())


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a gRPC server that permits what :func:`open_channel` does."""
    return [
        *_message_options(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_KEEPALIVE_SECONDS * 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Several processes on one port would each hold half of the members.
        ("grpc.so_reuseport", 0),
    ]


def _client_options(settings: RpcSettings) -> list[tuple[str, int]]:
    return [
        *_message_options(settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A control plane that restarts is found again within seconds, not gRPC's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Else a new channel would go on with the backoff of the one before it.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _message_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


class _CallDetails(NamedTuple):
    """The fields of ``grpc.ClientCallDetails`` that gRPC reads."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Caller(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Gives unary calls a deadline, and all calls the job's token and this module's errors."""

    def __init__(self, settings: RpcSettings, token: Callable[[], bytes]) -> None:
        self._settings = settings
        self._token = token

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        timeout = self._settings.call_seconds if details.timeout is None else details.timeout
        call = continuation(self._details(details, timeout), request)
        error = call.exception()
        if isinstance(error, grpc.RpcError):
            raise named_error(error, _short(details.method), self._settings.address) from error
        return call

    def intercept_unary_stream(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        call = continuation(self._details(details, details.timeout), request)
        return EventStream(call, _short(details.method), self._settings.address)

    def _details(self, details: Any, timeout: float | None) -> _CallDetails:
        token = self._token()
        metadata = [*(details.metadata or ()), *([(JOB_TOKEN_KEY, token)] if token else [])]
        return _CallDetails(
            details.method,
            timeout,
            metadata or None,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


class EventStream:
    """The messages of a server's stream; iterating raises :class:`RpcError`, as calls do.

    The iterator blocks until a message comes, the stream ends, or another thread cancels it.
    """

    def __init__(self, call: Any, method: str, address: str) -> None:
        self._call = call
        self._method = method
        self._address = address

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise named_error(error, self._method, self._address) from error

    def cancel(self) -> None:
        """Ends the stream; a blocked iterator raises :class:`Cancelled`."""
        self._call.cancel()


def _short(method: str | bytes) -> str:
    """``OpenJob`` of ``/distca.v1.Jobs/OpenJob``."""
    text = method.decode() if isinstance(method, bytes) else method
    return text.rpartition("/")[2]
