"""One table of timeouts: no default is typed anywhere else, they stand in order, and a wrong order
is an error."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from distca.apps.train.settings import ServiceSettings
from distca.contract.timeouts import (
    ORDERS,
    TIMEOUTS,
    Order,
    as_markdown,
    check_order,
    known_timeouts,
)
from tests import ROOT
from tests.support.errors import refused
from tests.unit.distca.source_tree import parsed_sources

DEFAULTS = {name: each.seconds for name, each in TIMEOUTS.items()}


LIBRARY = ("attention_node/", "control_plane/", "distca/", "trainer_client/")
"""The packages that stand above the table."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    yield from ((name, tree) for name, tree in parsed_sources() if name.startswith(LIBRARY))


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names with what they are given: fields, constants and parameters."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value
    elif isinstance(node, ast.Assign):
        yield from ((each.id, node.value) for each in node.targets if isinstance(each, ast.Name))
    elif isinstance(node, ast.arguments):
        positional = [each.arg for each in (*node.posonlyargs, *node.args)]
        yield from zip(reversed(positional), reversed(node.defaults), strict=False)
        yield from zip((each.arg for each in node.kwonlyargs), node.kw_defaults, strict=True)


def typed_seconds(tree: ast.Module) -> Iterator[tuple[str, float]]:
    """Names of seconds with the number that is typed for them, unless it is 0, which is none."""
    for name, value in (pair for node in ast.walk(tree) for pair in assigned(node)):
        if name.lower().endswith("_seconds") and value is not None:
            with suppress(ValueError):
                number = ast.literal_eval(value)
                if number and isinstance(number, int | float):
                    yield name, float(number)


def repeated(tree: ast.Module) -> list[str]:
    """What should be :func:`default_seconds`: waits of the table, and what anybody may set."""
    return [
        f"{name} = {seconds:g}"
        for name, seconds in typed_seconds(tree)
        if DEFAULTS.get(name.lower().strip("_")) == seconds
        or (name.islower() and name not in NO_TIMEOUTS)
    ]


def test_no_default_of_the_table_is_typed_anywhere_else() -> None:
    assert {where: found for where, tree in sources() if (found := repeated(tree))} == {}


def test_every_row_is_the_default_of_something() -> None:
    used = {
        node.args[0].value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "default_seconds"
        and isinstance(node.args[0], ast.Constant)
    }
    assert used | BELOW | ELSEWHERE == DEFAULTS.keys()


BELOW = {"handshake_timeout_seconds", "max_unclaimed_seconds"}
"""Rows of the data plane, which stands below the table."""
ELSEWHERE = {"termination_grace_seconds"}
"""Rows of other programs."""


@pytest.mark.parametrize("name", sorted(BELOW))
def test_table_shows_the_defaults_of_the_data_plane(name: str) -> None:
    pytest.importorskip("torch")
    from data_plane.ucxx.settings import UcxxSettings

    assert getattr(UcxxSettings(), name) == DEFAULTS[name]


def test_defaults_stand_in_order_and_what_is_not_known_is_not_checked() -> None:
    check_order(DEFAULTS)
    check_order({"lease_seconds": 1e6})
    with pytest.raises(KeyError):
        check_order({"no_such_seconds": 1.0})


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order.shorter[0]}<{order.longer}")
def test_each_order_is_enforced(order: Order) -> None:
    known = dict.fromkeys(order.shorter, 10.0)
    check_order({**known, order.longer: 10.0 * len(known) + 0.1})
    with pytest.raises(ValueError, match="must be"):
        check_order({**known, order.longer: 10.0 * len(known)})


NO_TIMEOUTS = {
    "certificate_check_seconds": "how often files are looked at",
    "interval_seconds": "how often something is shown",
    "message_latency_seconds": "what a network takes",
    "poll_seconds": "how often a lock is looked at",
    "retry_after_seconds": "what a server asks of a caller",
    "settle_seconds": "how long losses are collected before a recovery begins",
    "tls_check_seconds": "how often files are looked at",
}


@pytest.mark.parametrize("seconds", [1e300, 365 * 86400 + 1])
def test_no_wait_lasts_longer_than_a_year(seconds: float) -> None:
    with refused():
        ServiceSettings(control_plane="h:1", run_dir=Path("run"), start_timeout_seconds=seconds)


def test_settings_hand_over_what_they_hold() -> None:
    @dataclasses.dataclass
    class Settings:
        lease_seconds: int = 3
        other_seconds: float = 4.0

    assert known_timeouts(Settings()) == {"lease_seconds": 3.0}


def test_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert as_markdown() in page, "run make configuration-page"


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
