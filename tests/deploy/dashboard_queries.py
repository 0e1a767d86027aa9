"""The expressions of dashboards and rules, as Grafana and Prometheus execute them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RATE_INTERVAL = "20s"
"""Grafana's $__rate_interval: four times the scrape interval of docker/prometheus.yml."""


@dataclass(frozen=True)
class PanelQuery:
    """One expression of a panel, its variables at their defaults."""

    dashboard: str
    panel: str
    ref: str
    expression: str
    legend: str

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel} / {self.ref}"


def panel_queries(folder: Path) -> list[PanelQuery]:
    """All queries of the dashboards in ``folder``, in order."""
    return [
        query
        for path in sorted(folder.glob("*.json"))
        for query in _queries(path.stem, json.loads(path.read_text()))
    ]


def _queries(name: str, dashboard: dict[str, Any]) -> Iterator[PanelQuery]:
    values = {
        variable["name"]: variable["allValue"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    }
    values["__rate_interval"] = RATE_INTERVAL
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = re.sub(
                r"\$\{?(\w+)\}?", lambda found: str(values[found[1]]), target["expr"]
            )
            yield PanelQuery(
                name, panel["title"], target["refId"], expression, target.get("legendFormat", "")
            )


def rule_names(folder: Path) -> set[str]:
    """Names of all alerts and recording rules in ``folder``."""
    return {
        rule.get("alert") or rule["record"]
        for path in folder.glob("*.yaml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    }
