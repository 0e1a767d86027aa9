"""The outcome of a run, shown in the terminal."""

from __future__ import annotations

from rich.console import Console

from distca.apps.report.record import RunRecord
from distca.apps.report.summary import summary_table
from distca.process.plain_text import plain
from distca.run_folder import RunFolder


def show_outcome(folder: RunFolder, console: Console) -> None:
    """Shows the table of the run, if it got so far, and where report, checkpoint and logs lie."""
    if folder.record.exists():
        console.print()
        console.print(summary_table(RunRecord.load(folder.record)))
    lines = [
        ("Report", folder.report if folder.report.exists() else None),
        ("Checkpoint", folder.newest_checkpoint()),
        ("Logs", folder.logs if folder.logs.is_dir() else None),
    ]
    for what, path in lines:
        if path is not None:
            console.print(plain(f"{what}: {path}"), soft_wrap=True, highlight=False, markup=False)
