"""The refusals of the control plane. ``status.py`` maps each to a gRPC status."""

from __future__ import annotations


class RefusedError(Exception):
    """Base of all refusals; the message says what came, what is valid and what to do."""


class InvalidRequestError(RefusedError, ValueError):
    """A field of a request is missing or wrong."""


class SpecMismatchError(RefusedError):
    """A rank's job spec, or its tensor-parallel group, differs from what ranks before it said."""


class AlreadyExistsError(RefusedError):
    """Another live server has the id, or the rank has joined."""


class AccessError(RefusedError):
    """Base of what is refused because of who asks, or how much."""


class NoIdentityError(AccessError):
    """The caller's certificate names no role."""


class ExpiredCertificateError(AccessError):
    """The caller's certificate has expired since it connected."""


class WrongRoleError(AccessError):
    """The caller's role may not call the method."""


class OtherOwnerError(AccessError):
    """The job belongs to another identity."""


class MissingTokenError(AccessError):
    """The call needs the job's token and has none."""


class WrongTokenError(AccessError):
    """The token is another job's, another rank's or another identity's."""


class RequestTooLargeError(AccessError):
    """The request is larger than its method takes."""


class RateLimitedError(AccessError):
    """The caller registers members too fast.

    Attributes:
        retry_after_seconds: when it may try again.
    """

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QuotaError(AccessError):
    """The caller's identity has as much open as one identity may have."""


class NoHandshakeError(AccessError):
    """A TLS connection brought no call: its handshake failed, or the client said nothing."""


class BacklogError(RefusedError):
    """A member is too far ahead with its manifests, or too far behind with its events."""


class ReplacedError(RefusedError):
    """A newer stream of the same member took over."""


class ShuttingDownError(RefusedError):
    """The control plane is stopping."""


class StandbyError(RefusedError):
    """This control plane stands by; another one leads."""


class UnknownJobError(RefusedError):
    """No open job has the id; the message says why it was closed, if that is remembered."""


class UnknownServerError(RefusedError):
    """No live server has the id."""


class UnknownStepError(RefusedError):
    """The step has no plan yet, or its plan is forgotten."""


class LeaseExpiredError(RefusedError):
    """The lease expired or was never given."""


class FencedError(LeaseExpiredError):
    """The lease was taken away: the server answers, and does no work."""
