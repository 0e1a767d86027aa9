"""What a server counts: its queue, its busy and idle time, and where the time of a tick went."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from attention_node.executor import Executor
from attention_node.metrics import NodeMetrics
from attention_node.served_job import ExchangeTimes
from core_attention.ca_task import Phase
from core_attention.tick import Tick
from tests.support.waiting import eventually
from tests.unit.attention_node.cases import WAIT_SECONDS
from tests.unit.attention_node.test_executor import GatedKernel, kernel, submit

__all__ = ["kernel"]

HELD_SECONDS = 0.1


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> NodeMetrics:
    return NodeMetrics(registry, "node-0")


@pytest.fixture
def executor(kernel: GatedKernel, metrics: NodeMetrics) -> Iterator[Executor]:
    running = Executor(kernel, torch.device("cpu"), on_call=metrics.kernel_called)
    metrics.watch(running, lambda: 7)
    yield running
    kernel.gate.set()
    running.close()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(
        f"distca_attention_node_{name}", {"server": "node-0", **labels}
    )
    assert found is not None
    return found


def test_parts_that_wait_during_a_call_are_the_queue_and_the_call_is_busy_time(
    registry: CollectorRegistry, executor: Executor, kernel: GatedKernel
) -> None:
    assert value(registry, "busy_seconds_total") == 0
    submit(executor, 5)
    assert kernel.entered.wait(WAIT_SECONDS)
    for length in (7, 1, 9):
        submit(executor, length, Phase.BACKWARD)
    assert value(registry, "queue_depth") == 3
    time.sleep(HELD_SECONDS)
    idle_seconds = value(registry, "idle_seconds_total")
    kernel.gate.set()
    eventually(lambda: value(registry, "tasks_total", phase="backward") == 3)
    assert value(registry, "busy_seconds_total") >= HELD_SECONDS
    assert value(registry, "idle_seconds_total") > idle_seconds
    assert value(registry, "queue_depth") == 0
    assert value(registry, "queue_seconds_total") >= 3 * HELD_SECONDS
    assert value(registry, "query_rows_total", phase="forward") == 5
    assert value(registry, "query_rows_total", phase="backward") == 17
    assert value(registry, "qk_pairs_total", phase="backward") == 28 + 1 + 45
    assert value(registry, "open_ticks") == 7


def test_an_idle_server_stands_still_in_everything_but_idle_time(
    registry: CollectorRegistry, executor: Executor
) -> None:
    def still(text: bytes) -> list[bytes]:
        return [line for line in text.splitlines() if b"idle_seconds_total" not in line]

    before, idle_seconds = generate_latest(registry), value(registry, "idle_seconds_total")
    time.sleep(HELD_SECONDS)
    assert still(generate_latest(registry)) == still(before)
    assert value(registry, "idle_seconds_total") >= idle_seconds + HELD_SECONDS


def test_a_kernel_that_fails_is_no_longer_busy(
    registry: CollectorRegistry, executor: Executor, kernel: GatedKernel
) -> None:
    kernel.error = RuntimeError("boom")
    kernel.gate.set()
    _, failures = submit(executor, 5)
    eventually(lambda: bool(failures))

    def still() -> bool:
        busy_seconds = value(registry, "busy_seconds_total")
        time.sleep(HELD_SECONDS)
        return value(registry, "busy_seconds_total") == busy_seconds

    # The failure is reported a moment before the call is over.
    eventually(still)


def test_a_ticks_time_is_told_by_part_and_local_rows_have_no_transport(
    registry: CollectorRegistry, metrics: NodeMetrics
) -> None:
    for transport_seconds in (0.25, None):
        metrics.exchange_ended(
            ExchangeTimes(
                tick=Tick(0, 1, 0, Phase.FORWARD),
                rank=0,
                job_id="job",
                began_at=0.0,
                wait_seconds=0.5,
                kernel_seconds=1.5,
                transport_seconds=transport_seconds,
            )
        )
    counts = {
        part: (
            value(registry, "tick_seconds_count", phase="forward", part=part),
            value(registry, "tick_seconds_sum", phase="forward", part=part),
        )
        for part in ("wait", "kernel", "transport")
    }
    assert counts == {"wait": (2, 1.0), "kernel": (2, 3.0), "transport": (1, 0.25)}
