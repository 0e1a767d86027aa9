"""The rule files of the chart, and the series that they add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tests import ROOT
from tests.unit.monitoring.promql import TARGET_LABELS, Labels, labels_of
from tests.unit.monitoring.table import documented_series

FOLDER = ROOT / "helm" / "distca" / "rules"


def rules(kind: str) -> Iterator[dict[str, Any]]:
    """All rules of a kind: ``"record"`` or ``"alert"``."""
    for path in sorted(FOLDER.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from (rule for rule in group["rules"] if kind in rule)


def known_series() -> dict[str, Labels]:
    """Exported and recorded series, with their labels but for those of the target."""
    series: dict[str, Labels] = {"up": frozenset(), **documented_series()}
    for rule in rules("record"):
        labels = labels_of(rule["expr"], series) | rule.get("labels", {}).keys()
        series[rule["record"]] = series.get(rule["record"], labels) & labels - TARGET_LABELS
    return series
