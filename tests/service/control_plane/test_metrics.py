"""The metrics as Prometheus reads them, over HTTP."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.server import ControlPlane
from distca.v1 import jobs_pb2, membership_pb2
from tests.support.service_harness import (
    Client,
    job_spec,
    rank_manifest,
    running,
)
from tests.support.waiting import DEADLINE_SECONDS

P = "distca_control_plane_"

PREDICTED_SECONDS = 16.0
"""Of the one server that serves: 2 in each of two nano-batches, by the planner's forecast, in each
of the job's 4 layers."""


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    with running(metrics_address="127.0.0.1:0") as control_plane:
        yield control_plane


def scrape(control_plane: ControlPlane) -> dict[tuple[str, str], float]:
    """Values by name without prefix and label values joined by a comma."""
    url = f"http://{control_plane.metrics_address}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix(P), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(P)
    }


def test_job_leaves_its_figures_while_it_is_open_and_none_after(
    control_plane: ControlPlane, client: Client
) -> None:
    lease_of = {server_id: client.register(server_id) for server_id in ("s0", "s1")}
    client.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="s1"))
    before = time.time()
    job_id, lease = client.open(0, job_spec(n_ranks=1))
    watcher = client.watch_rank(job_id, lease)
    watcher.next("job_opened")
    opened_at = scrape(control_plane)["step_finished_timestamp_seconds", "train"]
    assert before <= opened_at <= time.time()
    client.submit(job_id, lease, rank_manifest(0, 0))
    watcher.next("step_planned")
    client.report_rank(job_id, lease, 0, 0)
    for _ in range(2):  # a repetition counts once
        client.report_server(job_id, lease_of["s0"], 0, "s0")
    figures = scrape(control_plane)
    expected = {
        ("jobs", ""): 1,
        ("job_info", "train,pool"): 1,
        ("servers", "pool,serving"): 1,
        ("servers", "pool,draining"): 1,
        ("servers", "in_place,serving"): 0,
        ("leases", "server"): 2,
        ("leases", "rank"): 1,
        ("subscribers", "rank"): 1,
        ("subscribers", "server"): 0,
        ("steps_planned_total", "train"): 1,
        ("plans_failed_total", "train"): 0,
        ("plan_seconds_count", ""): 1,
        ("tolerance_ratio", "train"): 0.05,
        ("home_imbalance_ratio", "train,forward"): 1,
        ("predicted_imbalance_ratio", "train,backward"): 1,
        # One server: 2 bytes in and 2 out in each of two nano-batches, by the planner's forecast.
        ("predicted_moved_bytes", "train,forward"): 8,
        ("measured_imbalance_ratio", "train,forward"): 1,
        ("saved_seconds", "train,forward"): 0,
        ("predicted_over_measured_ratio", "train,forward"): PREDICTED_SECONDS / 2,
        ("epoch", "train"): 0,
        ("job_ranks", "train,joined"): 1,
        ("job_ranks", "train,expected"): 1,
        ("pending_steps", "train"): 0,
        ("planning_backlog", "train"): 0,
        ("replans_total", "train"): 0,
        ("steps_finished_total", "train"): 1,
        ("tokens_total", "train"): 100,
        ("step_tokens", "train"): 100,
        ("publish_seconds_count", ""): 1,
        ("registrations_total", "server"): 2,
        ("registrations_total", "rank"): 1,
        ("server_registrations_total", "s0"): 1,
        ("server_busy_seconds_total", "forward,s0"): 2,
        ("server_predicted_seconds_total", "forward,s0"): PREDICTED_SECONDS,
        ("step_seconds", "train"): 2,
        ("wait_seconds", "train"): 0.25,
    }
    assert {key: figures[key] for key in expected} == expected
    assert figures["plan_bytes", "train"] > 100
    assert figures["step_finished_timestamp_seconds", "train"] > opened_at
    assert scrape(control_plane) == figures

    client.close_job(job_id, lease)
    after = scrape(control_plane)
    assert not [key for key in after if "train" in key[1]]
    assert after["jobs", ""] == 0
    assert after["jobs_closed_total", "finished"] == 1
    assert after["jobs_closed_total", "failed"] == 0
    assert after["leases", "rank"] == 0
    assert after["plan_seconds_count", ""] == 1


def test_a_servers_series_go_when_it_leaves_and_its_registrations_are_remembered(
    control_plane: ControlPlane, client: Client
) -> None:
    lease = client.register("s0")
    load = membership_pb2.ServerLoad(
        queued_tasks=3, open_ticks=2, busy_ratio=0.5, buffer_bytes=4096
    )
    client.membership.Heartbeat(membership_pb2.HeartbeatRequest(lease_id=lease, load=load))
    figures = scrape(control_plane)
    expected = {
        ("server_busy_ratio", "s0"): 0.5,
        ("server_buffer_bytes", "s0"): 4096,
    }
    assert {key: figures[key] for key in expected} == expected
    assert figures["server_info", "test device,node-a,pool,s0"] == 1
    client.membership.DeregisterServer(membership_pb2.DeregisterServerRequest(lease_id=lease))
    assert not [key for key in scrape(control_plane) if "s0" in key[1].split(",")]
    client.register("s0")
    assert scrape(control_plane)["server_registrations_total", "s0"] == 2


def test_jobs_that_reuse_a_name_do_not_look_like_a_server_that_flaps(
    control_plane: ControlPlane, client: Client
) -> None:
    for _ in range(3):
        spec = job_spec(n_ranks=1, placement=jobs_pb2.PLACEMENT_IN_PLACE)
        job_id, lease = client.open(0, spec)
        figures = scrape(control_plane)
        assert figures["servers", "in_place,serving"] == 1
        assert not [key for key in figures if key[0] == "server_registrations_total"]
        client.close_job(job_id, lease)


def test_failures_are_counted(control_plane: ControlPlane, client: Client) -> None:
    job_id, lease = client.open(0, job_spec(n_ranks=1))
    watcher = client.watch_rank(job_id, lease)
    watcher.next("job_opened")
    client.submit(job_id, lease, rank_manifest(0, 0))
    watcher.next("step_failed")
    assert scrape(control_plane)["plans_failed_total", "train"] == 1
    client.close_job(job_id, lease, "boom")
    assert scrape(control_plane)["jobs_closed_total", "failed"] == 1
