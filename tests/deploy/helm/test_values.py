"""values.yaml: every value has a comment, stands in the README, is in a value set, and changes what
that renders."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import yaml

from tests.deploy.helm.chart import CHART, KUBE_VERSION, NAMESPACE, RELEASE, VALUE_SETS, helm
from tools.chart_readme import Value, read_values, table, with_table

VALUES = read_values((CHART / "values.yaml").read_text())

Set = dict[str, Any]

SETS: dict[str, Set] = {
    name: yaml.safe_load((CHART / "ci" / name).read_text()) or {} for name in VALUE_SETS
}


DIGEST = f"sha256:{'1' * 64}"

MORE: list[Set] = [
    {
        "controlPlane": {
            "replicas": 2,
            "leaderElection": {"enabled": True},
            "image": {"tag": "1.2.3"},
            "podDisruptionBudget": {"enabled": False},
        },
        "attentionNode": {"image": {"digest": DIGEST}},
        "gpu": {"resourceName": "nvidia.com/mig-1g.10gb"},
        "autoscaling": {"enabled": True, "metric": "queue_depth"},
    },
    {"gpu": {"dra": {"enabled": True, "deviceClassName": "mig.nvidia.com"}}},
]
"""What the value sets give as it comes, or where another value hides it."""


def render(values: Set) -> str:
    """The manifests, without the random Secret; empty if the chart refuses the values."""
    settings = (f"--set-json={key}={json.dumps(value)}" for key, value in values.items())
    return _render(*settings)


@cache
def _render(*arguments: str) -> str:
    where = (f"--namespace={NAMESPACE}", KUBE_VERSION)
    done = helm("template", RELEASE, str(CHART), *where, *arguments)
    documents = done.stdout.split("\n---\n")
    return "\n---\n".join(text for text in documents if "\nkind: Secret\n" not in text)


def without(values: Set, path: str) -> Set:
    """``values`` with the default of one of them."""
    name, _, rest = path.partition(".")
    kept = {key: value for key, value in values.items() if key != name}
    return {**kept, name: without(values[name], rest)} if rest else kept


def merged(*overlays: dict[str, Any]) -> dict[str, Any]:
    """Deep union; later ones win."""
    result: dict[str, Any] = {}
    for overlay in overlays:
        for key, value in overlay.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.path)
def test_every_value_changes_what_is_rendered(value: Value) -> None:
    """In one of those that give it."""
    assert any(
        "" != render(each) != render(without(each, value.path))
        for each in (*SETS.values(), *MORE)
        if lookup(each, value.path) is not None
    )


def test_every_value_is_used_by_a_value_set() -> None:
    """Each of which is rendered, linted and validated; what is on or off is on in one, and off in
    one."""
    unused = []
    for value in VALUES:
        used = [found for each in SETS.values() if (found := lookup(each, value.path)) is not None]
        if not used:
            unused.append(value.path)
        elif value.default in ("true", "false"):
            assert {json.loads(value.default), *used} == {True, False}, value.path
    assert unused == []


def lookup(values: dict[str, Any], path: str) -> Any:
    """The value at ``path``; None if it is not set."""
    here: Any = values
    for name in path.split("."):
        here = here.get(name) if isinstance(here, dict) else None
    return here


def test_the_readme_is_what_values_yaml_says() -> None:
    readme = (CHART / "README.md").read_text()
    assert with_table(readme, table(list(VALUES))) == readme, "run `make chart-readme`"


def test_large_numbers_are_written_in_digits() -> None:
    """A number in a file is a float to helm, which writes a million as 1e+06: no integer."""
    million = 1_000_000
    counted = merged(
        {
            "controlPlane": {
                "replicas": million,
                "leaderElection": {"enabled": True},
                "planningThreads": million,
                "terminationGracePeriodSeconds": million,
                "podDisruptionBudget": {"minAvailable": 999_999},
            },
            "attentionNode": {
                "replicas": 2 * million,
                "rollout": {"maxUnavailable": million},
                "podDisruptionBudget": {"maxUnavailable": million},
            },
        }
    )
    scaling = {"minReplicas": million, "maxReplicas": 2 * million, "target": million}
    for extra in (
        {},
        {"attentionNode": {"kind": "Deployment"}},
        {"autoscaling": {**scaling, "enabled": True}},
        {
            "autoscaling": {
                **scaling,
                "enabled": True,
                "kind": "KEDA",
                "keda": {"pollingSeconds": million},
            }
        },
    ):
        text = render(merged(counted, extra))
        assert "1000000" in text
        assert "e+0" not in text
