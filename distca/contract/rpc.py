"""The client's side of gRPC: how trainers, nodes and the command line reach the control plane.

:func:`open_channel` gives a channel on which every unary call has a deadline and every failure is
a :class:`RpcError`, which names the method, the address and what to do; no caller handles
``grpc.RpcError``. The server's matching options stand here too, so that both sides
agree on keepalive: a server answers pings it does not permit by closing the connection (GOAWAY,
too_many_pings).
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import grpc

from distca.contract.addresses import split_addresses
from distca.contract.checks import check_least, check_seconds
from distca.contract.rpc_errors import Reason, RpcError, named_error
from distca.contract.settings import DEFAULT_MAX_MESSAGE_BYTES, ClientTls
from distca.contract.timeouts import default_seconds
from distca.contract.tls import CertificateFiles, Certificates
from distca.contract.tokens import JOB_TOKEN_KEY

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "MIN_KEEPALIVE_SECONDS",
    "EventStream",
    "Reason",
    "RpcError",
    "RpcSettings",
    "named_error",
    "open_channel",
    "server_options",
    "wait_until_ready",
]

logger = logging.getLogger(__name__)

MIN_KEEPALIVE_SECONDS = 10.0
"""The shortest interval between keepalive pings that the control plane permits."""

SERVER_HANDSHAKE_SECONDS = default_seconds("server_handshake_seconds")
"""How long a connection to a gRPC server may take for its TLS and HTTP/2 handshakes."""

_IDLE_CONNECTION_SECONDS = default_seconds("idle_connection_seconds")
_SERVER_KEEPALIVE_SECONDS = default_seconds("server_keepalive_seconds")
_SERVER_KEEPALIVE_TIMEOUT_SECONDS = default_seconds("server_keepalive_timeout_seconds")
_LAST_FAILURE_SECONDS = 0.1
"""A channel whose last attempt has failed says so at once."""
_MAX_CONNECTIONS = 16384
_MAX_CALLS_OF_CONNECTION = 4096


@dataclass(frozen=True, kw_only=True)
class RpcSettings(ClientTls):
    """Settings for reaching the control plane.

    Attributes:
        address: its ``host:port``; of several, with commas between, a channel takes the first,
            and :mod:`distca.contract.reconnect` tries all.
        connect_seconds: how long :func:`wait_until_ready` waits for a connection.
        call_seconds: deadline of a unary call that sets none itself.
        keepalive_seconds: interval of pings on an idle connection, at least
            :data:`MIN_KEEPALIVE_SECONDS`.
        keepalive_timeout_seconds: how long a ping may go unanswered before the connection counts
            as broken.
        max_message_bytes: largest message in either direction.
        certificates: what the files held when they were last read, by :meth:`following_files`;
            None reads them for each channel.
    """

    address: str
    connect_seconds: float = default_seconds("call_seconds")
    call_seconds: float = default_seconds("call_seconds")
    keepalive_seconds: float = default_seconds("keepalive_seconds")
    keepalive_timeout_seconds: float = default_seconds("keepalive_timeout_seconds")
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    certificates: CertificateFiles | None = None

    def __post_init__(self) -> None:
        split_addresses("address", self.address)
        super().__post_init__()
        check_seconds(self)
        if self.keepalive_seconds < MIN_KEEPALIVE_SECONDS:
            raise ValueError(
                f"keepalive_seconds is {self.keepalive_seconds}; the control plane permits "
                f"{MIN_KEEPALIVE_SECONDS} or more"
            )
        check_least(self, max_message_bytes=1)

    @property
    def addresses(self) -> tuple[str, ...]:
        """``address``, or each of several."""
        return split_addresses("address", self.address)

    def following_files(self) -> RpcSettings:
        """The same with files that are read now, and again whenever ``certificates`` is asked for
        changes. Channels then never see files that are half written.
        """
        return self if self.ca_file is None else replace(self, certificates=self._files())

    def read_certificates(self) -> Certificates:
        """The credentials of a new channel."""
        return (self.certificates or self._files()).current

    def _files(self) -> CertificateFiles:
        return CertificateFiles(
            authority=self.ca_file, certificate=self.certificate_file, key=self.key_file
        )


def open_channel(settings: RpcSettings, token: Callable[[], bytes] = lambda: b"") -> grpc.Channel:
    """A channel to the control plane; it connects on first use, and again after a failure.

    Calls raise :class:`RpcError` only. Unary calls without a timeout get
    ``settings.call_seconds``; streams have none, their keepalive pings notice a dead peer.

    Args:
        settings: how to reach it.
        token: gives the job's token that goes with every call; none if it is empty.
    """
    address, options = settings.addresses[0], _client_options(settings)
    if settings.ca_file is None:
        channel = grpc.insecure_channel(address, options)
    else:
        certificates = settings.read_certificates()
        credentials = grpc.ssl_channel_credentials(
            root_certificates=certificates.authority,
            private_key=certificates.key,
            certificate_chain=certificates.chain,
        )
        channel = grpc.secure_channel(address, credentials, options)
    return grpc.intercept_channel(channel, _Caller(settings, token))


def wait_until_ready(channel: grpc.Channel, settings: RpcSettings) -> None:
    """Waits until ``channel`` has a connection.

    Raises:
        RpcError: there is none after ``settings.connect_seconds``.
    """
    ready = grpc.channel_ready_future(channel)
    try:
        ready.result(timeout=settings.connect_seconds)
    except grpc.FutureTimeoutError:
        why = f"no connection after {settings.connect_seconds:g} s: {_last_failure(channel)}"
        raise RpcError(Reason.UNAVAILABLE, "connect", settings.address, why) from None
    finally:
        ready.cancel()


def _last_failure(channel: grpc.Channel) -> str:
    """The details of a call on a channel that does not connect: gRPC says why nowhere else."""
    try:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=_LAST_FAILURE_SECONDS)
    except RpcError as error:
        if error.reason.is_away:
            return error.details
    return "nothing answers"


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a gRPC server that permits what :func:`open_channel` does."""
    return [
        *_message_options(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_KEEPALIVE_SECONDS * 500)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients that vanish leave streams behind, which count as theirs.
        ("grpc.keepalive_time_ms", int(_SERVER_KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", int(_SERVER_KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        # What connects and says nothing, says it slowly, or has nothing more to say.
        ("grpc.server_handshake_timeout_ms", int(SERVER_HANDSHAKE_SECONDS * 1000)),
        ("grpc.max_connection_idle_ms", int(_IDLE_CONNECTION_SECONDS * 1000)),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.max_concurrent_streams", _MAX_CALLS_OF_CONNECTION),
        # Several processes on one port would each hold half of the members.
        ("grpc.so_reuseport", 0),
    ]


def max_connections() -> int:
    """How many connections a gRPC server of this process takes: three quarters of the files that it
    may have open (``ulimit -n``), so that the others are left for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft < 0 else max(1, min(_MAX_CONNECTIONS, soft * 3 // 4))


def _client_options(settings: RpcSettings) -> list[tuple[str, int | str]]:
    named = (
        [("grpc.ssl_target_name_override", settings.server_name)] if settings.server_name else []
    )
    return [
        *named,
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


class _Caller(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Gives unary calls a deadline, and all calls the job's token and named errors."""

    def __init__(self, settings: RpcSettings, token: Callable[[], bytes]) -> None:
        self._settings = settings
        self._token = token

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        timeout = self._settings.call_seconds if details.timeout is None else details.timeout
        call = continuation(self._details(details, timeout), request)
        return _NamedCall(call, _short(details.method), self._settings.address)

    def intercept_unary_stream(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        call = continuation(self._details(details, details.timeout), request)
        return EventStream(call, _short(details.method), self._settings.address)

    intercept_stream_stream = intercept_unary_stream

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


class _NamedCall:
    """A unary call, over or under way, whose result is given or raised as :class:`RpcError`."""

    def __init__(self, call: Any, method: str, address: str) -> None:
        self._call = call
        self._method = method
        self._address = address

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._call.result(timeout)
        except grpc.RpcError as error:
            raise named_error(error, self._method, self._address) from error
        except grpc.FutureCancelledError as error:
            why = "given up by this side"
            raise RpcError(Reason.CANCELLED, self._method, self._address, why) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


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
        """Ends the stream; a blocked iterator raises, for it is cancelled."""
        self._call.cancel()


def _short(method: str | bytes) -> str:
    """``OpenJob`` of ``/distca.v1.Jobs/OpenJob``."""
    text = method.decode() if isinstance(method, bytes) else method
    return text.rpartition("/")[2]
