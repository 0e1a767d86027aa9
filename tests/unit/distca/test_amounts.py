"""Amounts in the unit that people would choose."""

from __future__ import annotations

import pytest

from distca.process.amounts import duration_text, size_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (140 * 2**30, "140 GiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "long", "short"),
    [
        (119.9, "119 seconds", "119 s"),
        (120, "2 minutes", "2 min"),
        (47 * 3600, "47 hours", "47 h"),
        (48 * 3600, "2 days", "2 d"),
    ],
)
def test_durations(seconds: float, long: str, short: str) -> None:
    assert duration_text(seconds) == long
    assert duration_text(seconds, short=True) == short
