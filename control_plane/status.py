"""Refusals as gRPC statuses: the one place that maps them."""

from __future__ import annotations

from typing import NoReturn

import grpc

from control_plane import errors
from distca.rpc import ERROR_KIND_KEY

_STATUS: dict[type[errors.RefusedError], tuple[grpc.StatusCode, str]] = {
    errors.InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "invalid-request"),
    errors.SpecMismatchError: (grpc.StatusCode.FAILED_PRECONDITION, "spec-mismatch"),
    errors.AlreadyExistsError: (grpc.StatusCode.ALREADY_EXISTS, "already-exists"),
    errors.OtherOwnerError: (grpc.StatusCode.PERMISSION_DENIED, "other-owner"),
    errors.MissingTokenError: (grpc.StatusCode.UNAUTHENTICATED, "missing-token"),
    errors.WrongTokenError: (grpc.StatusCode.PERMISSION_DENIED, "wrong-token"),
    errors.BacklogError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "backlog"),
    errors.ReplacedError: (grpc.StatusCode.ABORTED, "replaced"),
    errors.ShuttingDownError: (grpc.StatusCode.UNAVAILABLE, "shutting-down"),
    errors.UnknownJobError: (grpc.StatusCode.NOT_FOUND, "unknown-job"),
    errors.UnknownServerError: (grpc.StatusCode.NOT_FOUND, "unknown-server"),
    errors.UnknownStepError: (grpc.StatusCode.NOT_FOUND, "unknown-step"),
    errors.LeaseExpiredError: (grpc.StatusCode.NOT_FOUND, "lease-expired"),
}


async def refuse(context: grpc.aio.ServicerContext, error: errors.RefusedError) -> NoReturn:
    """Ends a call with the status of ``error``; its kind goes with it as trailing metadata."""
    status, kind = _STATUS[type(error)]
    await context.abort(status, str(error), ((ERROR_KIND_KEY, kind),))
    raise AssertionError("abort raises")
