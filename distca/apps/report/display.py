"""Progress of a run in the terminal: a bar, or, where there is no terminal, a line now and then."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from distca.apps.report.record import TrainingStep
from distca.process.plain_text import plain

LINE_INTERVAL_SECONDS = 5.0
"""Between two lines where there is no terminal."""


class TrainingDisplay:
    """A context manager that shows the steps it is given.

    Args:
        console: where.
        title: what trains, in a few words.
        total_steps: steps of the run, those before a resume included.
    """

    def __init__(self, console: Console, title: str, total_steps: int) -> None:
        self._console = console
        self._title = plain(title)
        self._total = total_steps
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._progress.add_task(self._title, total=total_steps)
        self._figures = Text("waiting for the first step", style="dim", no_wrap=True)
        self._live = Live(Group(self._progress, self._figures), console=console)
        self._last_line_at = -LINE_INTERVAL_SECONDS

    def __enter__(self) -> TrainingDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, record: TrainingStep) -> None:
        """Shows a finished step."""
        figures = _in_words(record)
        self._progress.update(self._task, completed=record.step + 1)
        self._figures.plain = figures
        if not self._console.is_terminal and self._is_due(record):
            text = f"{self._title} step {record.step + 1}/{self._total} {figures}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _is_due(self, record: TrainingStep) -> bool:
        now = time.monotonic()
        last_step = record.step + 1 == self._total
        if not last_step and now - self._last_line_at < LINE_INTERVAL_SECONDS:
            return False
        self._last_line_at = now
        return True


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
