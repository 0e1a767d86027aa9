"""The hello of a rank that connects to a server, and why it may be refused: a closed set."""

from __future__ import annotations

import secrets
from enum import StrEnum
from typing import Final

from google.protobuf.message import DecodeError

from attention_node.served_job import JobDescription
from data_plane.transport import AddressesDiffer, Claim, ClaimRefused, ProofFailed
from distca.contract.tokens import KEY_BYTES, rank_token
from distca.v1 import data_plane_pb2

PROTOCOL_VERSION: Final = 9


class HelloRefusal(StrEnum):
    """The reasons to refuse a hello."""

    MALFORMED = "malformed"
    VERSION = "version"
    SERVER = "server"
    UNKNOWN_JOB = "unknown-job"
    TOKEN = "token"
    ADDRESS = "address"
    RANK = "rank"
    EPOCH = "epoch"
    MEMORY = "memory"


_CODES: Final = {
    HelloRefusal.MALFORMED: data_plane_pb2.HELLO_REFUSAL_MALFORMED,
    HelloRefusal.VERSION: data_plane_pb2.HELLO_REFUSAL_VERSION,
    HelloRefusal.SERVER: data_plane_pb2.HELLO_REFUSAL_SERVER,
    # One code for both, as the words: a stranger must not learn which jobs there are.
    HelloRefusal.UNKNOWN_JOB: data_plane_pb2.HELLO_REFUSAL_UNKNOWN,
    HelloRefusal.TOKEN: data_plane_pb2.HELLO_REFUSAL_UNKNOWN,
    HelloRefusal.ADDRESS: data_plane_pb2.HELLO_REFUSAL_ADDRESS,
    HelloRefusal.RANK: data_plane_pb2.HELLO_REFUSAL_RANK,
    HelloRefusal.EPOCH: data_plane_pb2.HELLO_REFUSAL_EPOCH_OVER,
    HelloRefusal.MEMORY: data_plane_pb2.HELLO_REFUSAL_MEMORY,
}


class HelloRefused(ClaimRefused):
    """A hello is refused; the message goes to the rank.

    Attributes:
        reason: what is wrong.
    """

    def __init__(self, reason: HelloRefusal, message: str) -> None:
        super().__init__(message, code=_CODES[reason])
        self.reason = reason


def parse_hello(hello: bytes) -> data_plane_pb2.Hello:
    """Reads a hello."""
    try:
        message = data_plane_pb2.Hello.FromString(hello)
    except DecodeError as error:
        raise HelloRefused(
            HelloRefusal.MALFORMED, "the hello is no distca.v1.Hello message"
        ) from error
    if message.version != PROTOCOL_VERSION:
        raise HelloRefused(
            HelloRefusal.VERSION,
            f"protocol version {message.version}; this server speaks {PROTOCOL_VERSION}: run "
            "the same release of distca everywhere",
        )
    return message


def check_proof(
    message: data_plane_pb2.Hello, claim: Claim, server_id: str, job: JobDescription | None
) -> JobDescription:
    """Returns ``job`` if the client is the rank of it that it says it is.

    What a refusal says may be read by anybody, so that an unknown job and a wrong token sound and
    last the same.

    Args:
        message: what the client says.
        claim: what it can prove.
        server_id: of this server.
        job: the open job that it names, if there is one.
    """
    key = job.verification_key if job is not None else _NO_JOB
    try:
        claim.check(rank_token(key, message.rank))
    except AddressesDiffer as error:
        raise HelloRefused(HelloRefusal.ADDRESS, str(error)) from error
    except ProofFailed as error:
        if message.server_id != server_id:
            raise _another_server(message) from error
        raise HelloRefused(
            HelloRefusal.UNKNOWN_JOB if job is None else HelloRefusal.TOKEN,
            f"unknown job {message.job_id!r}, or wrong token for rank {message.rank} of it",
        ) from error
    # Nobody knows the key of no job.
    assert job is not None
    return job


def check_hello(message: data_plane_pb2.Hello, server_id: str, job: JobDescription) -> None:
    """Returns if the rank, which has proven itself, is one of the job and means this server.

    Args:
        message: what the rank says.
        server_id: of this server.
        job: the rank's.
    """
    if message.server_id != server_id:
        raise _another_server(message)
    if message.rank >= job.n_ranks:
        raise HelloRefused(
            HelloRefusal.RANK,
            f"rank {message.rank} of job {message.job_id!r}; it has {job.n_ranks} ranks",
        )


def _another_server(message: data_plane_pb2.Hello) -> HelloRefused:
    return HelloRefused(
        HelloRefusal.SERVER,
        f"this server is not {message.server_id!r}: does another server advertise this address?",
    )


_NO_JOB: Final = secrets.token_bytes(KEY_BYTES)
