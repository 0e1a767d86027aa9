"""Shows a preview's sections and verdict in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from distca.preview.sections import Section
from distca.process.plain_text import plain, plain_lines
from distca.simulator.verdict import Kind, Verdict

_COLOURS = {
    Kind.GAIN: "green",
    Kind.SLOWER: "red",
    Kind.NOTHING_TO_GAIN: "yellow",
    Kind.ONE_SERVER: "yellow",
}


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Prints headings, texts and tables."""
    for section in sections:
        console.print(Text(plain(section.title), "bold"))
        for paragraph in section.paragraphs:
            console.print(Text(plain_lines(paragraph)))
        if section.head:
            table = Table(show_edge=False)
            for index, name in enumerate(section.head):
                table.add_column(name, justify="right" if index else "left")
            for row in section.rows:
                table.add_row(*(Text(plain(cell)) for cell in row))
            console.print(table)
        console.print()


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Prints the verdict in a frame."""
    console.print(
        Panel(
            Text(plain_lines(verdict.text)),
            title=f"Verdict: {verdict.kind}",
            title_align="left",
            border_style=_COLOURS.get(verdict.kind, "blue"),
        )
    )
