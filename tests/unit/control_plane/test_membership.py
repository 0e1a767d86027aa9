"""The pool's state machine, with the time in the test's hands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from control_plane.errors import InvalidRequestError
from control_plane.jobs.membership import (
    InPlace,
    Member,
    Membership,
    ServerDescription,
    checked_load,
)
from distca.contract.rpc_errors import Reason
from distca.v1.membership_pb2 import ServerLoad
from tests.support.errors import fails
from tests.support.service_harness import linear_profile

LEASE_SECONDS = 10.0
LOAD = ServerLoad(queued_tasks=3, open_ticks=1, busy_ratio=0.5, buffer_bytes=7)


def description(server_id: str, **changes: Any) -> ServerDescription:
    values: dict[str, Any] = {
        "server_id": server_id,
        "data_address": "h:1",
        "host": "h",
        "device": "d",
        "memory_bytes": 1,
        "capacity_rows": None,
        "profiles": (linear_profile(),),
        "version": "1",
    }
    return ServerDescription(**(values | changes))


@pytest.fixture
def membership() -> Membership:
    return Membership(lease_seconds=LEASE_SECONDS)


def test_in_place_server_comes_and_goes_with_its_rank(membership: Membership) -> None:
    for rank in (1, 0):
        membership.register_in_place(
            description(f"s{1 - rank}"), InPlace("job", rank), lease_id=f"L{rank}", now=0.0
        )
    membership.register_in_place(description("other"), InPlace("else", 0), lease_id="M", now=0.0)
    assert membership.pool() == []
    assert [m.server_id for m in membership.in_place_of("job")] == ["s1", "s0"]
    # Its lease is its rank's, which has a state machine of its own.
    assert membership.expire(now=1e6) == []
    with pytest.raises(InvalidRequestError):
        membership.deregister("L0", now=1.0)
    with fails(Reason.ALREADY_EXISTS):
        membership.register(description("s0"), lease_id="X", now=1e6)
    assert [m.server_id for m in membership.remove_in_place("job", 0)] == ["s1"]
    assert [m.server_id for m in membership.remove_in_place("job")] == ["s0"]
    assert [m.server_id for m in membership.members()] == ["other"]


def test_ranks_that_are_held_up_are_told_of_with_their_call(membership: Membership) -> None:
    for rank, stands_in in enumerate(("", "step in adamw.py:88", "step in adamw.py:88")):
        lease = f"L{rank}"
        about = description(f"job.rank-{rank}")
        membership.register_in_place(about, InPlace("job", rank), lease_id=lease, now=0.0)
        membership.renew_in_place(lease, now=1.0, load=ServerLoad(stands_in=stands_in))
    told = membership.where_ranks_stand("job", [0, 1])
    assert "rank 1" in told
    assert "adamw.py:88" in told
    assert not any(f"rank {rank}" in told for rank in (0, 2))
    assert membership.where_ranks_stand("other", [1]) == ""


@pytest.mark.parametrize(
    "load",
    [
        *({"busy_ratio": each} for each in (-0.1, 1.1, float("nan"))),
        {"moved_bytes_per_second": -1.0},
    ],
)
def test_impossible_load_is_refused(load: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError):
        checked_load(ServerLoad(**load))  # type: ignore[arg-type]


class MembershipMachine(RuleBasedStateMachine):
    """Against a model: a dictionary from id to (lease, time of renewal)."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(lease_seconds=LEASE_SECONDS)
        self.model: dict[str, tuple[str, float]] = {}
        self.now = 0.0
        self.n_leases = 0

    def lives(self, server_id: str) -> bool:
        return server_id in self.model and self.now - self.model[server_id][1] <= LEASE_SECONDS

    @rule(server_id=st.sampled_from("abc"))
    def register(self, server_id: str) -> None:
        lease = f"lease-{self.n_leases}"
        self.n_leases += 1

        def register() -> None:
            self.membership.register(description(server_id), lease_id=lease, now=self.now)

        if server_id in self.model:
            with fails(Reason.ALREADY_EXISTS):
                register()
        else:
            register()
            self.model[server_id] = (lease, self.now)

    @rule(server_id=st.sampled_from("abc"), leave=st.booleans())
    def renew_or_leave(self, server_id: str, leave: bool) -> None:
        lease = self.model.get(server_id, ("none", 0.0))[0]

        def act() -> Member:
            if leave:
                return self.membership.deregister(lease, now=self.now)
            return self.membership.heartbeat(lease, LOAD, now=self.now)

        if not self.lives(server_id):
            # An expired lease is over before it is swept.
            with fails(Reason.FENCED if server_id in self.model else Reason.LEASE_EXPIRED):
                act()
            return
        member = act()
        assert (member.server_id, self.membership.is_live(member)) == (server_id, not leave)
        if leave:
            del self.model[server_id]
        else:
            assert member.load == LOAD
            self.model[server_id] = (lease, self.now)

    @rule(seconds=st.sampled_from([0.125, 5.0, 10.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        expected = sorted(s for s in self.model if not self.lives(s))
        assert [m.server_id for m in self.membership.expire(now=self.now)] == expected
        for server_id in expected:
            del self.model[server_id]

    @invariant()
    def agrees(self) -> None:
        assert [m.server_id for m in self.membership.members()] == sorted(self.model)


TestMembershipMachine = MembershipMachine.TestCase
TestMembershipMachine.settings = settings(max_examples=60)
