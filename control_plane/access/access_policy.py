"""The rules of access: for every method the roles, the callers that need a job's token, limits.

A method that is not in the table is refused, and a test compares the table with the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from distca.contract.codec import MAX_RANK_MANIFEST_BYTES
from distca.contract.identity import Role

_SMALL_BYTES = 64 * 2**10
"""Ids, loads, measurements of a step."""

_DESCRIPTION_BYTES = 8 * 2**20
"""A server's description: some ten kilobytes a cost profile."""

_MANIFEST_BYTES = MAX_RANK_MANIFEST_BYTES + _SMALL_BYTES
"""A rank's part of a step."""

_EVERYONE = frozenset(Role)
_WATCHERS = frozenset({Role.OPERATOR, Role.READ_ONLY})


@dataclass(frozen=True, kw_only=True)
class MethodPolicy:
    """A method's callers; of a stream of requests, each one is held to it.

    Attributes:
        roles: who may call it.
        token_roles: of these, who must show a token of the job that the request names.
        max_request_bytes: larger requests are refused unread.
        registers: it makes a member; the rate of such calls is limited for each caller.
        of_standby: a control plane that stands by answers it too.
    """

    roles: frozenset[Role]
    token_roles: frozenset[Role] = frozenset()
    max_request_bytes: int = _SMALL_BYTES
    registers: bool = False
    of_standby: bool = False


def _of_trainers(max_request_bytes: int = _SMALL_BYTES) -> MethodPolicy:
    """Only a job's own ranks call it."""
    trainers = frozenset({Role.TRAINER})
    return MethodPolicy(roles=trainers, token_roles=trainers, max_request_bytes=max_request_bytes)


_SERVERS = MethodPolicy(roles=frozenset({Role.SERVER}))
_HEALTH = MethodPolicy(roles=_EVERYONE, of_standby=True)
_READ_JOB = MethodPolicy(roles=_WATCHERS | {Role.TRAINER}, token_roles=frozenset({Role.TRAINER}))

POLICIES: Mapping[str, MethodPolicy] = MappingProxyType(
    {
        "/distca.v1.Membership/RegisterServer": MethodPolicy(
            roles=frozenset({Role.SERVER}), max_request_bytes=_DESCRIPTION_BYTES, registers=True
        ),
        "/distca.v1.Membership/Heartbeat": _SERVERS,
        # A server drains itself alone: it must show its lease.
        "/distca.v1.Membership/DrainServer": MethodPolicy(
            roles=frozenset({Role.OPERATOR, Role.SERVER})
        ),
        "/distca.v1.Membership/DeregisterServer": _SERVERS,
        "/distca.v1.Membership/ReportRankLost": _SERVERS,
        "/distca.v1.Jobs/DescribePool": MethodPolicy(roles=_WATCHERS | {Role.TRAINER}),
        "/distca.v1.Jobs/OpenJob": MethodPolicy(
            roles=frozenset({Role.TRAINER}), max_request_bytes=_DESCRIPTION_BYTES, registers=True
        ),
        "/distca.v1.Jobs/RenewRank": _of_trainers(),
        "/distca.v1.Jobs/CloseJob": _of_trainers(),
        "/distca.v1.Jobs/WatchRank": _of_trainers(_MANIFEST_BYTES),
        "/distca.v1.Jobs/WatchServer": _SERVERS,
        "/distca.v1.Jobs/ReportStep": MethodPolicy(
            roles=frozenset({Role.TRAINER, Role.SERVER}), token_roles=frozenset({Role.TRAINER})
        ),
        "/distca.v1.Jobs/ReportServerLost": _of_trainers(),
        "/distca.v1.Jobs/DescribeJob": _READ_JOB,
        "/distca.v1.Jobs/GetStep": _READ_JOB,
        "/distca.v1.Cluster/DescribeCluster": MethodPolicy(roles=_WATCHERS | {Role.SERVER}),
        "/grpc.health.v1.Health/Check": _HEALTH,
        "/grpc.health.v1.Health/Watch": _HEALTH,
    }
)
"""The rules by full method name, as gRPC gives it."""
