"""The attention servers and their leases.

A pure state machine: the time comes in with every call, in seconds of any clock that never goes
back; there is no I/O. Pool servers hold a lease of their own. An in-place server shares the lease
of the rank whose process it lives in, so it comes and goes with the rank.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.errors import InvalidRequestError, RefusedError
from core_attention.cost_model import CostProfile
from distca.contract.addresses import split_address
from distca.contract.identity import check_name
from distca.contract.rpc_errors import Reason
from distca.process.plain_text import plain
from distca.v1.membership_pb2 import ServerLoad

REMEMBERED_LEASES = 1024
"""Leases that were taken away of which is known why."""

REMEMBERED_RANKS = 256
"""Lost ranks that are remembered of each server."""

MAX_HOST_CHARACTERS = 253
"""The longest DNS name (RFC 1035)."""

_MAX_DEVICE_CHARACTERS = 128
_MAX_CALL_CHARACTERS = 200
_MAX_VERSION_CHARACTERS = 64


def checked_id(name: str, value: str) -> str:
    """``value`` if it can name a server or a job."""
    try:
        check_name(name, value)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    return value


def checked_text(name: str, value: str, *, longest: int) -> str:
    """``value`` if logs, labels and terminals can show it."""
    if not value:
        raise InvalidRequestError(f"{name} is empty; it must be named")
    if len(value) > longest or not value.isprintable():
        raise InvalidRequestError(
            f"{name} is {value[:longest]!r}, {len(value)} characters; it must be 1 to {longest} "
            "printable characters"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    """A server's identity and abilities.

    Attributes:
        server_id: unique in the control plane.
        data_address: ``host:port`` of its data plane.
        host: name of its machine.
        device: for example ``"NVIDIA H200"``.
        memory_bytes: of the device.
        capacity_rows: q plus k/v rows it can hold in one tick; None without limit.
        profiles: its measured kernel cost, at least one.
        version: of distca that it runs.
        transport: what moves its rows, for example ``"ucxx"``; empty if it does not say.
    """

    server_id: str
    data_address: str
    host: str
    device: str
    memory_bytes: int
    capacity_rows: int | None
    profiles: tuple[CostProfile, ...]
    version: str
    transport: str = ""

    def __post_init__(self) -> None:
        name = f"server {self.server_id}"
        checked_text(f"{name}: data_address", self.data_address, longest=MAX_HOST_CHARACTERS + 8)
        try:
            split_address("data_address", self.data_address)
        except ValueError as error:
            raise InvalidRequestError(f"{name}: {error}") from error
        if self.transport:
            checked_id("transport", self.transport)
        checked_text(f"{name}: host", self.host, longest=MAX_HOST_CHARACTERS)
        checked_text(f"{name}: device", self.device, longest=_MAX_DEVICE_CHARACTERS)
        if self.version:
            checked_text(f"{name}: version", self.version, longest=_MAX_VERSION_CHARACTERS)
        if self.memory_bytes < 0 or (self.capacity_rows or 0) < 0:
            raise InvalidRequestError(
                f"{name}: memory_bytes is {self.memory_bytes} and capacity_rows "
                f"{self.capacity_rows}; neither may be negative"
            )
        if not self.profiles:
            raise InvalidRequestError(
                f"{name} has no cost profile; a server measures its kernels or loads a profile "
                "before it registers"
            )


def checked_load(load: ServerLoad) -> ServerLoad:
    """``load`` if its numbers are possible."""
    if not (math.isfinite(load.busy_ratio) and 0 <= load.busy_ratio <= 1):
        raise InvalidRequestError(f"busy_ratio is {load.busy_ratio}; it must be from 0 to 1")
    for name in ("oldest_ready_seconds", "moved_bytes_per_second"):
        value = getattr(load, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidRequestError(f"{name} is {value}; it must be 0 or more")
    return load


@dataclass(frozen=True)
class InPlace:
    """The job and rank whose process an in-place server shares."""

    job_id: str
    rank: int


@dataclass(kw_only=True)
class Member:
    """A live server.

    Attributes:
        description: what it is.
        lease_id: of its own lease, or of its rank's.
        renewed_at: when its lease was last renewed; an in-place server's heartbeat.
        in_place: None for a pool server.
        is_watching: whether its stream of events is open.
        draining: gets no new work. An in-place server still runs its own rank's tasks.
        load: as last reported.
        lost_ranks: when it reported that its connection to a rank of a job was reset.
    """

    description: ServerDescription
    lease_id: str
    renewed_at: float
    in_place: InPlace | None = None
    is_watching: bool = False
    draining: bool = False
    load: ServerLoad = field(default_factory=ServerLoad)
    lost_ranks: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def server_id(self) -> str:
        return self.description.server_id

    def reaches(self, transport: str) -> bool:
        """Return whether ranks that use ``transport`` can reach it; either may not have said."""
        return not transport or self.description.transport in ("", transport)


class Membership:
    """The live servers. Every method either does all it says or raises and changes nothing."""

    def __init__(self, *, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._by_id: dict[str, Member] = {}
        self._by_lease: dict[str, Member] = {}
        # Why leases were taken away, so that their servers can tell it from a new control plane.
        self._taken: OrderedDict[str, str] = OrderedDict()

    def register(self, description: ServerDescription, *, lease_id: str, now: float) -> Member:
        """A pool server joins."""
        self.check_free(description.server_id)
        return self._add(Member(description=description, lease_id=lease_id, renewed_at=now))

    def register_in_place(
        self, description: ServerDescription, in_place: InPlace, *, lease_id: str, now: float
    ) -> Member:
        """The server of a rank joins, under the rank's lease."""
        self.check_free(description.server_id)
        member = Member(
            description=description, lease_id=lease_id, renewed_at=now, in_place=in_place
        )
        return self._add(member)

    def check_free(self, server_id: str) -> None:
        """Raises unless ``server_id`` is free."""
        holder = self._by_id.get(server_id)
        if holder is not None:
            raise RefusedError(
                Reason.ALREADY_EXISTS,
                f"server_id {server_id!r} is that of the server at "
                f"{holder.description.data_address} on {holder.description.host}, which lives",
            )

    def heartbeat(self, lease_id: str, load: ServerLoad, *, now: float) -> Member:
        """Renews a lease and stores the load."""
        member = self.of_lease(lease_id, now=now)
        member.renewed_at = now
        member.load = load
        return member

    def stream_broken(self, lease_id: str) -> None:
        """A server's stream of events has broken; nothing if the lease has ended."""
        member = self._by_lease.get(lease_id)
        if member is not None:
            member.is_watching = False

    def rank_lost(self, lease_id: str, job_id: str, rank: int, *, now: float) -> None:
        """A server's connection to a rank was reset."""
        lost = self.of_lease(lease_id, now=now).lost_ranks
        lost.pop((job_id, rank), None)
        lost[job_id, rank] = now
        while len(lost) > REMEMBERED_RANKS:
            del lost[next(iter(lost))]

    def lost_ranks(self, job_id: str) -> dict[int, float]:
        """The ranks of a job that servers have lost, and when the last one said so."""
        found: dict[int, float] = {}
        for member in self._by_id.values():
            for (of_job, rank), at in member.lost_ranks.items():
                if of_job == job_id:
                    found[rank] = max(at, found.get(rank, at))
        return found

    def renew_all(self, *, now: float) -> None:
        """Begin all leases again."""
        for member in self._by_id.values():
            member.renewed_at = now

    def of_lease(self, lease_id: str, *, now: float) -> Member:
        """The server that holds ``lease_id``."""
        member = self._by_lease.get(lease_id)
        if lease_id in self._taken:
            raise RefusedError(Reason.FENCED, self._taken[lease_id])
        if member is None:
            raise RefusedError(
                Reason.LEASE_EXPIRED,
                "no server holds the lease that came; the control plane may have started again",
            )
        if self._expired(member, now):
            raise RefusedError(Reason.FENCED, self._why_expired(member))
        return member

    def drain(self, server_id: str) -> Member:
        """Stops giving new work to a server."""
        member = self._by_id.get(server_id)
        if member is None:
            raise RefusedError(Reason.UNKNOWN_SERVER, f"no server has the id {server_id!r}")
        member.draining = True
        return member

    def deregister(self, lease_id: str, *, now: float) -> Member:
        """Ends the lease of a pool server."""
        member = self.of_lease(lease_id, now=now)
        if member.in_place is not None:
            raise InvalidRequestError(
                f"server {member.server_id} is in-place on rank {member.in_place.rank} of job "
                f"{member.in_place.job_id}; it leaves when the rank closes the job"
            )
        self._remove(member)
        return member

    def fence(self, member: Member, why: str) -> None:
        """Takes the lease of a pool server away; it has to register again."""
        self._remove(member)
        self._taken[member.lease_id] = why
        while len(self._taken) > REMEMBERED_LEASES:
            self._taken.popitem(last=False)

    def renew_in_place(
        self, lease_id: str, *, now: float, load: ServerLoad | None = None
    ) -> Member | None:
        """Renew a rank's in-place server, if it has one, which is returned, with the load that came
        with the rank's call."""
        member = self._by_lease.get(lease_id)
        if member is not None:
            member.renewed_at = now
            member.load = load or member.load
        return member

    def remove_in_place(self, job_id: str, rank: int | None = None) -> list[Member]:
        """The in-place servers of a job, or of one of its ranks, leave; returns them."""
        leaving = [
            member
            for member in self._by_id.values()
            if member.in_place is not None
            and member.in_place.job_id == job_id
            and rank in (None, member.in_place.rank)
        ]
        for member in leaving:
            self._remove(member)
        return leaving

    def expire(self, *, now: float) -> list[Member]:
        """Fences and returns the pool servers whose lease has run out, sorted by id."""
        gone = [member for member in self.members() if self._expired(member, now)]
        for member in gone:
            self.fence(member, self._why_expired(member))
        return gone

    def find(self, server_id: str) -> Member | None:
        """The live server ``server_id``, or None."""
        return self._by_id.get(server_id)

    def members(self) -> list[Member]:
        """All live servers, sorted by id."""
        return [self._by_id[server_id] for server_id in sorted(self._by_id)]

    def pool(self) -> list[Member]:
        """The pool servers that take new work, sorted by id."""
        return [m for m in self.members() if m.in_place is None and not m.draining]

    def pool_transports(self) -> list[str]:
        """The transports of pool servers that take new work, sorted, each once."""
        return sorted({m.description.transport for m in self.pool()} - {""})

    def in_place_of(self, job_id: str) -> list[Member]:
        """The in-place servers of a job, sorted by rank."""
        found = [
            (m.in_place.rank, m)
            for m in self._by_id.values()
            if m.in_place is not None and m.in_place.job_id == job_id
        ]
        return [member for _, member in sorted(found, key=lambda pair: pair[0])]

    def where_ranks_stand(self, job_id: str, ranks: Sequence[int]) -> str:
        """Describe the calls in which live ones of ``ranks`` are held up, to be added to a sentence
        about them."""
        told = ""
        for member in self.in_place_of(job_id):
            call = plain(member.load.stands_in, _MAX_CALL_CHARACTERS)
            if call and member.in_place and member.in_place.rank in ranks:
                told += f"; rank {member.in_place.rank} lives, and stands in {call}"
        return told

    def is_live(self, member: Member) -> bool:
        """Return whether ``member`` still holds the lease that it had."""
        return self._by_lease.get(member.lease_id) is member

    def _add(self, member: Member) -> Member:
        self._by_id[member.server_id] = self._by_lease[member.lease_id] = member
        return member

    def _remove(self, member: Member) -> None:
        del self._by_id[member.server_id], self._by_lease[member.lease_id]

    def _why_expired(self, member: Member) -> str:
        return (
            f"server {member.server_id} sent no heartbeat for {self._lease_seconds:g} s, and its "
            "lease was taken away"
        )

    def _expired(self, member: Member, now: float) -> bool:
        """An in-place server's lease is its rank's business, see ``job.py``."""
        return member.in_place is None and now - member.renewed_at > self._lease_seconds
