"""Text that came over the network stays in its line, on terminals and in logs."""

from __future__ import annotations

import io
import logging

import pytest

from distca.process.plain_text import PlainFormatter, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("node-0", "node-0"),
        ("Zürich, 東京", "Zürich, 東京"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[2Jgone\x07", "\\x1b[2Jgone\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("zero\u200bwidth\u2028line", "zero\\u200bwidth\\u2028line"),
        ("\ud800", "\\ud800"),
        ("", ""),
    ],
)
def test_characters_that_are_obeyed_are_shown(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_long_text_is_cut_and_says_so() -> None:
    assert plain("x" * 11, 10) == "x" * 10 + "... (11 characters)"
    assert plain("x" * 10, 10) == "x" * 10


def test_a_log_entry_is_one_line_and_a_traceback_keeps_its_own() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("rank lost: %s", "x\nCRITICAL forged: \x1b[31mall is lost")
    try:
        raise ValueError("bad\x1b[0m name")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "WARNING test: rank lost: x\\nCRITICAL forged: \\x1b[31mall is lost"
    assert lines[1] == "ERROR test: failed"
    assert lines[2].startswith("Traceback")
    assert lines[-1] == "ValueError: bad\\x1b[0m name"
    assert "\x1b" not in stream.getvalue()
