"""What each value set renders: the defaults as they are, every other one by what it changes.

``make chart-rendered`` writes what is rendered now; the difference is for the eyes of a reviewer.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import yaml

from tests.deploy.helm.chart import CHART, VALUE_SETS, rendered

FOLDER = Path(__file__).parent / "rendered"
DEFAULTS = "default-values.yaml"

REVIEWED = sorted({*VALUE_SETS} - {"customised-values.yaml"})
"""In the one that is left out every value is another, for no purpose but that; its manifests are
checked against their schemas as all others are."""

LEFT_OUT = {"ConfigMap", "PrometheusRule", "Secret"}
"""Dashboards and rules are files of the chart's own; the Secret of tokens is random."""


def manifests(value_set: str) -> dict[str, list[str]]:
    """Lines of each manifest by its kind and name, alike in every version of the chart."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    found = {}
    for each in rendered(value_set, "image.tag=tag"):
        if each["kind"] not in LEFT_OUT:
            text = yaml.safe_dump(each, width=100)
            text = text.replace(f"distca-{version}", "distca-VERSION")
            text = text.replace(f"version: {version}", "version: VERSION")
            name = f"{each['metadata']['namespace']}/{each['metadata']['name']}"
            found[f"{each['kind']} {name}"] = text.splitlines()
    return found


def shown(value_set: str) -> str:
    """The text that is reviewed: a manifest of the defaults' that is not there is a line alone."""
    default, found = manifests(DEFAULTS), manifests(value_set)
    if value_set == DEFAULTS:
        return "".join("\n".join(["---", *lines, ""]) for lines in found.values())
    shown = [f"--- {name}" for name in default if name not in found]
    for name, lines in found.items():
        changes = list(difflib.unified_diff(default.get(name, []), lines, n=1, lineterm=""))[2:]
        shown += [f"+++ {name}"] * bool(changes)
        shown += ["@@" if each.startswith("@@") else each for each in changes]
    return "\n".join([*shown, ""])


def file_of(value_set: str) -> Path:
    return FOLDER / value_set.replace("-values.yaml", ".yaml" if value_set == DEFAULTS else ".diff")


@pytest.mark.parametrize("value_set", REVIEWED)
def test_a_value_set_renders_what_was_reviewed(value_set: str) -> None:
    assert file_of(value_set).read_text() == shown(value_set)


def test_no_file_is_left_over() -> None:
    assert {*FOLDER.iterdir()} == {*map(file_of, REVIEWED)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in REVIEWED:
        file_of(name).write_text(shown(name))
