"""Traces: off without a trace of them, on with one trace a step across processes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from distca.errors import DistcaError
from distca.process import tracing
from distca.v1 import membership_pb2
from tests import ROOT
from tests.support.service_harness import (
    client_of,
    job_spec,
    rank_manifest,
    running,
)


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """Where the spans of this process go."""
    exporter = InMemorySpanExporter()
    stop = tracing.start_with(exporter, "test")
    yield exporter
    stop()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Any:
    """Reads the finished spans by name, from the test's start on."""
    exporter.clear()

    def read() -> dict[str, list[Any]]:
        from opentelemetry import trace

        provider: Any = trace.get_tracer_provider()
        provider.force_flush()
        found: dict[str, list[Any]] = {}
        for span in exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    return read


def record(name: str, step: int, **options: Any) -> None:
    tracing.record(name, "train-1", step, began_at=10.0, ended_at=10.5, **options)


def test_texts_of_others_are_plain_in_spans(spans: Any) -> None:
    """A text that is no UTF-8 would stop the export of all spans beside it."""
    record("distca.hostile", 7, server="a\x1b[2J\ud800", error="b\u202e" + "x" * 5000)
    (span,) = spans()["distca.hostile"]
    assert span.attributes["distca.server"] == "a\\x1b[2J\\ud800"
    assert span.status.description.startswith("b\\u202ex")
    assert len(span.status.description) < 1100
    assert not span.status.is_ok


def test_spans_of_a_step_are_children_of_its_plan_whoever_comes_first(spans: Any) -> None:
    record("distca.tick", 7, server="node-0")
    record("distca.plan", 7, root=True)
    record("distca.tick", 8)
    (plan,), (first, other) = (spans()[name] for name in ("distca.plan", "distca.tick"))
    assert plan.parent is None
    assert first.context.trace_id == plan.context.trace_id
    assert first.parent.span_id == plan.context.span_id
    assert other.context.trace_id != plan.context.trace_id
    assert dict(first.attributes) == {
        "distca.job_id": "train-1",
        "distca.step": 7,
        "distca.server": "node-0",
    }
    assert first.end_time - first.start_time == 500_000_000


def test_ids_use_up_no_random_number_of_the_process(spans: Any) -> None:
    """They would be those of every rank that is seeded alike, too."""
    before = random.getstate()
    record("distca.tick", 11)
    record("distca.tick", 12)
    assert random.getstate() == before
    first, second = spans()["distca.tick"]
    assert first.context.trace_id != second.context.trace_id


def test_a_real_steps_plan_and_calls_are_traced_and_leases_and_streams_are_not(spans: Any) -> None:
    with running() as control_plane, client_of(control_plane.address) as client:
        server_lease = client.register("s0")
        job_id, lease = client.open(0, job_spec(n_ranks=1))
        watcher = client.watch_rank(job_id, lease)
        watcher.next("job_opened")
        client.submit(job_id, lease, rank_manifest(0, 0))
        watcher.next("step_planned")
        client.membership.Heartbeat(membership_pb2.HeartbeatRequest(lease_id=server_lease))
    found = spans()
    (plan,) = found["distca.plan"]
    (publish,) = found["distca.publish"]
    assert publish.parent.span_id == plan.context.span_id
    assert plan.attributes["distca.planner"]
    for method in ("Membership/RegisterServer", "Jobs/OpenJob"):
        both = [s for name in found if name.endswith(method) for s in found[name]]
        assert sorted(span.kind.name for span in both) == ["CLIENT", "SERVER"], method
        assert len({span.context.trace_id for span in both}) == 1
    assert not [name for name in found if "Heartbeat" in name or "Watch" in name]


def test_off_costs_no_import() -> None:
    code = (
        "import sys; from distca.process import tracing; import control_plane.jobs.coordinator\n"
        "tracing.record('distca.tick', 'job', 1, began_at=0.0, ended_at=1.0)\n"
        "assert not tracing.enabled()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_an_endpoint_without_a_scheme_is_refused() -> None:
    with pytest.raises(DistcaError):
        tracing.start("collector:4317", "trainer")


def test_a_missing_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DistcaError):
        tracing.start("http://collector:4317", "trainer")
