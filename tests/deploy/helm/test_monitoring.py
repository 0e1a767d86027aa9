"""ServiceMonitor, PodMonitor, PrometheusRule and dashboards."""

from __future__ import annotations

import json
import re

import yaml

from tests.deploy.helm.chart import CHART, Manifest, only, rendered
from tests.deploy.helm.test_example_jobs import JOBS, pod


def shipped_groups() -> list[Manifest]:
    """The rule groups in the chart's files."""
    files = sorted((CHART / "rules").glob("*.yaml"))
    return [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]


def test_all_rules_are_shipped_and_expressions_are_untouched() -> None:
    groups = only(rendered("monitoring-values.yaml"), "PrometheusRule")["spec"]["groups"]
    shipped = shipped_groups()
    assert sum(len(group["rules"]) for group in shipped) > 0
    assert [group["name"] for group in groups] == [group["name"] for group in shipped]
    for group, original in zip(groups, shipped, strict=True):
        assert group | {"rules": []} == original | {"rules": []}
        for rule, source in zip(group["rules"], original["rules"], strict=True):
            assert rule["expr"] == source["expr"]
            assert rule.get("for") == source.get("for")


def test_alerts_get_the_releases_labels_and_a_link_to_the_runbook() -> None:
    groups = only(rendered("customised-values.yaml"), "PrometheusRule")["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert alert["labels"]["team"] == "training"
        link = alert["annotations"]["runbook_url"]
        assert link == f"https://docs.example.com/distca/runbook#{alert['alert'].lower()}"


def test_every_dashboard_becomes_a_config_map_for_the_sidecar() -> None:
    files = sorted((CHART / "dashboards").glob("*.json"))
    assert files
    maps = [each for each in rendered("customised-values.yaml") if each["kind"] == "ConfigMap"]
    assert len(maps) == len(files)
    data = {name: text for each in maps for name, text in each["data"].items()}
    for path in files:
        assert json.loads(data[path.name]) == json.loads(path.read_text())
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "DistCA"}


def job_of(rules: list[Manifest], labels: dict[str, str], port: str) -> str | None:
    """The job that relabelling gives to a port of a pod with ``labels``; None if it is dropped."""
    meta = {f"label_{re.sub(r'[./-]', '_', name)}": value for name, value in labels.items()}
    meta["container_port_name"] = port
    for rule in rules:
        names = [each.removeprefix("__meta_kubernetes_pod_") for each in rule["source_labels"]]
        text = rule.get("separator", ";").join(meta.get(name, "") for name in names)
        if "target_label" in rule:
            meta[rule["target_label"]] = text
        elif re.fullmatch(rule["regex"], text) is None:
            return None
    return meta["job"]


def test_plain_scrape_configs_find_what_the_monitors_find() -> None:
    (config,) = yaml.safe_load((JOBS[0].parent / "prometheus.yml").read_text())["scrape_configs"]
    templates = [
        only(rendered(), kind)["spec"]["template"] for kind in ("Deployment", "StatefulSet")
    ]
    pods = [(each["metadata"]["labels"], each["spec"]) for each in templates]
    found = {
        (port["name"], job_of(config["relabel_configs"], labels, port["name"]))
        for labels, spec in [*pods, pod(JOBS[0]), ({"app": "other"}, pods[0][1])]
        for port in spec["containers"][0]["ports"]
    }
    scraped = {(name, job) for name, job in found if job is not None}
    assert scraped == {
        ("metrics", "control-plane"),
        ("metrics-0", "attention-node"),
        ("metrics-0", "trainer"),
        ("metrics-1", "trainer"),
    }
