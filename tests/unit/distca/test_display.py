"""What a run shows while it goes on, with a terminal and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from distca.apps.report import display
from distca.apps.report.display import TrainingDisplay
from tests.unit.distca.example_record import example_record


def shown(*, terminal: bool) -> str:
    steps = example_record(n_steps=3).steps
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=80)
    with TrainingDisplay(console, "training (pool)", 3) as bar:
        for step in steps:
            bar.show(step)
    return output.getvalue()


def test_terminal_gets_a_bar_with_loss_speed_and_imbalance() -> None:
    text = shown(terminal=True)
    assert "training (pool)" in text
    assert "3/3" in text
    assert "loss 4.583  10,240 tokens/s  imbalance 1.60 -> 1.02 (measured 1.07)" in text


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0].startswith("training (pool) step 1/3 loss 5.500  10,240 tokens/s  imbalance")
    assert lines[-1].startswith("training (pool) step 3/3 loss 4.583")
    assert len(lines) <= 3
    monkeypatch.setattr(display, "LINE_INTERVAL_SECONDS", 0.0)
    assert "step 2/3" in shown(terminal=False)
