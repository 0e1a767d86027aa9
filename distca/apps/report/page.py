"""The report of a run as one HTML page that needs nothing else: figures are embedded."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from core_attention.whole_file import write_whole
from distca.apps.report.environment import page_environment
from distca.apps.report.figures import draw_figures, save_figures
from distca.apps.report.record import RunRecord
from distca.apps.report.style import figure_style
from distca.apps.report.summary import summary_rows

_CAPTIONS = {
    "loss": "Mean over the predicted tokens of all ranks, before each update.",
    "imbalance": "Time of the slowest server in each tick over the mean of all servers. Without "
    "planning, every rank would run the attention of its own documents.",
    "load": "The step that would have been the most unbalanced without planning.",
}


def write_report(record: RunRecord, page: Path, figures: Path) -> None:
    """Writes the page to ``page`` and the figures as PNG into ``figures``."""
    drawn = draw_figures(record)
    save_figures(drawn, figures)
    write_whole(page, render_page(record, drawn))


def render_page(record: RunRecord, figures: Mapping[str, Figure]) -> str:
    """The page's HTML."""
    environment = page_environment("distca.apps.report")
    return environment.get_template("report.html.jinja").render(
        record=record,
        rows=summary_rows(record),
        figures=[
            {"name": name, "caption": _CAPTIONS[name], "png": _base64_png(figure)}
            for name, figure in figures.items()
        ],
    )


def _base64_png(figure: Figure) -> str:
    buffer = io.BytesIO()
    with figure_style():
        figure.savefig(buffer, format="png")
    return base64.b64encode(buffer.getvalue()).decode()
