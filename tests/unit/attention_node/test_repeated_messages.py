"""A rank that is connected twice and sends a tick on both connections: the first message counts,
and nothing of the second one is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core_attention.kernels.cpu import CpuKernel
from tests.unit.attention_node.test_tick_server import FakeConnection, Harness, ticks_of, wait_for


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness(CpuKernel())
    yield made
    made.server.close()
    made.executor.close()


def twice_connected(harness: Harness) -> list[FakeConnection]:
    """Rank 0, rank 1, and rank 0 once more."""
    connections = [harness.connect(rank) for rank in (0, 1, 0)]
    harness.add(0)
    return connections


def buffers_come_back(harness: Harness) -> None:
    harness.server.close()
    wait_for(lambda: harness.pool.stats().in_use_bytes == 0)


def test_while_the_tick_is_open(harness: Harness) -> None:
    first, other, second = twice_connected(harness)
    tick = ticks_of(0)[0]
    first.arrive(tick)
    second.arrive(tick)
    wait_for(lambda: second.closed)
    assert "has sent it before" in second.reason
    other.arrive(tick)
    wait_for(lambda: bool(first.puts) and bool(other.puts))
    assert not first.closed
    buffers_come_back(harness)
