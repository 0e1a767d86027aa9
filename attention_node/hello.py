"""The hello of a rank that connects to a server, and why it may be refused: a closed set."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from google.protobuf.message import DecodeError

from attention_node.served_job import ServedJob
from distca.tokens import rank_of_token
from distca.v1 import data_plane_pb2

PROTOCOL_VERSION: Final = 3
FAREWELL: Final = "the session is closed"
"""What a rank says that leaves at the end of its job. Anything else tells of a failure."""


class HelloRefusal(StrEnum):
    """What is wrong with a hello."""

    MALFORMED = "malformed"
    VERSION = "version"
    SERVER = "server"
    UNKNOWN_JOB = "unknown-job"
    TOKEN = "token"
    RANK = "rank"
    EPOCH = "epoch"
    MEMORY = "memory"


class HelloRefused(ValueError):
    """A hello is refused; the message goes to the rank.

    Attributes:
        reason: what is wrong.
    """

    def __init__(self, reason: HelloRefusal, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def parse_hello(hello: bytes) -> data_plane_pb2.Hello:
    """Reads a hello.

    Raises:
        HelloRefused: it is none.
    """
    try:
        return data_plane_pb2.Hello.FromString(hello)
    except DecodeError as error:
        raise HelloRefused(
            HelloRefusal.MALFORMED, "the hello is no distca.v1.Hello message"
        ) from error


def check_hello(message: data_plane_pb2.Hello, server_id: str, job: ServedJob | None) -> ServedJob:
    """Returns ``job`` if the rank may connect.

    Args:
        message: what the rank says.
        server_id: of the server that hears it.
        job: the open job that it names, if there is one.

    Raises:
        HelloRefused: it is of another version or an epoch that is over, for another server or an
            unknown job, shows a wrong token, names a rank that the job does not have, or asks for
            a step that the server has no memory for.
    """
    if message.version != PROTOCOL_VERSION:
        raise HelloRefused(
            HelloRefusal.VERSION,
            f"protocol version {message.version}; this server speaks {PROTOCOL_VERSION}: run "
            "the same release of distca everywhere",
        )
    if message.server_id != server_id:
        raise HelloRefused(
            HelloRefusal.SERVER,
            f"this is server {server_id!r}, not {message.server_id!r}: does another "
            "server advertise this address?",
        )
    if job is None:
        raise HelloRefused(HelloRefusal.UNKNOWN_JOB, f"unknown job {message.job_id!r}")
    token_rank = rank_of_token(job.description.verification_key, message.token)
    if token_rank != message.rank:
        raise HelloRefused(
            HelloRefusal.TOKEN,
            f"wrong token for rank {message.rank} of job {message.job_id!r}",
        )
    if message.rank >= job.description.n_ranks:
        raise HelloRefused(
            HelloRefusal.RANK,
            f"rank {message.rank} of job {message.job_id!r}; it has "
            f"{job.description.n_ranks} ranks",
        )
    refused = [
        why
        for (epoch, step), why in job.refused.items()
        if epoch >= message.epoch and step >= message.first_step
    ]
    if refused:
        raise HelloRefused(HelloRefusal.MEMORY, refused[0])
    if message.epoch < job.epoch:
        raise HelloRefused(
            HelloRefusal.EPOCH,
            f"epoch {message.epoch} of job {message.job_id!r} is over; it recovered with epoch "
            f"{job.epoch}",
        )
    return job
