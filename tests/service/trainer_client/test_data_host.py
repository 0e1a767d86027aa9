"""Where ranks listen for one another."""

from __future__ import annotations

import pytest

from distca.contract import rpc
from tests.service.trainer_client.test_options import options
from trainer_client.link.own_transport import data_host_of

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
    made = options(
        control_plane=CONTROL_PLANE, placement=placement, data_host=given, one_host=one_host
    )
    settings = rpc.RpcSettings(address=CONTROL_PLANE, connect_seconds=1.0)
    assert data_host_of(made, settings) == expected
