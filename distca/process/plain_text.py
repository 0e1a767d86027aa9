"""Text of others, made safe to show: names, reasons and errors that came over the network.

A terminal obeys control characters, a log takes a newline for the next entry, and marks that turn
the direction of writing make a line read as another one.
"""

from __future__ import annotations

import logging
from typing import Final

MAX_REASON_CHARACTERS: Final = 1000
"""The longest reason of a member, in logs and in messages to others."""


def plain(text: str, limit: int | None = None) -> str:
    """``text`` on one line, with every character that is not printable as an escape like ``\\x1b``,
    and cut after ``limit`` characters."""
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def plain_lines(text: str) -> str:
    """As :func:`plain`, but lines stay lines: for errors and advice, which may have several."""
    return "\n".join(plain(line) for line in text.split("\n"))


def figure_text(text: str) -> str:
    """As :func:`plain`, for matplotlib, which takes what stands between two ``$`` for a formula."""
    return plain(text).replace("$", r"\$")


class PlainFormatter(logging.Formatter):
    """Formats records so that whatever comes in their texts stays in their lines. Tracebacks keep
    their own line breaks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - named by logging
        record.message = plain(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802
        return plain_lines(super().formatException(ei))  # type: ignore[arg-type]


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
