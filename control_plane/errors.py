"""The refusals of the control plane."""

from __future__ import annotations

from distca.contract.rpc_errors import Reason


class RefusedError(Exception):
    """A request is refused; the message says what came, what is valid and what to do.

    Attributes:
        reason: goes to the caller with the message.
        retry_after_seconds: when the call may be made again, if that is known.
    """

    def __init__(
        self, reason: Reason, message: str, *, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(RefusedError, ValueError):
    """A field of a request is missing or wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.INVALID_REQUEST, message)
