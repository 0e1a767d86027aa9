"""Why a rank that says hello to a server is refused: a closed set, counted."""

from __future__ import annotations

from enum import StrEnum


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
