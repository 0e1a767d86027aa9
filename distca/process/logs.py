"""Logs: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import logging
import os
import re
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from distca.process.plain_text import PlainFormatter

_PLACEHOLDER = re.compile(r"(?:\b(job|server|rank|step|epoch) )?%(?:\.\d+)?[sdrfg]")
"""One value in a message's text, after the word that says what it is."""


class LogFormat(StrEnum):
    """The format of a record on stderr."""

    TEXT = "text"
    JSON = "json"


def start_logging(level: str, log_format: LogFormat, command: str) -> None:
    """Logs to stderr from now on.

    Args:
        level: name of the lowest level that is shown.
        log_format: how.
        command: the distca command that runs, a field of every JSON object.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format is LogFormat.JSON:
        handler.setFormatter(JsonLines(command))
        logging.captureWarnings(True)
    else:
        handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def logs_are_json() -> bool:
    """Tests whether this process logs for programs."""
    return any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers)


class JsonLines(JsonFormatter):
    """A record as one line of JSON: time, level, logger, message, command, pid; the ids that the
    message gives (job, server, rank, step, epoch); and what was raised, as ``exception``."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        """Fills ``log_data`` from ``record``."""
        log_data["time"] = datetime.fromtimestamp(record.created, UTC).isoformat(
            timespec="milliseconds"
        )
        log_data["level"] = record.levelname.lower()
        log_data["logger"] = record.name
        log_data["message"] = record.getMessage()
        log_data["command"] = self._command
        log_data["pid"] = os.getpid()
        log_data.update(ids_of(record))
        if record.exc_info:
            log_data["exception"] = self.formatException(record.exc_info)


def ids_of(record: logging.LogRecord) -> dict[str, Any]:
    """The ids in the message of ``record``: from "job %s: step %d ..." the job and the step. Of
    several of a kind, the first."""
    if not isinstance(record.args, tuple) or not isinstance(record.msg, str):
        return {}
    names = [match.group(1) for match in _PLACEHOLDER.finditer(record.msg.replace("%%", ""))]
    if len(names) != len(record.args):
        return {}
    ids: dict[str, Any] = {}
    for name, value in zip(names, record.args, strict=True):
        if name and name not in ids:
            ids[name] = value if isinstance(value, int) else str(value)
    return ids
