"""Generations: higher with every start, whatever the clock does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from control_plane.leadership.epochs import first_epoch, next_generation
from tests.support.errors import refused


def test_generation_is_the_time_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.leadership.epochs.time.time", lambda: 1234.9)
    assert next_generation(None) == 1234
    assert first_epoch(1234) == 1234 << 20


def test_generations_go_up_when_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    for now in (1000.0, 1000.5, 10.0, 2000.0):
        monkeypatch.setattr("control_plane.leadership.epochs.time.time", lambda now=now: now)
        given.append(next_generation(tmp_path / "state"))
    assert given == [1000, 1001, 1002, 2000]


def test_generations_asked_for_at_once_differ(tmp_path: Path) -> None:
    given: list[int] = []
    threads = [
        threading.Thread(target=lambda: given.append(next_generation(tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(set(given)) == 8


def test_file_that_holds_no_number_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "generation").write_text("yesterday\n")
    with refused():
        next_generation(tmp_path)
