"""The pinned list of metrics: the tables of ``docs/metrics.md``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests import ROOT

DOCUMENT = ROOT / "docs" / "metrics.md"

_ROW = re.compile(r"\| `(?P<name>\w+)` \| (?P<kind>\w+) \| (?P<labels>[^|]*) \| (?P<text>[^|]*) \|")

HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Row:
    """One metric.

    Attributes:
        name: as Prometheus knows it; of a histogram, without its suffixes.
        kind: ``counter``, ``gauge`` or ``histogram``.
        labels: its own, without those that Prometheus adds; of a histogram without ``le``.
        text: its help text.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    def series(self) -> dict[str, frozenset[str]]:
        """The labels of every series name that the metric has in Prometheus."""
        labels = frozenset(self.labels)
        if self.kind != "histogram":
            return {self.name: labels}
        return {
            self.name + suffix: labels | {"le"} if suffix == "_bucket" else labels
            for suffix in HISTOGRAM_SUFFIXES
        }


def documented_metrics() -> dict[str, dict[str, Row]]:
    """The rows of every section that has a table, by name."""
    sections: dict[str, dict[str, Row]] = {}
    section = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        found = _ROW.fullmatch(line)
        if found:
            labels = tuple(re.findall(r"`(\w+)`", found["labels"]))
            row = Row(found["name"], found["kind"], labels, found["text"])
            sections.setdefault(section, {})[row.name] = row
    return sections


def documented_series() -> dict[str, frozenset[str]]:
    """The labels of every series of the project, by its name in Prometheus."""
    return {
        name: labels
        for rows in documented_metrics().values()
        for row in rows.values()
        for name, labels in row.series().items()
    }
