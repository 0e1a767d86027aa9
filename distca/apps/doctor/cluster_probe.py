"""Asks the control plane once for all checks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import grpc

from data_plane.transport import TransportName
from distca.contract.rpc import RpcSettings, open_channel, wait_until_ready
from distca.contract.rpc_errors import RpcError
from distca.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2, jobs_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class ClusterAnswer:
    """The control plane's answer, and its time.

    Attributes:
        cluster: as it describes it; None if this role may not see it.
        transports: what the pool's servers use.
        round_trip_seconds: of the call.
        asked_at: this machine's clock half way through the call, seconds since 1970 UTC.
    """

    cluster: cluster_pb2.DescribeClusterResponse | None = None
    transports: frozenset[TransportName] = frozenset()
    round_trip_seconds: float = 0.0
    asked_at: float = 0.0


class ClusterProbe:
    """The control plane's answer, or why there is none; asked for when first needed.

    Args:
        settings: how to reach it.
        connect_seconds: how long to look for it.
    """

    def __init__(self, settings: RpcSettings, connect_seconds: float) -> None:
        self._settings = replace(settings, connect_seconds=connect_seconds)
        self._outcome: ClusterAnswer | Exception | None = None

    @property
    def settings(self) -> RpcSettings:
        """Settings for reaching it."""
        return self._settings

    def answer(self) -> ClusterAnswer:
        """The answer.

        Raises:
            RpcError: it cannot be reached, or fails.
            OSError, ValueError: a TLS file cannot be used.
        """
        if self._outcome is None:
            try:
                self._outcome = self._ask()
            except (RpcError, OSError, ValueError) as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def answer_or_none(self) -> ClusterAnswer | None:
        """The answer; None if there is none, which check control-plane reports."""
        try:
            return self.answer()
        except (RpcError, OSError, ValueError):
            return None

    def _ask(self) -> ClusterAnswer:
        with open_channel(self._settings) as channel:
            wait_until_ready(channel, self._settings)
            stub = cluster_pb2_grpc.ClusterStub(channel)
            request = cluster_pb2.DescribeClusterRequest()
            # The first call does what is done once for a connection; the second one is timed.
            try:
                stub.DescribeCluster(request)
            except RpcError as error:
                _only_if_not_permitted(error)
                return ClusterAnswer(transports=_pool_transports(channel))
            began = time.perf_counter()
            answer = stub.DescribeCluster(request)
            seconds = time.perf_counter() - began
            return ClusterAnswer(
                cluster=answer,
                transports=_known(
                    status.server.transport
                    for status in answer.servers
                    if not status.in_place_job_id
                ),
                round_trip_seconds=seconds,
                asked_at=time.time() - seconds / 2,
            )


def _pool_transports(channel: grpc.Channel) -> frozenset[TransportName]:
    """The pool's transports, which a trainer may know though it may not see the cluster."""
    try:
        answer = jobs_pb2_grpc.JobsStub(channel).DescribePool(jobs_pb2.DescribePoolRequest())
    except RpcError as error:
        _only_if_not_permitted(error)
        return frozenset()
    return _known(answer.transports)


def _only_if_not_permitted(error: RpcError) -> None:
    if error.reason.status is not grpc.StatusCode.PERMISSION_DENIED:
        raise error


def _known(names: Iterable[str]) -> frozenset[TransportName]:
    return frozenset(TransportName(name) for name in names if name in set(TransportName))
