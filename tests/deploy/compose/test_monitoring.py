"""A run of docker/compose.yaml from start to end, and what Prometheus saw of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.deploy.compose_project import TRAINING_SECONDS, ComposeProject, wait_until
from tests.deploy.conftest import VERIFIED_TRAINING
from tests.deploy.dashboard_queries import PanelQuery, panel_queries, rule_names
from tests.deploy.docker_engine import Docker
from tests.deploy.prometheus_api import Prometheus

pytestmark = pytest.mark.timeout(3600)

CHART = ROOT / "helm" / "distca"
N_NODES = 3
N_STEPS = 16
N_TARGETS = {"prometheus": 1, "control-plane": 1, "attention-node": N_NODES, "trainer": 2}
TARGETS_SECONDS = 300.0
STEP_SECONDS = 5.0


@dataclass(frozen=True)
class Observed:
    """What is left of a run, whose Prometheus still answers.

    Attributes:
        exit_codes: of the trainers.
        record: run.json.
        prometheus: its API.
        begin, end: between them all targets were up, in seconds since 1970.
    """

    exit_codes: list[int]
    record: dict[str, Any]
    prometheus: Prometheus
    begin: float
    end: float

    def series(self, query: PanelQuery) -> list[dict[str, Any]]:
        """What a panel shows of the time in which all targets were up."""
        return self.prometheus.query_range(query.expression, self.begin, self.end, STEP_SECONDS)


@pytest.fixture(scope="module")
def observed(docker: Docker, checkout: Path, compose_environ: dict[str, str]) -> Iterator[Observed]:
    """A run that verifies every step, seen by Prometheus until its end."""
    environ = {
        **compose_environ,
        "DISTCA_STEPS": str(N_STEPS),
        "DISTCA_TRAIN_ARGS": VERIFIED_TRAINING,
    }
    with ComposeProject(docker, checkout, "distca-observed", environ) as project:
        project.up(nodes=N_NODES)
        prometheus = Prometheus(project.prometheus)
        wait_until(prometheus.reachable, TARGETS_SECONDS, "Prometheus", project.tails)

        def all_up() -> bool:
            up = (each for each in prometheus.targets() if each["health"] == "up")
            return Counter(each["labels"]["job"] for each in up) == N_TARGETS

        def explain() -> str:
            return f"{prometheus.targets()}\n{project.tails()}"

        wait_until(all_up, TARGETS_SECONDS, "scrape of every target", explain)
        begin = end = time.time()
        while all_up() and end < begin + TRAINING_SECONDS:
            end = time.time()
            time.sleep(1.0)
        yield Observed(
            exit_codes=project.wait_for_trainers(),
            record=project.run_record(),
            prometheus=prometheus,
            begin=begin,
            end=end,
        )


def test_training_runs_to_its_end_and_equals_local_attention(observed: Observed) -> None:
    assert observed.exit_codes == [0, 0]
    assert observed.record["finished"]
    assert [step["step"] for step in observed.record["steps"]] == list(range(N_STEPS))
    found = observed.record["verification"]
    assert found["steps"] == N_STEPS
    assert found["gradient"] <= found["gradient_tolerance"], found


def test_every_panel_shows_data(observed: Observed) -> None:
    without = {
        str(query)
        for query in panel_queries(CHART / "dashboards")
        # There is no GPU.
        if "DCGM_" not in query.expression
        and all(
            math.isnan(float(value))
            for series in observed.series(query)
            for _, value in series["values"]
        )
    }
    assert without == set()


def test_every_rule_is_evaluated(observed: Observed) -> None:
    rules = [rule for group in observed.prometheus.rule_groups() for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == rule_names(CHART / "rules")
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_no_alert_fires_in_a_healthy_run(observed: Observed) -> None:
    assert observed.prometheus.firing_alerts() == set()
