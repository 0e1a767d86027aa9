"""The loss of a server, as a rank reports it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from distca.v1 import jobs_pb2


class LossCause(StrEnum):
    """A rank's evidence of a loss: the ``cause`` of the control plane's metric."""

    TRANSPORT_ERROR = "transport_error"
    """The connection ended, or the server left a ping unanswered."""
    UNREACHABLE = "unreachable"
    """No connection could be made, or the server refused it."""
    DEADLINE = "deadline"
    """A message was not taken, or did not come, in time."""
    CORRUPT_RESULT = "corrupt_result"
    """Its results are wrong: by their checksums, not finite, or by an audit."""
    OWN_SERVER = "own_server"
    """The server in the rank's own process gave the tick up."""
    UNKNOWN = "unknown"
    """A cause that this release does not know."""


@dataclass(frozen=True, kw_only=True)
class ServerLoss:
    """A rank's report.

    Attributes:
        server_id: of the lost server.
        epoch: of the plan in which it was used.
        cause: how the rank noticed.
        detail: what it saw, for people.
    """

    server_id: str
    epoch: int
    cause: LossCause
    detail: str


def cause_to_proto(cause: LossCause) -> jobs_pb2.LossCause:
    return _PROTO[cause]


def cause_from_proto(number: int) -> LossCause:
    """UNKNOWN for a number that a newer release may send."""
    return _CAUSES.get(number, LossCause.UNKNOWN)


_PROTO: Final = {
    LossCause.TRANSPORT_ERROR: jobs_pb2.LOSS_CAUSE_TRANSPORT_ERROR,
    LossCause.UNREACHABLE: jobs_pb2.LOSS_CAUSE_UNREACHABLE,
    LossCause.DEADLINE: jobs_pb2.LOSS_CAUSE_DEADLINE,
    LossCause.CORRUPT_RESULT: jobs_pb2.LOSS_CAUSE_CORRUPT_RESULT,
    LossCause.OWN_SERVER: jobs_pb2.LOSS_CAUSE_OWN_SERVER,
    LossCause.UNKNOWN: jobs_pb2.LOSS_CAUSE_UNSPECIFIED,
}
_CAUSES: Final[dict[int, LossCause]] = {number: cause for cause, number in _PROTO.items()}
