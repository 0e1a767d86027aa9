"""One table of timeouts: it tells the defaults that are in force, they stand in order, and a wrong
order is an error that names both sides."""

from __future__ import annotations

import dataclasses
import importlib
import re
from itertools import chain
from pathlib import Path

import pytest
import yaml

from distca.contract.timeouts import (
    ORDERS,
    TIMEOUTS,
    Order,
    Timeout,
    TimeoutOrderError,
    as_markdown,
    check_order,
    known_timeouts,
    timeout,
)

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {each.name: each.seconds for each in TIMEOUTS}


def default_in_force(where: str) -> float:
    module_name, _, path = where.partition(":")
    holder = importlib.import_module(module_name)
    name, _, field = path.partition(".")
    value = getattr(holder, name)
    if not field:
        return float(value)
    defaults = {each.name: each.default for each in dataclasses.fields(value)}
    default = defaults[field]
    assert isinstance(default, int | float)
    return default


@pytest.mark.parametrize(
    "each", [each for each in TIMEOUTS if each.where], ids=lambda each: each.name
)
def test_table_tells_the_default_that_is_in_force(each: Timeout) -> None:
    pytest.importorskip("torch")
    assert default_in_force(each.where) == each.seconds


def test_defaults_stand_in_order() -> None:
    check_order(DEFAULTS)


def test_names_are_unique_and_orders_name_what_is_in_the_table() -> None:
    assert len(DEFAULTS) == len(TIMEOUTS)
    assert DEFAULTS.keys() >= set(chain(*((*order.shorter, order.longer) for order in ORDERS)))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order.shorter[0]}<{order.longer}")
def test_each_order_is_enforced_and_its_error_names_both_sides(order: Order) -> None:
    known = dict.fromkeys(order.shorter, 10.0)
    check_order({**known, order.longer: 10.0 * len(known) + 0.1})
    with pytest.raises(TimeoutOrderError) as caught:
        check_order({**known, order.longer: 10.0 * len(known)})
    for name in (*order.shorter, order.longer):
        assert f"{name} {10.0 * (len(known) if name == order.longer else 1):g}" in str(caught.value)
    assert "lower the former or raise the latter" in str(caught.value)


SETTINGS = (
    "attention_node.server:NodeSettings",
    "control_plane.settings:ControlPlaneSettings",
    "control_plane.settings:CoordinatorSettings",
    "data_plane.nixl.settings:NixlSettings",
    "data_plane.ucxx.settings:UcxxSettings",
    "distca.contract.rpc:RpcSettings",
    "trainer_client.options:SessionOptions",
)
NO_TIMEOUTS = {
    "busy_poll_seconds": "how long to poll before sleeping",
    "certificate_check_seconds": "how often files are looked at",
    "settle_seconds": "how long losses are collected before a recovery begins",
}


@pytest.mark.parametrize("where", SETTINGS)
def test_every_time_that_can_be_set_is_in_the_table(where: str) -> None:
    pytest.importorskip("torch")
    module_name, _, name = where.partition(":")
    settings = getattr(importlib.import_module(module_name), name)
    times = {each.name for each in dataclasses.fields(settings) if each.name.endswith("_seconds")}
    assert times - NO_TIMEOUTS.keys() <= DEFAULTS.keys()


def test_what_is_not_known_is_not_checked() -> None:
    check_order({"lease_seconds": 1e6})
    with pytest.raises(KeyError, match="no_such_seconds"):
        check_order({"no_such_seconds": 1.0})


def test_settings_hand_over_what_they_hold() -> None:
    @dataclasses.dataclass
    class Settings:
        lease_seconds: int = 3
        other_seconds: float = 4.0

    assert known_timeouts(Settings()) == {"lease_seconds": 3.0}
    assert timeout("lease_seconds").who == "control plane"


def test_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "timeouts.md").read_text()
    assert page.endswith(as_markdown()), "print timeouts.as_markdown() into the page"


def test_page_tells_the_time_in_which_a_stopped_server_is_found() -> None:
    page = (ROOT / "docs" / "timeouts.md").read_text()
    quiet, ping = DEFAULTS["ping_quiet_seconds"], DEFAULTS["ping_timeout_seconds"]
    assert f"{quiet + ping:g} s from when something was last heard" in page
    assert f"({quiet:g} s quiet, then {ping:g} s)" in page


def test_containers_are_given_the_time_that_their_processes_take_to_end() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    for service, ending in (
        ("attention-node", DEFAULTS["drain_seconds"]),
        ("control-plane", DEFAULTS["stop_seconds"]),
    ):
        grace = float(services[service]["stop_grace_period"].removesuffix("s"))
        check_order({"drain_seconds": ending, "termination_grace_seconds": grace})
    values = yaml.safe_load((ROOT / "helm" / "distca" / "values.yaml").read_text())
    added = re.search(
        r"add \(ceil \.Values\.attentionNode\.drainSeconds\) (\d+)",
        (ROOT / "helm/distca/templates/attention-node/_pod.tpl").read_text(),
    )
    assert added is not None
    assert float(added[1]) > 0
    check_order(
        {
            "stop_seconds": DEFAULTS["stop_seconds"],
            "termination_grace_seconds": values["controlPlane"]["terminationGracePeriodSeconds"],
        }
    )
