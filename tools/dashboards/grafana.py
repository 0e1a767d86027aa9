"""Just enough of Grafana's dashboard JSON: variables, rows, and panels of PromQL queries.

Panels are laid out from left to right in rows of 24 columns; identifiers follow from the order, so
that equal dashboards give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 42
"""The last of Grafana's first dashboard schema (Grafana 12); older releases read it too."""

COLUMNS = 24

ANNOTATION_STEP = "15s"
"""How closely annotations are looked for; what happened lasts for a minute in their expressions."""

Json = dict[str, Any]

_DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the name of its series, in which ``{{label}}`` stands for a label."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Threshold:
    """A colour from a value on; None is the lowest."""

    value: float | None
    color: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows, with its unit in ``unit``.
        description: what to make of it.
        queries: whose series it shows.
        unit: of Grafana's units: ``s``, ``bytes``, ``Bps``, ``percentunit``, ``short``, ...
        kind: of Grafana's panels.
        width: of 24 columns.
        height: in grid rows of 30 pixels.
        stacked: areas on top of each other.
        thresholds: colours; lines too in a time series.
        lowest, highest: bounds of the axis, or None.
        decimals: digits behind the point, or None for Grafana's choice.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "bargauge", "table"] = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False
    thresholds: Sequence[Threshold] = ()
    lowest: float | None = None
    highest: float | None = None
    decimals: int | None = None

    def to_json(self, identifier: int, x: int, y: int) -> Json:
        """The panel at column ``x`` and grid row ``y``."""
        return {
            "id": identifier,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": _DATA_SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._options(),
            "transformations": self._transformations(),
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": _DATA_SOURCE,
                    "editorMode": "code",
                    "expr": query.expr,
                    "legendFormat": query.legend or "__auto",
                    "range": self.kind == "timeseries",
                    "instant": self.kind != "timeseries",
                    "format": "table" if self.kind == "table" else "time_series",
                }
                for index, query in enumerate(self.queries)
            ],
        }

    def _defaults(self) -> Json:
        defaults: Json = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if self.kind == "timeseries" else "thresholds"},
            "thresholds": {
                "mode": "absolute",
                "steps": [
                    {"value": step.value, "color": step.color}
                    for step in self.thresholds or (Threshold(None, "green"),)
                ],
            },
        }
        bounds = {"min": self.lowest, "max": self.highest, "decimals": self.decimals}
        defaults |= {name: value for name, value in bounds.items() if value is not None}
        if self.kind == "timeseries":
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 30 if self.stacked else 5,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "dashed" if self.thresholds else "off"},
            }
        return defaults

    def _options(self) -> Json:
        if self.kind == "timeseries":
            return {
                "legend": {
                    "displayMode": "table",
                    "placement": "bottom",
                    "showLegend": True,
                    "calcs": ["lastNotNull", "mean", "max"],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        if self.kind == "table":
            return {"showHeader": True, "cellHeight": "sm"}
        reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        if self.kind == "bargauge":
            return {"reduceOptions": reduced, "orientation": "horizontal", "displayMode": "basic"}
        return {
            "reduceOptions": reduced,
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
        }

    def _transformations(self) -> list[Json]:
        if self.kind != "table":
            return []
        hidden = ("Time", "Value", "__name__", "instance", "job", "pod", "container", "endpoint")
        return [
            {
                "id": "organize",
                "options": {"excludeByName": dict.fromkeys((*hidden, "service"), True)},
            }
        ]


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """A choice of label values, several at a time; at first, all.

    Attributes:
        name: of the variable.
        label: for people.
        query: for example ``label_values(up, job)``.
    """

    name: str
    label: str
    query: str

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": _DATA_SOURCE,
            "definition": self.query,
            "query": {"query": self.query, "refId": f"variable-{self.name}"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            # Not the values that there are: a label that is missing, as the namespace is outside
            # Kubernetes, is matched too.
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
            "hide": 0,
        }


@dataclass(frozen=True)
class Annotation:
    """Moments that are marked in every curve.

    Attributes:
        name: of what happened; can be switched off by it.
        expr: a PromQL expression that has a value when it happens, and none otherwise.
        text: of the mark, in which ``{{label}}`` stands for a label.
        color: of the mark.
    """

    name: str
    expr: str
    text: str
    color: str

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "datasource": _DATA_SOURCE,
            "enable": True,
            "hide": False,
            "iconColor": self.color,
            "expr": self.expr,
            "step": ANNOTATION_STEP,
            "titleFormat": self.name,
            "textFormat": self.text,
        }


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A dashboard, one JSON file.

    Attributes:
        name: of the file; also its uid, with ``distca-`` in front.
        title: for people.
        description: what question it answers.
        variables: besides the data source.
        annotations: what is marked in its curves.
        rows: its panels.
    """

    name: str
    title: str
    description: str
    variables: Sequence[Variable]
    annotations: Sequence[Annotation]
    rows: Sequence[Row]

    def to_json(self) -> Json:
        """What Grafana imports."""
        return {
            "uid": f"distca-{self.name}",
            "title": f"DistCA / {self.title}",
            "description": self.description,
            "tags": ["distca"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "title": "DistCA",
                    "type": "dashboards",
                    "tags": ["distca"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "templating": {
                "list": [_data_source_variable(), *(each.to_json() for each in self.variables)]
            },
            "annotations": {"list": [each.to_json() for each in self.annotations]},
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[Json]:
        identifier, y = 1, 0
        for row in self.rows:
            yield {
                "id": identifier,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
                "panels": [],
            }
            identifier, y, x, height = identifier + 1, y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, height = 0, y + height, 0
                yield panel.to_json(identifier, x, y)
                identifier, x, height = identifier + 1, x + panel.width, max(height, panel.height)
            y += height


def _data_source_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "refresh": 1,
        "hide": 0,
    }
