"""Recording rules and alerts: their queries, their labels, their runbook, and promtool's tests."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.service.monitoring.rules import FOLDER, known_series, rules
from tests.support.programs import ran
from tests.unit.monitoring.promql import labels_of

DOCS = ROOT / "docs"
PROMTOOL_TESTS = Path(__file__).parent / "promtool"

RUNBOOK_PARTS = ("**Meaning.**", "**Check.**", "**Do.**")


def runbook_sections() -> dict[str, str]:
    """The text of each of the runbook's sections by its heading."""
    parts = re.split(r"^## (\w+)\n", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_query_names_what_exists() -> None:
    series = known_series()
    for rule in (*rules("record"), *rules("alert")):
        labels_of(rule["expr"], series)


def test_texts_of_alerts_use_labels_that_their_query_has() -> None:
    series = known_series()
    for rule in rules("alert"):
        labels = labels_of(rule["expr"], series)
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels, rule["alert"]


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    sections = runbook_sections()
    for rule in rules("alert"):
        name = rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert all(part in sections[name] for part in RUNBOOK_PARTS), name


def test_the_runbook_has_no_section_without_an_alert() -> None:
    assert runbook_sections().keys() == {rule["alert"] for rule in rules("alert")}


def test_every_recording_rule_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    for rule in rules("record"):
        assert f"| `{rule['record']}` |" in text, rule["record"]


def test_every_alert_is_tested_with_promtool() -> None:
    tests = yaml.safe_load((PROMTOOL_TESTS / "alerts.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert quiet == firing == {rule["alert"] for rule in rules("alert")}


SOON = (
    "DistcaCertificateExpires",
    "DistcaControlPlaneDown",
    "DistcaImbalanceAboveTolerance",
    "DistcaJobStalled",
    "DistcaNoServers",
    "DistcaTargetDown",
)
"""What somebody must hear of within two minutes, of which half a minute is Prometheus' own."""


@pytest.mark.parametrize("name", SOON)
def test_what_stops_a_job_is_told_within_two_minutes(name: str) -> None:
    rule = next(rule for rule in rules("alert") if rule["alert"] == name)
    assert rule["for"] in ("30s", "1m", "90s")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", *sorted(map(str, FOLDER.glob("*.yaml")))],
        ["test", "rules", *sorted(map(str, PROMTOOL_TESTS.glob("*.yaml")))],
    ],
    ids=["check", "test"],
)
def test_promtool_agrees(arguments: list[str]) -> None:
    ended = ran("promtool", *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
