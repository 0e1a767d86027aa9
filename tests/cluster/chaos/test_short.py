"""The short form: many faults in one run, since a job takes long to start."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.chaos.faults import (
    DRAIN_SECONDS,
    cut,
    kill_and_restart,
    needs_links,
    on_a_switch,
    serving,
)
from tests.cluster.chaos.hosts import CARD, Direction, Network, network, why_no_namespaces
from tests.cluster.chaos.processes import CONTROL_PLANE, STANDBY, Job, JobSettings
from tests.cluster.chaos.scenario import STOPPED_SECONDS, Disturbance, References, disturbed
from tests.cluster.chaos.schedules import Act, Schedule
from tests.cluster.chaos.standstills import BOUND_SECONDS, run
from tests.support.programs import ran

SETTINGS = JobSettings(steps=80, n_nodes=4)


@pytest.mark.timeout(900)
def test_processes_that_die_stop_and_leave(tmp_path: Path, references: References) -> None:
    with disturbed(Job(tmp_path, SETTINGS), references, seed=1) as disturbance:
        job = disturbance.job
        disturbance.wait_for_tick(backward=False, after_step=4)
        disturbance.kill("node-0")
        job.start_node(0)
        disturbance.wait_for_step(14)
        kill_and_restart(disturbance)
        disturbance.wait_for_tick(backward=True, after_step=24)
        disturbance.kill("node-1")
        disturbance.wait_for_step(34)
        disturbance.note("drained node-2", bound_seconds=2.0)
        job.processes["node-2"].signal(signal.SIGTERM)
        assert job.processes["node-2"].popen.wait(DRAIN_SECONDS) == 0
        disturbance.wait_for_step(44)
        disturbance.stop("node-3")
        disturbance.pause(1.0)
        disturbance.go_on("node-3")
        disturbance.wait_for_step(54)
        disturbance.stop("node-3")
        disturbance.wait_for_step(64)
        disturbance.kill(*serving(disturbance))


@pytest.mark.timeout(900)
def test_standstills_of_several_faults_at_once(tmp_path: Path, references: References) -> None:
    """The leading control plane is stopped and a node dies; then two nodes, one killed and one
    stopped, and whoever leads."""
    schedule = Schedule(
        name="short",
        acts=(
            Act(step=6, stops=(CONTROL_PLANE,), kills=("node-0",), stop_seconds=20.0),
            Act(step=40, stops=("node-1",), kills=("node-2", STANDBY), stop_seconds=20.0),
        ),
        standby=True,
    )
    outcome = run(schedule, SETTINGS, references, tmp_path)
    text = [line for each in outcome.standstills for line in outcome.describe(each)]
    print("\n".join(["", *text]))
    assert outcome.longest_own_seconds <= BOUND_SECONDS
    assert "taking over" in (tmp_path / f"{STANDBY}.log").read_text()


@pytest.mark.timeout(900)
@needs_links
def test_links_that_are_cut(tmp_path: Path, references: References) -> None:
    with (
        on_a_switch(tmp_path, SETTINGS) as (links, job),
        disturbed(job, references, seed=2) as disturbance,
    ):
        disturbance.wait_for_step(5)
        cut(links, disturbance, "node-0")
        disturbance.pause(1.0)
        links.heal("node-0")
        disturbance.wait_for_step(20)
        disturbance.note("a lossy link to node-1", STOPPED_SECONDS)
        links.lose("node-1", 0.05)
        disturbance.wait_for_step(30)
        links.heal("node-1")
        cut(links, disturbance, "node-2", Direction.OUT)
        disturbance.wait_for_step(40)
        cut(links, disturbance, "node-3", Direction.IN)
        disturbance.wait_for_step(55)
        disturbance.note("unplugged node-1", STOPPED_SECONDS)
        links.unplug("node-1")


# Steps take a tenth of a second or less: enough of them for changes to come in the midst.
CHANGED = JobSettings(steps=150, n_nodes=3)
SEGMENTS = 30
FORGED = 1
NO_HOSTS = why_no_namespaces(cuts=False)


def change_rows(links: Network, disturbance: Disturbance, node: str, direction: Direction) -> None:
    disturbance.note(f"changed rows on their way: {node}, {direction}", STOPPED_SECONDS)
    links.change_rows(node, SEGMENTS, direction)


def checksums_refused(job: Job, node: str) -> float:
    """As the node counts them."""
    host, address = job.host(node), job.addresses(node)["metrics"]
    read = (
        f"import urllib.request as r; print(r.urlopen('http://{address}/metrics').read().decode())"
    )
    command = [*host.prefix, sys.executable, "-c", read]
    page = ran(*command, check=True).stdout
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "distca_attention_node_stale_messages_total"
        and sample.labels["reason"] == "checksum"
    )


@contextmanager
def forger(links: Network, job: Job, node: str, count: int) -> Iterator[Path]:
    """Reads what trainer-0 sends, whose cable is slow, and forges so many of its messages to
    ``node``, which come before its own; the log."""
    _, _, port = job.addresses(node)["data"].rpartition(":")
    target, log = job.host(node).address, job.folder / "forger.log"
    links.delay("trainer-0", 0.005)
    program = [sys.executable, "-m", "tests.cluster.chaos.forger"]
    sniffing = [*job.host("trainer-0").prefix, *program, "sniff", CARD, target]
    forging = [*links.hosts["forger"].prefix, *program, "forge", CARD, target, port, str(count)]
    with log.open("w") as file:
        sniffer = subprocess.Popen(sniffing, stdout=subprocess.PIPE)
        process = subprocess.Popen(forging, stdin=sniffer.stdout, stdout=file, stderr=file)
    try:
        yield log
    finally:
        for each in (process, sniffer):
            each.kill()
            each.wait(10)


@pytest.mark.timeout(900)
@pytest.mark.skipif(NO_HOSTS is not None, reason=f"no network namespaces: {NO_HOSTS}")
def test_rows_that_a_listener_forges_are_found(tmp_path: Path, references: References) -> None:
    """Somebody who reads the network and reaches a node's port, with mTLS and by default."""
    names = ["control-plane", "node-0", "node-1", "trainer-0", "trainer-1", "forger"]
    settings = replace(CHANGED, n_nodes=2)
    with network(names, slow_cables=["trainer-0"]) as links:
        job = Job(tmp_path, settings, hosts=links.hosts, mutual_tls=True)
        with disturbed(job, references, seed=3) as disturbance:
            disturbance.wait_for_step(5)
            disturbance.note("forged rows", STOPPED_SECONDS)
            with forger(links, job, "node-0", FORGED) as log:
                disturbance.wait_for_step(settings.steps - 10)
                forged = log.read_text()
            refused = checksums_refused(job, "node-0")
    assert forged.count("forged") == FORGED, forged
    # By whichever comes first: the forged rows' checksum, or the rank's own message.
    assert (
        refused >= 1 or "a second message came under tag" in (tmp_path / "node-0.log").read_text()
    )
    assert "lost server node-0" in (tmp_path / "control-plane.log").read_text()


@pytest.mark.timeout(900)
@needs_links
def test_rows_that_are_changed_on_the_way_are_found(tmp_path: Path, references: References) -> None:
    """Somebody between two hosts, who can rewrite UCX's TCP streams."""
    with (
        on_a_switch(tmp_path, CHANGED, slow_cables=("node-0", "node-1")) as (links, job),
        disturbed(job, references, seed=3) as disturbance,
    ):
        disturbance.wait_for_step(5)
        change_rows(links, disturbance, "node-0", Direction.IN)
        disturbance.wait_for_step(15)
        refused = checksums_refused(job, "node-0")
        change_rows(links, disturbance, "node-1", Direction.OUT)
    assert refused >= 1
    log = (tmp_path / "control-plane.log").read_text()
    for node in ("node-0", "node-1"):
        assert f"lost server {node}" in log
    assert log.count("its sender's checksum") >= 2
