"""A preview as one HTML page that needs nothing else: the figure is embedded as SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from core_attention.whole_file import write_whole
from distca.preview.sections import Section
from distca.report.environment import page_environment
from distca.report.style import figure_style


def save_png(figure: Figure, path: Path) -> None:
    """Writes the figure to ``path`` as PNG, whatever its ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure_style():
        figure.savefig(path, format="png")


def save_page(
    title: str, verdict: str, figure: Figure, sections: Sequence[Section], path: Path
) -> None:
    """Writes the page to ``path``; an empty ``verdict`` is left out."""
    environment = page_environment("distca.preview")
    page = environment.get_template("preview.html.jinja").render(
        title=title, verdict=verdict, figure=_svg(figure), sections=sections
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)


def save_drawings(
    figure: Figure,
    png: Path | None,
    html: Path | None,
    title: str,
    verdict: str,
    sections: Sequence[Section],
) -> None:
    """Writes the figure to ``png`` and the page with it to ``html``, whichever is asked for."""
    if png is not None:
        save_png(figure, png)
    if html is not None:
        save_page(title, verdict, figure, sections, html)


def _svg(figure: Figure) -> Markup:
    """The figure as an SVG element; matplotlib escapes the texts in it."""
    buffer = io.StringIO()
    with figure_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return Markup(text[text.index("<svg") :])
