"""A job of one rank that asks for nothing: with its token, servers of the pool answer probes."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from attention_node.hello import PROTOCOL_VERSION
from core_attention.shape import AttentionShape
from distca.contract.codec import shape_to_proto
from distca.contract.rpc import RpcSettings, open_channel
from distca.contract.rpc_errors import PermissionDenied, RpcError
from distca.contract.tokens import JOB_TOKEN_KEY
from distca.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    data_plane_pb2,
    jobs_pb2,
    jobs_pb2_grpc,
)

logger = logging.getLogger(__name__)


class PoolJob:
    """An open job of one rank.

    Args:
        answer: how the control plane opened it.
        epoch: of its plans.
    """

    def __init__(self, answer: jobs_pb2.OpenJobResponse, epoch: int) -> None:
        self._answer = answer
        self._epoch = epoch

    @property
    def token(self) -> bytes:
        """Of the job's rank, which it proves to have."""
        return bytes(self._answer.token)

    def hello(self, server_id: str) -> bytes:
        """The first message to a server."""
        message = data_plane_pb2.Hello(
            version=PROTOCOL_VERSION,
            job_id=self._answer.job_id,
            rank=0,
            server_id=server_id,
            epoch=self._epoch,
        )
        return bytes(message.SerializeToString())


@contextmanager
def pool_job(
    settings: RpcSettings, shape: AttentionShape, transport: str
) -> Iterator[PoolJob | None]:
    """Opens the job, and closes it at the end; None if this role may not open jobs.

    Args:
        settings: how to reach the control plane.
        shape: of its core attention.
        transport: what its rank uses.

    Raises:
        RpcError: the control plane cannot be reached, or fails.
    """
    with open_channel(settings) as channel:
        jobs = jobs_pb2_grpc.JobsStub(channel)
        spec = jobs_pb2.JobSpec(
            name=f"doctor-{secrets.token_hex(4)}",
            n_ranks=1,
            n_layers=1,
            n_nano_batches=1,
            shape=shape_to_proto(shape),
            placement=jobs_pb2.PLACEMENT_POOL,
            transport=transport,
        )
        request = jobs_pb2.OpenJobRequest(spec=spec, host=socket.gethostname())
        try:
            answer = jobs.OpenJob(request)
        except PermissionDenied as error:
            logger.info("servers are reached without a job: %s", error)
            yield None
            return
        try:
            described = cluster_pb2_grpc.ClusterStub(channel).DescribeCluster(
                cluster_pb2.DescribeClusterRequest()
            )
            epochs = {job.job_id: job.epoch for job in described.jobs}
            yield PoolJob(answer, epochs.get(answer.job_id, 0))
        finally:
            close = jobs_pb2.CloseJobRequest(
                job_id=answer.job_id, rank_lease_id=answer.rank_lease_id
            )
            try:
                jobs.CloseJob(close, metadata=[(JOB_TOKEN_KEY, answer.token)])
            except RpcError as error:
                logger.warning("the doctor's job ends with its lease: %s", error)
