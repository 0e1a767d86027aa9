"""Where ranks listen for one another."""

from __future__ import annotations

from typing import Any

import pytest

from core_attention.shape import AttentionShape
from distca.contract import rpc
from distca.contract.addresses import split_address
from distca.v1 import jobs_pb2
from tests.support.cluster import Cluster
from tests.support.team import Team
from trainer_client import Placement, SessionOptions
from trainer_client.link.control_link import ControlLink
from trainer_client.link.data_host import data_host_of

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
CONTROL_PLANE = "127.0.0.1:7700"
TOWARDS_IT = "10.1.0.7"


@pytest.mark.parametrize(
    ("placement", "one_host", "given", "expected"),
    [
        ("pool", False, "127.0.0.1", TOWARDS_IT),
        ("pool", False, "10.9.9.9", "10.9.9.9"),
        ("pool", True, "127.0.0.1", "127.0.0.1"),
        ("in-place", False, "127.0.0.1", "127.0.0.1"),
        ("mixed", False, "127.0.0.1", "127.0.0.1"),
    ],
)
def test_ranks_on_a_pool_take_the_address_towards_the_control_plane(
    monkeypatch: pytest.MonkeyPatch, placement: str, one_host: bool, given: str, expected: str
) -> None:
    monkeypatch.setattr("data_plane.interfaces.source_ip", lambda _: TOWARDS_IT)
    options = SessionOptions(
        control_plane=CONTROL_PLANE,
        job="where",
        rank=0,
        n_ranks=1,
        n_layers=1,
        shape=SHAPE,
        placement=Placement(placement),
        data_host=given,
        one_host=one_host,
    )
    settings = rpc.RpcSettings(address=CONTROL_PLANE, connect_seconds=1.0)
    assert data_host_of(options, settings) == expected


def test_ranks_on_a_pool_tell_that_address(
    pool_of_four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where documents span ranks, they need one another once the pool has no server left."""
    where, told = "127.0.0.5", []
    opened = ControlLink.open

    def open_and_note(link: ControlLink, request: jobs_pb2.OpenJobRequest, *more: Any) -> None:
        told.append(request.in_place_server.data_address)
        opened(link, request, *more)

    monkeypatch.setattr("trainer_client.session.data_host_of", lambda *_: where)
    monkeypatch.setattr(ControlLink, "open", open_and_note)
    with Team(pool_of_four, 1, SHAPE, placement="pool", n_nano_batches=1):
        (address,) = told
    assert split_address("data_address", address)[0] == where
