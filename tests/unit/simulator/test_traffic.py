"""Messages of a plan and the seconds of their ports."""

from __future__ import annotations

import numpy as np
import pytest

from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.message import CHECKSUM_BYTES
from core_attention.plan import Plan, PlanServer
from distca.apps.simulator.packing import pack_in_order
from distca.apps.simulator.traffic import Messages, exchange, port_seconds
from tests.unit.simulator.cases import SMALL_MODEL, setup


def plan_of_one_document(n_pool: int = 0) -> Plan:
    """Two ranks of 1024 tokens with a document each; the second half of document 0 is served
    elsewhere: on rank 1, or on the first server of a pool."""
    manifest = pack_in_order(np.array([1024, 1024]), 2, 1024, 1)
    servers = [PlanServer(f"rank-{rank}", rank, "") for rank in range(2)]
    servers += [PlanServer(f"pool-{i}", None, "") for i in range(n_pool)]
    there = 2 if n_pool else 1
    tasks = TaskTable(
        np.array([0, 0, 1]),
        np.array([0, 512, 0]),
        np.array([512, 1024, 1024]),
        np.array([0, there, 1]),
    )
    return Plan(
        manifest=manifest,
        epoch=0,
        servers=tuple(servers),
        forward=tasks,
        backward=tasks,
        mask=MaskKind.CAUSAL,
        planner="by hand",
        reason="",
    )


@pytest.mark.parametrize("n_pool", [0, 1])
def test_queries_and_their_whole_context_travel_and_outputs_come_back(n_pool: int) -> None:
    shape = SMALL_MODEL.attention_shape
    there = 2 if n_pool else 1
    found = exchange(plan_of_one_document(n_pool), shape, Phase.FORWARD, 0)
    request = found.request.matrix()
    rows = 512 * shape.q_row_bytes + 1024 * shape.kv_row_bytes
    assert request[0, there] == rows + CHECKSUM_BYTES
    assert request.sum() == request[0, there]
    reply = found.reply.matrix()
    assert reply[there, 0] == 512 * (shape.o_row_bytes + shape.lse_row_bytes) + CHECKSUM_BYTES
    assert reply.sum() == reply[there, 0]
    assert found.total_bytes == request.sum() + reply.sum()


def test_the_backward_pass_sends_more_and_gets_key_gradients_back() -> None:
    shape = SMALL_MODEL.attention_shape
    found = exchange(plan_of_one_document(), shape, Phase.BACKWARD, 0)
    per_query = shape.q_row_bytes + shape.o_row_bytes + 2 * shape.lse_row_bytes
    rows = 512 * per_query + 1024 * shape.kv_row_bytes
    assert found.request.total_bytes == rows + CHECKSUM_BYTES
    rows = 512 * shape.q_row_bytes + 1024 * shape.kv_row_bytes
    assert found.reply.total_bytes == rows + CHECKSUM_BYTES


def test_ports_add_bytes_and_latency_and_hosts_have_links_of_their_own() -> None:
    cluster = setup(
        4,
        cluster={
            "gpus_per_host": 2,
            "gpu_bandwidth_bytes_per_second": 1e9,
            "host_bandwidth_bytes_per_second": 10e9,
            "message_latency_seconds": 0.5,
        },
    ).cluster
    messages = Messages(
        4,
        source=np.array([0, 0, 0]),
        destination=np.array([1, 2, 3]),
        nbytes=np.array([10_000_000_000, 1_000_000_000, 2_000_000_000]),
    )
    ports = port_seconds(messages, cluster)
    assert ports[0].tolist() == [pytest.approx(1 + 0.5 + 2 + 0.5), 0]  # the network's two messages
    assert ports[:, 1].tolist() == pytest.approx([0, 1.5, 1.5, 2.5])
