"""The gate before every call: certificate, role, size, rate, and the job's token.

Without client certificates (development) everybody may call everything, but sizes and rates are
limited and jobs' tokens are checked all the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from control_plane.access.access_policy import POLICIES, MethodPolicy
from control_plane.access.caller import Caller, caller_of
from control_plane.access.calls_in_flight import CallsInFlight
from control_plane.access.connections import Connections
from control_plane.access.rate_limit import RateLimit
from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.jobs.coordinator import Coordinator
from control_plane.service.refusals import Refusals
from distca.contract.rpc_errors import ERROR_KIND_KEY, RETRY_AFTER_KEY, Reason
from distca.process.plain_text import plain

logger = logging.getLogger(__name__)

_MAX_MESSAGE_CHARACTERS = 4000
"""gRPC carries the message in a trailer, which may not be larger than 8 KiB."""

Behaviour = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


@dataclass(frozen=True)
class _Unread:
    """Stands for a request that was not parsed, and why."""

    why: RefusedError


class Gate:
    """Decides whether a call may go on.

    Args:
        coordinator: knows the jobs' tokens.
        limit: of calls that register a member.
        clock: seconds that never go back.
        certificates_required: callers must have one, and may do what its role may.
        leads: whether this control plane answers; a standby answers for its health only.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        limit: RateLimit,
        clock: Callable[[], float],
        *,
        certificates_required: bool,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._coordinator = coordinator
        self._limit = limit
        self._clock = clock
        self._certificates_required = certificates_required
        self._leads = leads

    def admit(self, method: str, request: Any, caller: Caller) -> None:
        """Raises unless ``caller`` may make this call."""
        policy = POLICIES.get(method)
        if policy is None:
            raise RefusedError(Reason.WRONG_ROLE, f"no role may call {method}")
        if self._certificates_required:
            _check_role(method, policy, caller)
        if not policy.of_standby and not self._leads():
            raise RefusedError(Reason.STANDBY, "this control plane stands by; another one leads")
        if policy.registers:
            self._check_rate(caller)
        if isinstance(request, _Unread):
            raise request.why
        if _needs_token(policy, caller):
            lease_id = getattr(request, "rank_lease_id", "") or getattr(request, "lease_id", "")
            self._coordinator.check_token(request.job_id, caller.token, caller.owner, lease_id)

    def _check_rate(self, caller: Caller) -> None:
        seconds = self._limit.wait_seconds(caller.label, now=self._clock())
        if seconds:
            raise RefusedError(
                Reason.RATE_LIMITED,
                f"{caller.label} registers members too fast; try again in {seconds:.2f} s",
                retry_after_seconds=seconds,
            )


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Puts the gate before every method, and turns refusals into statuses, counted.

    Args:
        gate: decides.
        calls: those under way, which are limited for each caller.
        refusals: counts.
        connections: notes each caller.
    """

    def __init__(
        self, gate: Gate, calls: CallsInFlight, refusals: Refusals, connections: Connections
    ) -> None:
        self._gate = gate
        self._calls = calls
        self._refusals = refusals
        self._connections = connections

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        deserializer = functools.partial(_read, method, handler.request_deserializer)
        if handler.request_streaming:
            make, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        guarded = functools.partial(self._call, method, behaviour)
        serializer = functools.partial(_encoded, handler.response_serializer)
        return make(guarded, deserializer, serializer)

    async def _call(
        self, method: str, behaviour: Behaviour, request: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        caller = caller_of(context)
        if self._connections.called(caller.peer) and caller.expires is not None:
            logger.info(
                "%s connected from %s, certificate good until %s",
                caller.label,
                caller.peer,
                caller.expires.isoformat(),
            )
        try:
            with self._calls.one_more(caller.label):
                if hasattr(request, "__aiter__"):
                    return await behaviour(self._admitted(method, request, caller), context)
                self._gate.admit(method, request, caller)
                return await behaviour(request, context)
        except RefusedError as error:
            self._refusals.refused(short_name(method), caller.label, error)
            return await _refuse(context, error)

    async def _admitted(
        self, method: str, requests: AsyncIterator[Any], caller: Caller
    ) -> AsyncIterator[Any]:
        async for request in requests:
            self._gate.admit(method, request, caller)
            yield request


async def _refuse(context: grpc.aio.ServicerContext, error: RefusedError) -> NoReturn:
    """Ends a call with the status of ``error``; its kind, and when to try again if that is known,
    go with it as trailing metadata."""
    metadata = [(ERROR_KIND_KEY, error.reason.kind)]
    if error.retry_after_seconds is not None:
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_seconds:.3f}"))
    message = plain(str(error), _MAX_MESSAGE_CHARACTERS)
    await context.abort(error.reason.status, message, tuple(metadata))
    raise AssertionError("abort raises")


def short_name(method: str) -> str:
    """``Jobs/OpenJob`` of ``/distca.v1.Jobs/OpenJob``; ``other`` for what is not in the table."""
    return method.rpartition(".")[2] if method in POLICIES else "other"


def _check_role(method: str, policy: MethodPolicy, caller: Caller) -> None:
    if caller.identity is None:
        raise RefusedError(
            Reason.NO_IDENTITY,
            "the certificate names no role; it needs exactly one URI "
            "spiffe://distca/<role>/<name> among its subject alternative names",
        )
    if caller.expires is not None and caller.expires <= datetime.now(UTC):
        raise RefusedError(
            Reason.EXPIRED_CERTIFICATE,
            f"the certificate of {caller.label} ended at {caller.expires:%Y-%m-%d %H:%M:%S} UTC",
        )
    if caller.identity.role not in policy.roles:
        valid = ", ".join(sorted(policy.roles))
        raise RefusedError(
            Reason.WRONG_ROLE, f"{caller.label} may not call {method}; roles that may: {valid}"
        )


def _needs_token(policy: MethodPolicy, caller: Caller) -> bool:
    """Without certificates no role is known: then a token is checked where every caller needs one,
    and wherever one comes."""
    if caller.identity is not None:
        return caller.identity.role in policy.token_roles
    if not policy.token_roles:
        return False
    return caller.token is not None or policy.token_roles == policy.roles


def _encoded(serializer: Callable[[Any], bytes], response: Any) -> bytes:
    """The bytes of a response; events come as bytes, encoded once for all who read them."""
    return response if isinstance(response, bytes) else serializer(response)


def _read(method: str, deserializer: Callable[[bytes], Any], raw: bytes) -> Any:
    """The request, or why it is not read: an error raised here would reach nobody."""
    policy = POLICIES.get(method)
    if policy is not None and len(raw) > policy.max_request_bytes:
        return _Unread(
            RefusedError(
                Reason.TOO_LARGE,
                f"the request has {len(raw)} bytes; {method} takes {policy.max_request_bytes}",
            )
        )
    try:
        return deserializer(raw)
    except DecodeError:
        return _Unread(InvalidRequestError(f"the request is no message of {method}"))
