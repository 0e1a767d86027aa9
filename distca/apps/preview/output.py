"""Output of a preview: sections and verdicts in the terminal, and on one page with a picture."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from core_attention.whole_file import write_whole
from distca.apps.preview.sections import PageSection
from distca.apps.preview.settings import OutputSettings
from distca.apps.simulator.verdict import Judgement, Worth
from distca.process.plain_text import plain, plain_lines
from distca.shown_errors import shown_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRONG_INPUT_EXIT_CODE = 2

_COLOURS = {
    Worth.GAIN: "green",
    Worth.SLOWER: "red",
    Worth.NOTHING_TO_GAIN: "yellow",
    Worth.ONE_SERVER: "yellow",
}


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A command's findings.

    Attributes:
        title: of all.
        sections: texts and tables.
        verdicts: in frames below them.
        draw: makes the picture.
    """

    title: str
    sections: Sequence[PageSection]
    verdicts: Sequence[Judgement]
    draw: Callable[[], Figure]

    def show(self, console: Console) -> None:
        """Prints everything but the picture."""
        console.print(plain(self.title), highlight=False, markup=False)
        console.print()
        for section in self.sections:
            print_section(console, section)
        for verdict in self.verdicts:
            console.print(
                Panel(
                    Text(plain_lines(verdict.text)),
                    title=f"Verdict: {verdict.kind}",
                    title_align="left",
                    border_style=_COLOURS.get(verdict.kind, "blue"),
                )
            )

    def save(self, output: OutputSettings) -> None:
        """Writes the picture as PNG, and all as a page that needs nothing else, as asked for."""
        if output.png is None and output.html is None:
            return
        from distca.apps.report.environment import page_environment
        from distca.apps.report.style import figure_style

        figure = self.draw()
        svg = io.StringIO()
        with figure_style():
            figure.savefig(svg, format="svg", metadata={"Date": None})
            if output.png is not None:
                output.png.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(output.png, format="png")
        if output.html is not None:
            template = page_environment("distca.apps.preview").get_template("preview.html.jinja")
            page = template.render(
                title=self.title,
                verdict=" ".join(verdict.text for verdict in self.verdicts),
                figure=_element(svg.getvalue()),
                sections=self.sections,
            )
            output.html.parent.mkdir(parents=True, exist_ok=True)
            write_whole(output.html, page)


def print_section(console: Console, section: PageSection) -> None:
    """Prints a heading, texts and a table."""
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


def _element(svg: str) -> object:
    """The figure as markup; matplotlib escapes the texts in it."""
    from markupsafe import Markup

    return Markup(svg[svg.index("<svg") :])


@contextmanager
def wrong_input_ends() -> Iterator[None]:
    """Shows an error that is meant for people by name and in one line, and exits; defects pass."""
    try:
        yield
    except Exception as error:
        shown = shown_error(error)
        if shown is None:
            raise
        name, text = shown
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[bold red]{name}[/]: ", end="")
        console.print(plain(" ".join(text.split())), markup=False, highlight=False)
        raise typer.Exit(WRONG_INPUT_EXIT_CODE) from error
