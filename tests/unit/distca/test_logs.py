"""Logs for programs: one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

import pytest

from distca.process.logs import JsonLines, ids_of


def record(message: object, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.WARNING, __file__, 1, message, args, None)
    vars(made).update(fields)
    return made


def test_a_record_is_one_object_on_one_line() -> None:
    line = JsonLines("train").format(record("rank %d of job %s:\n%s", 3, "j", "a\nb"))
    assert "\n" not in line
    shown = json.loads(line)
    assert datetime.fromisoformat(shown.pop("time")).tzinfo is not None
    assert shown.pop("pid") > 0
    assert shown == {
        "level": "warning",
        "logger": "a.b",
        "message": "rank 3 of job j:\na\nb",
        "command": "train",
        "rank": 3,
        "job": "j",
    }


def test_what_was_raised_is_a_field() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        line = JsonLines("train").format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: no\nway" in json.loads(line)["exception"]


@pytest.mark.parametrize(
    ("message", "args", "ids"),
    [
        ("job %s: planning step %d failed", ("j", 4), {"job": "j", "step": 4}),
        ("server %s joined: %s at %s", ("s", "d", "a"), {"server": "s"}),
        ("server %s replaces server %s", ("s", "t"), {"server": "s"}),
        ("100%% of step %d in %.1f s", (1, 2.5), {"step": 1}),
        ("unknown job", (), {}),
        ("%s", ("job %s",), {}),
        ("job %s", (), {}),
    ],
)
def test_ids_are_what_the_message_is_about(
    message: str, args: tuple[object, ...], ids: dict[str, object]
) -> None:
    assert ids_of(record(message, *args)) == ids
