"""nixl over libfabric, which carries EFA: ``--transport nixl:libfabric``.

Two things are unlike UCX. An agent writes to another one only after both have met, so a connection
introduces the agent that writes, and writes once the peer has met it. And a write is done when the
peer's device has it, which may be before the memory does; so the receiver waits for a notice that
travels behind the bytes.
"""

from __future__ import annotations

import hashlib
import time
from typing import ClassVar, Final

from data_plane.base_connection import Place
from data_plane.nixl.agent import NixlAgent, RegisteredSlab
from data_plane.nixl.connection import PLACE, NixlConnection, RemoteOffer
from data_plane.nixl.link import BadFrame, FrameKind
from data_plane.nixl.transport import NixlTransport
from data_plane.posted_transfer import PostedTransfer
from data_plane.transport import TransportName

_LANDING_SECONDS: Final = 1.0
"""How long bytes that a device has may take into memory; it takes microseconds."""


class LibfabricConnection(NixlConnection):
    """A ``NixlConnection`` over libfabric; for arguments see there."""

    transport_name: ClassVar[str] = TransportName.LIBFABRIC

    def _start(self, sending: bytes, receiving: bytes) -> None:
        super()._start(sending, receiving)
        self._sends_as, self._receives_as = map(_mark, (sending, receiving))
        self._peer_agents: list[bytes] = []
        self._introduced: list[NixlAgent] = []
        self._met: set[NixlAgent] = set()
        self._not_met: list[tuple[Place, RemoteOffer]] = []

    @property
    def moving_bytes(self) -> int:
        return super().moving_bytes + sum(offer.nbytes for _, offer in self._not_met)

    def _send_region(self, region: RegisteredSlab) -> None:
        for metadata in self._peer_agents:
            region.agent.meet(metadata)
        super()._send_region(region)

    def _write(self, transfer: PostedTransfer, offer: RemoteOffer) -> None:
        if transfer.nbytes != offer.nbytes or transfer.nbytes == 0:
            super()._write(transfer, offer)
            return
        agent = self._region_of(transfer).agent
        if agent in self._met:
            super()._write(transfer, offer)
            return
        # Not within nixl, which would wait for the peer while the peer may wait for others.
        place = (transfer.channel, transfer.tag)
        self._waiting_puts[place].append(transfer)
        self._not_met.append((place, offer))
        if agent not in self._introduced:
            self._introduced.append(agent)
            self.link.send(FrameKind.AGENT, agent.introduction)

    def _notice(self, place: Place) -> bytes:
        return self._sends_as + PLACE.pack(*place)

    def _take_frame(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.AGENT:
            self._meet(payload)
            self.link.send(FrameKind.MET, b"")
        elif kind is FrameKind.MET:
            if len(self._met) == len(self._introduced):
                raise BadFrame("an agent was met that was not introduced")
            self._met.add(self._introduced[len(self._met)])
            waiting, self._not_met = self._not_met, []
            for place, offer in waiting:
                self._take_offer_frame(place, offer)
        else:
            super()._take_frame(kind, payload)

    def _meet(self, metadata: bytes) -> None:
        """Has all agents that the peer may write to meet one of the peer's."""
        memory = self.worker.memory
        try:
            for agent in {memory.agent, *(region.agent for region in self._sent_regions)}:
                agent.meet(metadata)
        except memory.agent.errors as error:
            raise BadFrame(f"an agent that cannot be met: {error}") from error
        # With what is known of the peer, so that it is forgotten with it.
        self._remote_regions[~len(self._peer_agents)] = metadata
        self._peer_agents.append(metadata)

    def _take_done(self, place: Place) -> None:
        region, notice = self._offered(place).region, self._receives_as + PLACE.pack(*place)
        if region is None:
            super()._take_done(place)
            return

        def has_arrived() -> bool:
            return self._torn_down or notice in region.agent.arrived

        def take() -> None:
            region.agent.arrived.discard(notice)
            if not self._torn_down and place in self._advertised:
                super(LibfabricConnection, self)._take_done(place)

        self.worker.call_when(has_arrived, take)

    def _release_advertised(self) -> None:
        self.worker.call_at(time.monotonic() + _LANDING_SECONDS, super()._release_advertised)


class LibfabricTransport(NixlTransport):
    """A ``NixlTransport`` over libfabric; its settings name that back end."""

    connection_type = LibfabricConnection


def _mark(key: bytes) -> bytes:
    """Both ends of a direction have its key: notices of others do not meet theirs."""
    return hashlib.blake2b(key, digest_size=8).digest()
