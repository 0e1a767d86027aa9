"""What a run shows while it goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from distca.apps.report import display
from distca.apps.report.display import TrainingDisplay
from tests.unit.distca.example_record import example_record


def shown() -> list[str]:
    output = io.StringIO()
    progress = TrainingDisplay(Console(file=output, width=80), "training (pool)", 3)
    for step in example_record(n_steps=3).steps:
        progress.show(step)
    return output.getvalue().splitlines()


def test_there_is_a_line_now_and_then_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = shown()
    assert first.startswith("training (pool) step 1/3 loss 5.500  10,240 tokens/s  imbalance")
    assert last == (
        "training (pool) step 3/3 loss 4.583  10,240 tokens/s  imbalance 1.60 -> 1.02 "
        "(measured 1.07)"
    )
    monkeypatch.setattr(display, "LINE_INTERVAL_SECONDS", 0.0)
    assert len(shown()) == 3
