"""Refusals as gRPC statuses: the one place that maps them."""

from __future__ import annotations

from typing import NoReturn

import grpc

from control_plane import errors
from distca.contract.rpc import ERROR_KIND_KEY, RETRY_AFTER_KEY
from distca.process.plain_text import plain

_MAX_MESSAGE_CHARACTERS = 4000
"""gRPC carries the message in a trailer, which may not be larger than 8 KiB."""

_STATUS: dict[type[errors.RefusedError], tuple[grpc.StatusCode, str]] = {
    errors.InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "invalid-request"),
    errors.SpecMismatchError: (grpc.StatusCode.FAILED_PRECONDITION, "spec-mismatch"),
    errors.AlreadyExistsError: (grpc.StatusCode.ALREADY_EXISTS, "already-exists"),
    errors.NoIdentityError: (grpc.StatusCode.UNAUTHENTICATED, "no-identity"),
    errors.ExpiredCertificateError: (grpc.StatusCode.UNAUTHENTICATED, "expired-certificate"),
    errors.NoHandshakeError: (grpc.StatusCode.UNAVAILABLE, "no-handshake"),
    errors.WrongRoleError: (grpc.StatusCode.PERMISSION_DENIED, "wrong-role"),
    errors.OtherOwnerError: (grpc.StatusCode.PERMISSION_DENIED, "other-owner"),
    errors.MissingTokenError: (grpc.StatusCode.UNAUTHENTICATED, "missing-token"),
    errors.WrongTokenError: (grpc.StatusCode.PERMISSION_DENIED, "wrong-token"),
    errors.RequestTooLargeError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "too-large"),
    errors.RateLimitedError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate-limited"),
    errors.QuotaError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "quota"),
    errors.BacklogError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "backlog"),
    errors.ReplacedError: (grpc.StatusCode.ABORTED, "replaced"),
    errors.ShuttingDownError: (grpc.StatusCode.UNAVAILABLE, "shutting-down"),
    errors.StandbyError: (grpc.StatusCode.UNAVAILABLE, "standby"),
    errors.UnknownJobError: (grpc.StatusCode.NOT_FOUND, "unknown-job"),
    errors.UnknownServerError: (grpc.StatusCode.NOT_FOUND, "unknown-server"),
    errors.UnknownStepError: (grpc.StatusCode.NOT_FOUND, "unknown-step"),
    errors.LeaseExpiredError: (grpc.StatusCode.NOT_FOUND, "lease-expired"),
    errors.FencedError: (grpc.StatusCode.NOT_FOUND, "fenced"),
}


def kind_of(error: errors.RefusedError) -> str:
    """Names the kind of ``error``, one of a closed set."""
    return _STATUS[type(error)][1]


async def refuse(context: grpc.aio.ServicerContext, error: errors.RefusedError) -> NoReturn:
    """Ends a call with the status of ``error``; its kind, and when to try again if that is known,
    go with it as trailing metadata."""
    status, kind = _STATUS[type(error)]
    metadata = [(ERROR_KIND_KEY, kind)]
    if isinstance(error, errors.RateLimitedError):
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_seconds:.3f}"))
    await context.abort(status, plain(str(error), _MAX_MESSAGE_CHARACTERS), tuple(metadata))
    raise AssertionError("abort raises")
