"""What Grafana is given is what Grafana reads.

Dashboards are checked against Grafana's own types (tools/grafana_schema makes a JSON schema of
them), provisioning files against the fields that its documentation lists.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError

from tests import ROOT

HERE = Path(__file__).parent
DASHBOARDS = sorted((ROOT / "helm" / "distca" / "dashboards").glob("*.json"))
PROVISIONING = ROOT / "docker" / "grafana"


def schema(file: str) -> dict[str, Any]:
    return dict(json.loads((HERE / file).read_text()))


def complaints(schema: dict[str, Any], document: object) -> list[str]:
    """What is wrong with ``document``, by place."""

    def place(error: ValidationError) -> str:
        return f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"

    return [place(error) for error in Draft7Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_follows_grafanas_schema(path: Path) -> None:
    assert complaints(schema("grafana-dashboard.schema.json"), json.loads(path.read_text())) == []


@pytest.mark.parametrize("kind", ["datasources", "dashboards"])
def test_provisioning_follows_the_documented_fields(kind: str) -> None:
    definitions = schema("grafana-provisioning.schema.json")
    files = sorted((PROVISIONING / kind).glob("*.yaml"))
    assert files
    for file in files:
        given = yaml.safe_load(file.read_text())
        assert complaints({**definitions, "$ref": f"#/definitions/{kind}"}, given) == []


def test_dashboards_are_mounted_where_the_provider_looks() -> None:
    provider = yaml.safe_load((PROVISIONING / "dashboards" / "distca.yaml").read_text())
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    mounts = dict(each.split(":")[:2] for each in compose["services"]["grafana"]["volumes"])
    assert mounts["./grafana"] == "/etc/grafana/provisioning"
    assert mounts["../helm/distca/dashboards"] == provider["providers"][0]["options"]["path"]


def test_data_source_is_the_prometheus_of_compose() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "distca.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    scrape = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scrape["scrape_interval"]
