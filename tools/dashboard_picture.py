"""Draws a dashboard's panels from what a Prometheus server holds, for documents.

    python -m tools.dashboard_picture helm/distca/dashboards/overview.json \
        --prometheus http://localhost:9090 --minutes 5 --output docs/img/dashboard-overview.png

Panels of curves and of single numbers are drawn, each in its place; time is in minutes.
It is a picture of the data, not of Grafana.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, PercentFormatter

from tools.dashboard_queries import PanelQuery, panel_queries_of
from tools.prometheus_api import Prometheus

GRID_COLUMNS = 24
INCHES_PER_COLUMN, INCHES_PER_ROW = 0.62, 0.32
MAX_LEGEND_ENTRIES = 8
N_POINTS = 200
COLORS = {"green": "tab:green", "yellow": "goldenrod", "red": "tab:red"}


@dataclass(frozen=True, kw_only=True)
class Window:
    """From ``begin`` to ``end``, in seconds since 1970."""

    begin: float
    end: float

    @property
    def step_seconds(self) -> float:
        """Between two points of a curve."""
        return max((self.end - self.begin) / N_POINTS, 1.0)


def draw(dashboard_file: Path, prometheus: Prometheus, window: Window, output: Path) -> None:
    """Writes a PNG.

    Raises:
        OSError: a file cannot be read or written, or Prometheus does not answer.
        QueryError: Prometheus refuses an expression.
    """
    matplotlib.use("agg")
    dashboard = json.loads(dashboard_file.read_text())
    drawn = [panel for panel in dashboard["panels"] if panel["type"] in ("timeseries", "stat")]
    queries = panel_queries_of(dashboard_file)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in drawn)
    figure = Figure(figsize=(GRID_COLUMNS * INCHES_PER_COLUMN, rows * INCHES_PER_ROW))
    for panel in drawn:
        axes = _axes(figure, panel["gridPos"], rows)
        series = {
            _legend(query, found["metric"]): [
                ((at - window.begin) / 60, float(value)) for at, value in found["values"]
            ]
            for query in queries
            if query.panel == panel["title"]
            for found in prometheus.query_range(
                query.expression, window.begin, window.end, window.step_seconds
            )
        }
        axes.set_title(panel["title"], fontsize=8, loc="left")
        if panel["type"] == "stat":
            _draw_number(axes, panel, series)
        else:
            _draw_curves(axes, panel, series)
    figure.suptitle(dashboard["title"], x=0.01, ha="left", fontsize=11, weight="bold")
    figure.savefig(output, dpi=110)


def _axes(figure: Figure, place: dict[str, int], rows: int) -> Axes:
    """Axes at a panel's place, with room for its title and the labels of its axes."""
    top = 0.45 / (rows * INCHES_PER_ROW)  # the dashboard's own title
    height, width = (1 - top) / rows, 1 / GRID_COLUMNS
    left, bottom = place["x"] * width, 1 - top - (place["y"] + place["h"]) * height
    return figure.add_axes(
        (
            left + 1.0 * width,
            bottom + 0.9 * height,
            (place["w"] - 1.5) * width,
            (place["h"] - 1.9) * height,
        )
    )


def _legend(query: PanelQuery, metric: dict[str, str]) -> str:
    """A curve's name, as Grafana makes it from the panel's format."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: metric.get(found[1], ""), query.legend)


def _draw_number(
    axes: Axes, panel: dict[str, Any], series: dict[str, list[tuple[float, float]]]
) -> None:
    axes.axis("off")
    last = [points[-1][1] for points in series.values() if points]
    text = _written(panel, last[0]) if last else "no data"
    color = _color(panel, last[0]) if last else "tab:gray"
    axes.text(0.0, 0.35, text, fontsize=16, color=color, transform=axes.transAxes)


def _draw_curves(
    axes: Axes, panel: dict[str, Any], series: dict[str, list[tuple[float, float]]]
) -> None:
    for name, points in series.items():
        minutes, values = zip(*points, strict=True)
        axes.plot(minutes, values, linewidth=1.0, label=name)
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)
    axes.yaxis.set_major_formatter(_formatter(panel))
    if any(series) and len(series) <= MAX_LEGEND_ENTRIES:
        axes.legend(fontsize=5, loc="best")


def _color(panel: dict[str, Any], value: float) -> str:
    """That of the panel's highest threshold which ``value`` reaches."""
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step for step in steps if step["value"] is None or value >= step["value"]]
    return COLORS[reached[-1]["color"]]


def _written(panel: dict[str, Any], value: float) -> str:
    """A single number as the panel's unit wants it."""
    if _unit(panel) == "percentunit":
        return f"{value:.0%}"
    return f"{value:,.4g}"


def _unit(panel: dict[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", "short"))


def _formatter(panel: dict[str, Any]) -> Formatter:
    """The numbers of an axis as the panel's unit wants them."""
    unit = _unit(panel)
    if unit == "percentunit":
        return PercentFormatter(1.0, decimals=0)
    suffixes = {"s": "s", "Bps": "B/s", "binBps": "B/s", "bytes": "B", "decbytes": "B"}
    return EngFormatter(suffixes.get(unit, ""), places=None if unit == "short" else 1, sep="")


def main(
    dashboard: Annotated[Path, typer.Argument(help="A dashboard's JSON file.")],
    output: Annotated[Path, typer.Option(help="PNG file to write.")],
    prometheus: Annotated[str, typer.Option(help="Its address.")] = "http://localhost:9090",
    minutes: Annotated[float, typer.Option(help="Of the past that are drawn.")] = 15.0,
) -> None:
    """Draw a dashboard's panels from what a Prometheus server holds."""
    now = time.time()
    window = Window(begin=now - 60 * minutes, end=now)
    draw(dashboard, Prometheus(prometheus), window, output)


if __name__ == "__main__":
    typer.run(main)
