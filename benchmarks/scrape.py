"""What one scrape costs of the members of a large job: series, bytes and milliseconds.

    python -m benchmarks.scrape --members 1000

A rank with its in-place server, an attention node and a control plane are filled as a job of that
many ranks on that many pool servers fills them, and scraped over HTTP. All their values are numbers
of several digits, as in a job that has run for a while.
"""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request
from collections.abc import Callable

import torch
from prometheus_client import CollectorRegistry

from attention_node.executor import Executor
from attention_node.metrics import NodeMetrics
from control_plane.metrics.job_metrics import JobTable
from control_plane.metrics.metrics import ControlPlaneTable
from control_plane.metrics.server_metrics import ServerTable
from core_attention.ca_task import Phase
from core_attention.kernels.cpu import CpuKernel
from data_plane.metrics import DataPlaneMetrics
from data_plane.transport import ProbeResult
from distca.process.monitoring import PAIRS_PATH, MetricsEndpoint, process_registry
from trainer_client.metrics import OWN_PROCESS, ServedTasks, TrainerMetrics

_NBYTES = 12_345_678
_SECONDS = 0.012345


def serve_traffic(metrics: DataPlaneMetrics, peers: list[str]) -> None:
    """A message each way with every peer, and a probe."""
    for number, peer in enumerate(peers):
        metrics.connection_opened(peer, "ucxx")
        rate = 20.0 + number / 1000
        metrics.probed(ProbeResult(peer, "ucxx", "rc_mlx5", _NBYTES, rate, 1e-5))
        metrics.transfer_ended(
            kind="put", peer=peer, transport="ucxx", nbytes=_NBYTES, seconds=_SECONDS, error=None
        )
        metrics.transfer_ended(
            kind="offer", peer=peer, transport="ucxx", nbytes=_NBYTES, seconds=_SECONDS, error=None
        )


def rank(members: int, executor: Executor) -> tuple[CollectorRegistry, CollectorRegistry]:
    """A rank that computes and serves: it is connected to all servers, and to all ranks."""
    registry, pairs = process_registry("trainer"), CollectorRegistry()
    trainer = TrainerMetrics(registry, "train", 0, pairs)
    NodeMetrics(registry, "train.rank-0").watch(executor, lambda: 0)
    servers = [f"distca-attention-node-{number}" for number in range(members)]
    ranks = [f"train.rank-{number}" for number in range(members)]
    serve_traffic(DataPlaneMetrics(registry, pairs), servers + ranks)
    trainer.tasks_served(
        ServedTasks(
            server_id=server,
            transport=OWN_PROCESS if server == "train.rank-0" else "ucxx",
            phase=phase,
            tasks=123,
            q_rows=123_456,
            kv_rows=1_234_567,
        )
        for server in servers + ranks
        for phase in Phase
    )
    return registry, pairs


def node(members: int, executor: Executor) -> tuple[CollectorRegistry, CollectorRegistry]:
    """A pool server that all ranks are connected to."""
    registry, pairs = process_registry("attention-node"), CollectorRegistry()
    NodeMetrics(registry, "distca-attention-node-0").watch(executor, lambda: 0)
    serve_traffic(
        DataPlaneMetrics(registry, pairs), [f"train.rank-{number}" for number in range(members)]
    )
    return registry, pairs


def control_plane(members: int, _: Executor) -> tuple[CollectorRegistry, CollectorRegistry]:
    """A control plane with one job on that many pool servers."""
    registry = process_registry("control-plane")
    ControlPlaneTable(registry)
    JobTable(registry, job_name="train")
    table = ServerTable(registry)
    for number in range(members):
        server = f"distca-attention-node-{number}"
        table.server_info.labels(server, "pool", f"host-{number}", "NVIDIA H200").set(1)
        for row in (table.server_busy_ratio, table.server_queue_depth, table.server_open_ticks):
            row.labels(server).set(0.123456)
        table.server_buffer_bytes.labels(server).set(_NBYTES)
        table.server_registrations_total.labels(server).inc()
        for phase in Phase:
            table.server_busy_seconds_total.labels(server, phase).inc(1234.5678)
            table.server_predicted_seconds_total.labels(server, phase).inc(1234.5678)
    return registry, CollectorRegistry()


def scraped(port: int, path: str, repeats: int) -> tuple[int, int, float]:
    """Series, bytes, and the median milliseconds of a scrape."""
    times, body = [], b""
    for _ in range(repeats):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            body = answer.read()
        times.append(time.perf_counter() - began)
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    return series, len(body), statistics.median(times) * 1e3


MEMBERS: dict[str, Callable[[int, Executor], tuple[CollectorRegistry, CollectorRegistry]]] = {
    "rank": rank,
    "attention node": node,
    "control plane": control_plane,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=1000, help="ranks, and servers")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    executor = Executor(CpuKernel(), torch.device("cpu"))
    try:
        for name, fill in MEMBERS.items():
            registry, pairs = fill(arguments.members, executor)
            endpoint = MetricsEndpoint("127.0.0.1", 0, registry, pairs)
            for path in ("/metrics", PAIRS_PATH):
                series, nbytes, milliseconds = scraped(endpoint.port, path, arguments.repeats)
                if series:
                    print(f"{name}, {path}: {series} series, {nbytes} bytes, {milliseconds:.1f} ms")
            endpoint.close()
    finally:
        executor.close()


if __name__ == "__main__":
    main()
