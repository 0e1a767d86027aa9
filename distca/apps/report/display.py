"""Progress of a run in the terminal: a line now and then."""

from __future__ import annotations

import time

from rich.console import Console

from distca.apps.report.record import TrainingStep
from distca.process.plain_text import plain

LINE_INTERVAL_SECONDS = 5.0


class TrainingDisplay:
    """Shows some of the steps that it is given, the last one among them.

    Args:
        console: where.
        title: what trains, in a few words.
        total_steps: steps of the run, those before a resume included.
    """

    def __init__(self, console: Console, title: str, total_steps: int) -> None:
        self._console, self._title, self._total = console, plain(title), total_steps
        self._last_line_at = -LINE_INTERVAL_SECONDS

    def show(self, record: TrainingStep) -> None:
        """Shows a finished step, if it is the last one, or the line before is old enough."""
        now = time.monotonic()
        last = record.step + 1 == self._total
        if last or now - self._last_line_at >= LINE_INTERVAL_SECONDS:
            self._last_line_at = now
            text = f"{self._title} step {record.step + 1}/{self._total} {_in_words(record)}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _in_words(record: TrainingStep) -> str:
    parts = [
        f"loss {record.loss:.3f}",
        f"{record.tokens / record.step_seconds:,.0f} tokens/s",
    ]
    if record.home_imbalance is not None and record.planned_imbalance is not None:
        parts.append(f"imbalance {record.home_imbalance:.2f} -> {record.planned_imbalance:.2f}")
        if record.measured_imbalance is not None:
            parts[-1] += f" (measured {record.measured_imbalance:.2f})"
    return "  ".join(parts)
