"""What a run shows while it goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from distca.apps.report import display
from distca.apps.report.display import TrainingDisplay
from tests.unit.distca.example_record import example_record


def test_there_is_a_line_now_and_then_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for interval_seconds, n_lines in ((display.LINE_INTERVAL_SECONDS, 2), (0.0, 3)):
        monkeypatch.setattr(display, "LINE_INTERVAL_SECONDS", interval_seconds)
        output = io.StringIO()
        progress = TrainingDisplay(Console(file=output, width=80), "training (pool)", 3)
        for step in example_record(n_steps=3).steps:
            progress.show(step)
        assert len(output.getvalue().splitlines()) == n_lines
