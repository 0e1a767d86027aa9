"""Reports that reach the control plane once it is there."""

from __future__ import annotations

import queue
from typing import Any, cast

import pytest

from distca.contract import rpc
from distca.contract.lifeline import Lifeline
from distca.contract.outbox import Outbox

SOON_SECONDS = 10.0


class Contact:
    """Loses the calls that it is told to lose, and takes the others."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.taken: list[str] = []

    def report(self, what: str) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append(what)

    def is_lost_by(self, error: Exception) -> bool:
        return isinstance(error, rpc.RpcError) and error.reason.is_away


class Contacts:
    """A lifeline with these contacts, one after another."""

    who = "rank 1"

    def __init__(self, *contacts: Contact | None) -> None:
        self.waiting = list(contacts)
        self.let_go_of: queue.SimpleQueue[Contact] = queue.SimpleQueue()

    def await_contact(self) -> Contact | None:
        return self.waiting[0]

    def let_go(self, contact: Contact, _error: Exception) -> None:
        self.let_go_of.put(contact)
        self.waiting.pop(0)


def outbox_of(*contacts: Contact | None) -> tuple[Outbox[Any], Contacts]:
    lifeline = Contacts(*contacts)
    outbox: Outbox[Any] = Outbox(cast(Lifeline[Any], lifeline))
    outbox.start()
    return outbox, lifeline


def put(outbox: Outbox[Any], what: str, *, over: bool = False) -> None:
    outbox.put(what, lambda contact: contact.report(what), lambda: over)


def test_reports_that_are_still_needed_arrive_in_order_before_the_end() -> None:
    contact = Contact()
    outbox, _ = outbox_of(contact)
    for what in "axbc":
        put(outbox, what, over=what == "x")
    outbox.close(SOON_SECONDS)
    assert contact.taken == ["a", "b", "c"]


def test_a_report_that_is_lost_goes_to_the_next_contact() -> None:
    lost, found = (
        Contact(rpc.RpcError(rpc.Reason.UNAVAILABLE, "ReportStep", "cp:1", "gone")),
        Contact(),
    )
    outbox, lifeline = outbox_of(lost, found)
    put(outbox, "a")
    outbox.close(SOON_SECONDS)
    assert lifeline.let_go_of.get(timeout=SOON_SECONDS) is lost
    assert found.taken == ["a"]


def test_a_report_that_is_refused_is_logged_and_not_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    contact = Contact(
        rpc.RpcError(rpc.Reason.INVALID_REQUEST, "ReportStep", "cp:1", "no such step")
    )
    outbox, lifeline = outbox_of(contact)
    put(outbox, "step 3")
    put(outbox, "step 4")
    outbox.close(SOON_SECONDS)
    assert contact.taken == ["step 4"]
    assert lifeline.let_go_of.empty()
    assert len(caplog.records) == 1


def test_without_a_control_plane_to_come_reports_are_dropped() -> None:
    outbox, _ = outbox_of(None)
    put(outbox, "a")
    outbox.close(SOON_SECONDS)
    assert not outbox._thread.is_alive()
