"""Plans of a tenant are taken in one after another, and wait for no other tenant's."""

from __future__ import annotations

import queue
import threading

from attention_node.plan_threads import PlanThreads
from tests.support.waiting import eventually

DEADLINE_SECONDS = 10.0


def test_a_tenant_waits_for_its_own_plans_alone() -> None:
    errors: list[Exception] = []
    taken: queue.SimpleQueue[str] = queue.SimpleQueue()
    over = threading.Event()
    threads = PlanThreads(errors.append)

    def take_in_slowly() -> None:
        assert over.wait(DEADLINE_SECONDS)
        taken.put("noisy 0")

    threads.add("noisy", take_in_slowly)
    threads.add("noisy", lambda: taken.put("noisy 1"))
    threads.add("calm", lambda: taken.put("calm"))
    assert taken.get(timeout=DEADLINE_SECONDS) == "calm"
    assert not threads.idle
    over.set()
    assert [taken.get(timeout=DEADLINE_SECONDS) for _ in range(2)] == ["noisy 0", "noisy 1"]
    eventually(lambda: threads.idle)
    threads.add("noisy", lambda: taken.put("noisy 2"))
    assert taken.get(timeout=DEADLINE_SECONDS) == "noisy 2"
    assert not errors


def test_a_mistake_is_handed_over_and_the_next_plan_is_taken_in() -> None:
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    threads = PlanThreads(errors.put)
    mistake = ValueError("no such plan")

    def fail() -> None:
        raise mistake

    threads.add("a", fail)
    assert errors.get(timeout=DEADLINE_SECONDS) is mistake
    taken = threading.Event()
    threads.add("a", taken.set)
    assert taken.wait(DEADLINE_SECONDS)
