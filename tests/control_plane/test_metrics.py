"""The metrics as Prometheus reads them, over HTTP."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.metrics import Metrics
from control_plane.server import ControlPlane
from distca.v1 import membership_pb2
from tests.control_plane.service_harness import (
    DEADLINE_SECONDS,
    Client,
    client_of,
    job_spec,
    rank_manifest,
    running,
)

P = "distca_control_plane_"
NAMES = {
    "home_imbalance_ratio": ("job_name", "phase"),
    "jobs": (),
    "jobs_closed_total": ("outcome",),
    "lease_expirations_total": ("kind",),
    "leases": ("kind",),
    "manifests_total": ("job_name",),
    "measured_imbalance_ratio": ("job_name", "phase"),
    "plan_bytes": ("job_name",),
    "plan_seconds": (),
    "plans_failed_total": ("job_name",),
    "predicted_imbalance_ratio": ("job_name", "phase"),
    "predicted_moved_bytes": ("job_name", "phase"),
    "servers": ("kind", "state"),
    "step_seconds": ("job_name",),
    "steps_planned_total": ("job_name",),
    "subscribers": ("kind",),
    "subscribers_dropped_total": ("kind",),
    "tolerance_ratio": ("job_name",),
    "wait_seconds": ("job_name",),
}


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    with running(metrics_address="127.0.0.1:0") as control_plane:
        yield control_plane


@pytest.fixture
def client(control_plane: ControlPlane) -> Iterator[Client]:
    with client_of(control_plane.address) as client:
        yield client


def scrape(control_plane: ControlPlane) -> dict[tuple[str, str], float]:
    """Values by name without prefix and label values joined by a comma."""
    url = f"http://{control_plane.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix(P), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_names_and_labels_are_exactly_these() -> None:
    found = {}
    collectors: Any = Metrics().registry._collector_to_names
    for metric in collectors:
        suffix = "_total" if metric._type == "counter" else ""
        found[metric._name.removeprefix(P) + suffix] = metric._labelnames
    assert found == NAMES


def test_every_metric_has_a_help_text_and_every_counter_ends_in_total() -> None:
    for family in Metrics().registry.collect():
        assert family.documentation.endswith(".")
        assert family.name.startswith(P)


def test_job_leaves_its_figures_while_it_is_open_and_none_after(
    control_plane: ControlPlane, client: Client
) -> None:
    lease_of = {server_id: client.register(server_id) for server_id in ("s0", "s1")}
    client.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="s1"))
    job_id, lease = client.open(0, job_spec(n_ranks=1))
    watcher = client.watch_rank(job_id, lease)
    watcher.next("job_opened")
    client.submit(job_id, lease, rank_manifest(0, 0))
    watcher.next("step_planned")
    client.report_rank(job_id, lease, 0, 0)
    client.report_server(job_id, lease_of["s0"], 0, "s0")
    figures = scrape(control_plane)
    expected = {
        ("jobs", ""): 1,
        ("servers", "pool,serving"): 1,
        ("servers", "pool,draining"): 1,
        ("servers", "in_place,serving"): 0,
        ("leases", "server"): 2,
        ("leases", "rank"): 1,
        ("subscribers", "rank"): 1,
        ("subscribers", "server"): 0,
        ("manifests_total", "train"): 1,
        ("steps_planned_total", "train"): 1,
        ("plans_failed_total", "train"): 0,
        ("plan_seconds_count", ""): 1,
        ("tolerance_ratio", "train"): 0.05,
        ("home_imbalance_ratio", "train,forward"): 1,
        ("predicted_imbalance_ratio", "train,backward"): 1,
        # One server: 2 bytes in and 2 out in each of two nano-batches, by the planner's forecast.
        ("predicted_moved_bytes", "train,forward"): 8,
        ("measured_imbalance_ratio", "train,forward"): 1,
        ("step_seconds", "train"): 2,
        ("wait_seconds", "train"): 0.25,
    }
    assert {key: figures[key] for key in expected} == expected
    assert figures["plan_bytes", "train"] > 100
    assert scrape(control_plane) == figures

    client.close_job(job_id, lease)
    after = scrape(control_plane)
    assert not [key for key in after if "train" in key[1]]
    assert after["jobs", ""] == 0
    assert after["jobs_closed_total", "finished"] == 1
    assert after["jobs_closed_total", "failed"] == 0
    assert after["leases", "rank"] == 0
    assert after["plan_seconds_count", ""] == 1


def test_failures_are_counted(control_plane: ControlPlane, client: Client) -> None:
    job_id, lease = client.open(0, job_spec(n_ranks=1))
    watcher = client.watch_rank(job_id, lease)
    watcher.next("job_opened")
    client.submit(job_id, lease, rank_manifest(0, 0))
    watcher.next("step_failed")
    assert scrape(control_plane)["plans_failed_total", "train"] == 1
    client.close_job(job_id, lease, "boom")
    assert scrape(control_plane)["jobs_closed_total", "failed"] == 1
