"""The dashboards: importable, and every query answered by what is exported."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests import ROOT
from tests.unit.monitoring.promql import labels_of
from tests.unit.monitoring.table import documented_series

FOLDER = ROOT / "helm" / "distca" / "dashboards"
COLUMNS = 24
"""Grafana's grid."""

NAMES = sorted(path.stem for path in FOLDER.iterdir())

DCGM = frozenset({"Hostname", "gpu", "UUID", "device", "modelName", "exported_pod", "clock_event"})
"""Labels of NVIDIA's dcgm-exporter."""

SERIES = {
    "up": frozenset[str](),
    "ALERTS": frozenset({"alertname", "alertstate", "namespace"}),
    **documented_series(),
    **dict.fromkeys(
        re.findall(r"^DCGM\w+", (ROOT / "docker/dcgm-counters.csv").read_text(), re.MULTILINE), DCGM
    ),
}
"""Without recorded ones: dashboards work where no rules are loaded."""


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def panels(dashboard: Any) -> Iterator[Any]:
    yield from (panel for panel in dashboard["panels"] if panel["type"] != "row")


def expand(expression: str) -> str:
    """With Grafana's own variables replaced by values of theirs."""
    return expression.replace("$__rate_interval", "5m")


@pytest.mark.parametrize("name", NAMES)
def test_every_query_names_what_is_exported(name: str) -> None:
    for panel in panels(load(name)):
        for target in panel["targets"]:
            labels = labels_of(expand(target["expr"]), SERIES)
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, target


@pytest.mark.parametrize("name", NAMES)
def test_what_happened_is_marked_in_every_dashboard(name: str) -> None:
    marks = load(name)["annotations"]["list"]
    assert [mark["name"] for mark in marks] == ["Replans", "Drains", "Recoveries", "Deployments"]
    for mark in marks:
        labels = labels_of(expand(mark["expr"]), SERIES)
        assert set(re.findall(r"{{(\w+)}}", mark["textFormat"])) <= labels, mark


@pytest.mark.parametrize("name", NAMES)
def test_variables_are_read_from_labels_that_exist_and_all_are_used(name: str) -> None:
    dashboard = load(name)
    source, *variables = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    known = {"datasource", "__rate_interval", "__all"} | {each["name"] for each in variables}
    text = json.dumps([panel["targets"] for panel in panels(dashboard)])
    for variable in variables:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert found is not None
        assert found[2] in labels_of(found[1], SERIES)
        assert f"${variable['name']}" in text, f"{name}: {variable['name']} filters nothing"
        # Where the label is missing, as the namespace outside Kubernetes, ".*" still matches.
        assert variable["includeAll"]
        assert variable["allValue"] == ".*"
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) <= known


@pytest.mark.parametrize("name", NAMES)
def test_panels_are_explained_and_do_not_overlap(name: str) -> None:
    dashboard = load(name)
    assert dashboard["uid"] == f"distca-{name}"
    assert dashboard["schemaVersion"] == 42
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["description"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list(
            "ABCDEFGH"[: len(panel["targets"])]
        )
