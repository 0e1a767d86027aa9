"""What a control plane, an attention node and trainers really export while they train."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core_attention.shape import AttentionShape
from tests import ROOT
from tests.cluster.end_to_end.local_run import TINY
from tests.support.addresses import unused_port
from tests.support.cluster import cluster, home
from tests.unit.monitoring.table import Row, documented_metrics

pytestmark = pytest.mark.timeout(300)

N_RANKS = 2
N_STEPS = 3
"""Steps after which the processes are looked at."""
TRAINING_SECONDS = 200.0
"""Until then; the machine may be busy."""
JOB = "metrics"

TINY_SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=8, dtype="float32")

EVERYWHERE = ("Certificates", "Every process")
SECTIONS = {
    "control plane": ("Control plane", *EVERYWHERE),
    "node": ("Attention servers", "Data plane", *EVERYWHERE),
    # With in-place servers of their own.
    "trainer 0": ("Trainers", "Attention servers", "Data plane", *EVERYWHERE),
    "trainer 1": ("Trainers", "Attention servers", "Data plane", *EVERYWHERE),
}


@dataclass(frozen=True)
class Exported:
    """What one process exports: families as rows without help, and sums of samples by name."""

    rows: dict[str, Row]
    sums: dict[str, float]
    labels: dict[str, set[str]]


def scrape(address: str, path: str = "/metrics") -> Exported:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        text = answer.read().decode()
    rows: dict[str, Row] = {}
    sums: dict[str, float] = {}
    values: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        samples = family.samples
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = samples[0].labels.keys() - {"le"} if samples else ()
        rows[name] = Row(name, family.type, tuple(sorted(labels)), family.documentation)
        for sample in samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    return Exported(rows, sums, values)


def start_trainer(
    rank: int, folder: Path, control_plane: str, port: int
) -> subprocess.Popen[bytes]:
    arguments = [
        f"--control-plane={control_plane}",
        f"--run-dir={folder / JOB}",
        f"--rendezvous=file://{folder / 'rendezvous'}",
        f"--metrics-port={port}",
        "--placement=mixed",
        "--one-host",
        "--steps=100000",
        *TINY,
    ]
    environment = {
        **home(folder, TINY_SHAPE),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(N_RANKS),
    }
    with (folder / f"trainer-{rank}.log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "distca", "--log-level=info", "train", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of the metrics of every process, after N_STEPS steps of two trainers that train on one node
    and on themselves, and go on training."""
    folder = tmp_path_factory.mktemp("metrics")
    with cluster(folder, 1, node_shape=TINY_SHAPE) as running:
        port = unused_port(N_RANKS)
        trainers = [start_trainer(rank, folder, running.address, port) for rank in range(N_RANKS)]
        try:
            addresses = {
                "control plane": running.control_plane.addresses["metrics"],
                "node": running.processes[1].addresses["metrics"],
                **{f"trainer {rank}": f"127.0.0.1:{port + rank}" for rank in range(N_RANKS)},
            }
            wait_for_steps(folder, trainers, addresses["control plane"])
            yield addresses
        finally:
            for trainer in trainers:
                trainer.send_signal(signal.SIGKILL)
                trainer.wait(10)


@pytest.fixture(scope="module")
def exported(addresses: dict[str, str]) -> dict[str, Exported]:
    """What every process exports."""
    return {name: scrape(address) for name, address in addresses.items()}


def wait_for_steps(
    folder: Path, trainers: list[subprocess.Popen[bytes]], control_plane: str
) -> None:
    deadline = time.monotonic() + TRAINING_SECONDS
    finished = "distca_control_plane_steps_finished_total"
    while scrape(control_plane).sums.get(finished, 0.0) < N_STEPS:
        ended = [rank for rank, trainer in enumerate(trainers) if trainer.poll() is not None]
        assert not ended, (folder / f"trainer-{ended[0]}.log").read_text()
        assert time.monotonic() < deadline, (folder / "trainer-0.log").read_text()
        time.sleep(0.2)


@pytest.mark.parametrize("process", SECTIONS)
def test_a_process_exports_exactly_what_is_documented(
    exported: dict[str, Exported], process: str
) -> None:
    documented = documented_metrics()
    expected = {
        name: row for section in SECTIONS[process] for name, row in documented[section].items()
    }
    found = exported[process].rows
    assert found.keys() == expected.keys()
    for name, row in found.items():
        assert row.kind == expected[name].kind, name
        assert row.text == expected[name].text, name
        # A metric without a sample so far does not show its labels.
        assert not row.labels or row.labels == tuple(sorted(expected[name].labels)), name


def test_labels_name_jobs_servers_and_ranks_and_nothing_that_grows(
    exported: dict[str, Exported],
) -> None:
    servers = {"node-0", *(f"{JOB}.rank-{rank}" for rank in range(N_RANKS))}
    control_plane = exported["control plane"].labels
    assert control_plane["job_name"] == {JOB}
    assert control_plane["server"] == servers
    for rank in range(N_RANKS):
        trainer = exported[f"trainer {rank}"].labels
        assert trainer["rank"] == {str(rank)}
        assert trainer["server"] == {f"{JOB}.rank-{rank}"}
        assert trainer["transport"] <= {"ucxx", "none"}
        assert trainer["peer"] <= servers
    assert exported["node"].labels["server"] == {"node-0"}
    assert exported["node"].labels["peer"] <= servers - {"node-0"}
