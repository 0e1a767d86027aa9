"""Refusals are counted by method and reason, and logged when they begin and when they stop."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from control_plane.errors import InvalidRequestError, RefusedError
from control_plane.service.refusals import MAX_LOGGED, QUIET_SECONDS, Refusals
from distca.contract.rpc_errors import Reason


class Kit:
    """Refusals on a clock of the test's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.now = 0.0
        self.refusals = Refusals(self.registry, lambda: self.now)

    def count(self, method: str, reason: str) -> float | None:
        return self.registry.get_sample_value(
            "distca_control_plane_requests_refused_total", {"method": method, "reason": reason}
        )

    def refuse(self, caller: str = "spiffe://distca/trainer/a") -> None:
        self.refusals.refused("Jobs/OpenJob", caller, RefusedError(Reason.WRONG_ROLE, "not yours"))


@pytest.fixture
def kit() -> Kit:
    return Kit()


def test_all_are_counted_and_the_first_is_logged(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        kit.refuse()
    assert kit.count("Jobs/OpenJob", "wrong-role") == 5
    (logged,) = caplog.messages
    assert "spiffe://distca/trainer/a (wrong-role): not yours" in logged


def test_the_end_is_logged_once(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kit.refuse()
    kit.refuse()
    kit.now = QUIET_SECONDS + 1
    kit.refusals.sweep()
    kit.refusals.sweep()
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("from spiffe://distca/trainer/a; 2 were")
    kit.refuse()
    assert len(caplog.messages) == 3


def test_a_flood_of_callers_is_counted_and_fills_neither_log_nor_memory(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(2 * MAX_LOGGED):
        kit.refuse(str(index))
    assert kit.count("Jobs/OpenJob", "wrong-role") == 2 * MAX_LOGGED
    assert len(caplog.messages) == MAX_LOGGED


def test_mistakes_are_counted_and_not_logged(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    kit.refusals.refused("Jobs/GetStep", "a", InvalidRequestError("no"))
    assert kit.count("Jobs/GetStep", "invalid-request") == 1
    assert not caplog.messages


@pytest.mark.parametrize(
    "error",
    [
        RefusedError(Reason.REPLACED, "newer"),
        RefusedError(Reason.SHUTTING_DOWN, "stopping"),
        RefusedError(Reason.STANDBY, "not the leader"),
    ],
)
def test_what_is_as_it_should_be_is_no_refusal(kit: Kit, error: RefusedError) -> None:
    kit.refusals.refused("Jobs/WatchRank", "a", error)
    assert not next(iter(kit.registry.collect())).samples
