"""What a rank's metrics count, without a session."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from core_attention.ca_task import Phase
from trainer_client.metrics import OWN_PROCESS, ServedTasks, TickWait, TrainerMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> TrainerMetrics:
    return TrainerMetrics(registry, "train", 3)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(
        f"distca_trainer_{name}", {"job_name": "train", "rank": "3", **labels}
    )


def parts_of(registry: CollectorRegistry) -> dict[str, float | None]:
    parts = ("compute", "send", "wait", "plan")
    return {part: value(registry, "step_part_seconds_total", part=part) for part in parts}


def end_step(metrics: TrainerMetrics, *waits: TickWait, **changed: Any) -> None:
    step = {
        "complete": True,
        "tokens": 100,
        "seconds": 4.0,
        "send_seconds": 0.25,
        "exposed_seconds": 0.75,
        **changed,
    }
    metrics.step_ended(waits=waits, **step)


def test_a_ticks_seconds_are_hidden_or_exposed(
    registry: CollectorRegistry, metrics: TrainerMetrics
) -> None:
    end_step(
        metrics,
        TickWait(Phase.FORWARD, flight_seconds=0.5, exposed_seconds=0.125),
        TickWait(Phase.FORWARD, flight_seconds=0.25, exposed_seconds=0.0),
    )
    of = {
        visibility: value(
            registry, "communication_seconds_total", phase="forward", visibility=visibility
        )
        for visibility in ("hidden", "exposed")
    }
    assert of == {"hidden": 0.625, "exposed": 0.125}
    assert value(registry, "tick_seconds_sum", phase="forward") == 0.75
    assert value(registry, "tick_exposed_seconds_sum", phase="forward") == 0.125
    assert value(registry, "tick_seconds_count", phase="backward") == 0


def test_a_complete_steps_seconds_are_told_by_part_and_a_given_up_ones_are_not(
    registry: CollectorRegistry, metrics: TrainerMetrics
) -> None:
    metrics.plan_waited_for(0.5)
    for complete in (True, False):
        end_step(metrics, complete=complete)
    assert parts_of(registry) == {"compute": 3.0, "send": 0.25, "wait": 0.75, "plan": 0.5}
    assert value(registry, "tokens_total") == value(registry, "step_tokens") == 100
    assert value(registry, "steps_total", outcome="complete") == 1
    assert value(registry, "steps_total", outcome="given_up") == 1


def test_waits_that_a_device_does_not_tell_in_time_count_as_compute(
    registry: CollectorRegistry, metrics: TrainerMetrics
) -> None:
    end_step(metrics, exposed_seconds=None)
    assert parts_of(registry) == {"compute": 3.75, "send": 0.25, "wait": 0.0, "plan": 0.0}


def test_what_servers_ran_is_told_in_sum(
    registry: CollectorRegistry, metrics: TrainerMetrics
) -> None:
    for transport in ("ucxx", "ucxx", OWN_PROCESS):
        metrics.tasks_served(
            [
                ServedTasks(
                    transport=transport,
                    phase=Phase.BACKWARD,
                    tasks=2,
                    q_rows=30,
                    kv_rows=50,
                )
            ]
        )
    of_pool = {"transport": "ucxx", "phase": "backward"}
    assert value(registry, "tasks_total", **of_pool) == 4
    assert value(registry, "rows_total", **of_pool, kind="q") == 60
    assert value(registry, "rows_total", **of_pool, kind="kv") == 100
    assert value(registry, "tasks_total", transport="none", phase="backward") == 2
