"""A connection of the nixl transport: offers travel over the link, bytes by one-sided writes.

The receiver sends its offer: where the bytes are to go. The sender, once it has both the offer and
the bytes, says that it begins, writes, and says when the write is done; nixl's write is done only
when the bytes are at the peer, so the news never overtakes them.

A write cannot be stopped. So when a connection ends, whatever the reason, each side ends the link
in its direction only when its own writes are over, and keeps the buffers that it has offered out of
their pool until the peer's direction has ended, which the end of the peer's process also brings
about.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from data_plane.base_connection import CLOSE_NOTICE, BaseConnection, Place, nothing
from data_plane.greeting import Greeting
from data_plane.metrics import DropCause
from data_plane.nixl.agent import HOST, RegisteredSlab
from data_plane.nixl.link import BadFrame, FrameKind, NixlLink, UnprovenFrame
from data_plane.nixl.worker import NixlWorker
from data_plane.posted_transfer import DATA_CHANNEL, PostedTransfer
from data_plane.transport import PeerLost, PeerReset, TransportError, TransportName

if TYPE_CHECKING:
    import socket

    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

PLACE = struct.Struct("!BQ")
_OFFER = struct.Struct("!BQIQQi")
_SIZE = struct.Struct("!BQQ")
_NUMBER = struct.Struct("!I")
_HELP_SECONDS = 5e-3
_PEER_DIED: Final = "the peer died or closed it"


@dataclass(frozen=True)
class RemoteOffer:
    """The place where the peer wants the bytes of a message."""

    region: int
    address: int
    nbytes: int
    device_index: int


@dataclass(eq=False)
class _Advertised:
    """An offer that the peer knows of, and may be writing to."""

    transfer: PostedTransfer
    region: RegisteredSlab | None
    begun: bool = False


class NixlConnection(BaseConnection):
    """Implements ``Connection``.

    Args:
        connection: a connected socket.
        max_unclaimed_offers: of the peer, that may wait for a put.
        worker, peer, slowest_bytes_per_second, metrics: see ``BaseConnection``.

    Attributes:
        link: the socket's two directions.
    """

    transport_name: ClassVar[str] = TransportName.NIXL
    worker: NixlWorker

    def __init__(
        self,
        worker: NixlWorker,
        connection: socket.socket,
        peer: str,
        max_unclaimed_offers: int,
        slowest_bytes_per_second: float,
        metrics: DataPlaneMetrics | None,
    ) -> None:
        super().__init__(worker, peer, slowest_bytes_per_second, metrics)
        self._on_bad_greeting: Callable[[ValueError], None] | None = None
        self._max_unclaimed_offers = max_unclaimed_offers
        self._advertised: dict[Place, _Advertised] = {}
        self._sent_regions: dict[RegisteredSlab, int] = {}
        self._remote_regions: dict[int, bytes] = {}
        self._remote_offers: defaultdict[Place, deque[RemoteOffer]] = defaultdict(deque)
        self._remote_offer_count = 0
        self._waiting_puts: defaultdict[Place, deque[PostedTransfer]] = defaultdict(deque)
        self._waiting_skips: set[Place] = set()
        self._peer_ended = False
        self.link = NixlLink(worker, connection, self._on_frame, self._on_bad, self._on_link_ended)

    def send_greeting(self, greeting: Greeting, on_sent: Callable[[], None] = nothing) -> None:
        self.link.send_raw(greeting.encode())
        on_sent()

    def receive_greeting(
        self, on_greeting: Callable[[Greeting], None], on_bad: Callable[[ValueError], None]
    ) -> None:
        self._on_bad_greeting = on_bad
        self.link.expect_greeting(on_greeting)

    def _start(self, sending: bytes, receiving: bytes) -> None:
        self.link.begin(sending, receiving)

    @property
    def moving_bytes(self) -> int:
        arriving = (each.transfer.nbytes for each in self._advertised.values() if each.begun)
        return sum(arriving) + sum(transfer.nbytes for transfer in self._moving)

    def send_control(self, operation: int, payload: bytes) -> None:
        self.link.send(FrameKind.CONTROL, _NUMBER.pack(operation) + payload)

    # The receiving side

    def _accept_offer(self, transfer: PostedTransfer) -> None:
        if self._torn_down:
            return
        try:
            region = self._region_of(transfer) if transfer.nbytes else None
        except self.worker.memory.agent.errors as error:
            self._fail_with(f"memory cannot be registered: {error}", "is it plain memory?")
            return
        address, device_index = 0, HOST
        if region is not None:
            self._send_region(region)
            tensor = transfer.buffer.tensor
            address = tensor.data_ptr()
            device_index = tensor.device.index or 0 if tensor.is_cuda else HOST
        place = (transfer.channel, transfer.tag)
        self._advertised[place] = _Advertised(transfer, region)
        number = 0 if region is None else self._sent_regions[region]
        self.link.send(
            FrameKind.OFFER, _OFFER.pack(*place, number, address, transfer.nbytes, device_index)
        )

    def _region_of(self, transfer: PostedTransfer) -> RegisteredSlab:
        return self.worker.memory.region(transfer.buffer.slab)

    def _send_region(self, region: RegisteredSlab) -> None:
        if region not in self._sent_regions:
            number = self._sent_regions[region] = len(self._sent_regions)
            self.link.send(FrameKind.REGION, _NUMBER.pack(number) + region.metadata)

    def _take_begin(self, place: Place) -> None:
        advertised = self._offered(place)
        advertised.transfer.started = time.monotonic()
        advertised.begun = True
        if advertised.region is not None:
            self.worker.expect(advertised.region.agent)

    def _take_done(self, place: Place) -> None:
        advertised = self._offered(place)
        del self._advertised[place]
        if advertised.begun and advertised.region is not None:
            self.worker.expect_no_more(advertised.region.agent)
        with self._lock:
            self._offers.pop(place, None)
        self._end(advertised.transfer, None)

    def _take_size(self, place: Place, nbytes: int) -> None:
        transfer = self._offered(place).transfer
        # The peer writes nothing to it.
        del self._advertised[place]
        with self._lock:
            self._offers.pop(place, None)
        self._refuse_size(transfer, nbytes)

    def _offered(self, place: Place) -> _Advertised:
        try:
            return self._advertised[place]
        except KeyError:
            raise BadFrame(f"nothing is on offer for channel {place[0]}, tag {place[1]}") from None

    def _take_skip(self, place: Place) -> None:
        channel, tag = place
        if channel != DATA_CHANNEL or self._offered(place).begun:
            raise BadFrame(f"a skip of channel {channel}, tag {tag}, whose message has begun")
        # The peer writes nothing to it.
        del self._advertised[place]
        self._skip_offer(tag)

    # The sending side

    def _send_skip(self, tag: int) -> None:
        """Answers the peer's offer, so that both sides agree which one it was."""
        place = (DATA_CHANNEL, tag)
        if self._take_remote_offer(place) is None:
            self._waiting_skips.add(place)
        else:
            self.link.send(FrameKind.SKIP, PLACE.pack(*place))

    def _take_remote_offer(self, place: Place) -> RemoteOffer | None:
        """The peer's oldest offer for ``place``; None if there is none."""
        offers = self._remote_offers.get(place)
        if not offers:
            return None
        offer = offers.popleft()
        self._remote_offer_count -= 1
        if not offers:
            del self._remote_offers[place]
        return offer

    def _send(self, transfer: PostedTransfer) -> None:
        place = (transfer.channel, transfer.tag)
        offer = self._take_remote_offer(place)
        if offer is None:
            self._waiting_puts[place].append(transfer)
        else:
            self._write(transfer, offer)

    def _take_offer_frame(self, place: Place, offer: RemoteOffer) -> None:
        if place in self._waiting_skips:
            self._waiting_skips.discard(place)
            self.link.send(FrameKind.SKIP, PLACE.pack(*place))
            return
        waiting = self._waiting_puts.get(place)
        if waiting:
            transfer = waiting.popleft()
            if not waiting:
                del self._waiting_puts[place]
            self._write(transfer, offer)
            return
        self._remote_offers[place].append(offer)
        self._remote_offer_count += 1
        if self._remote_offer_count > self._max_unclaimed_offers:
            self.fail(
                self._new_error(
                    TransportError,
                    f"{self._remote_offer_count} offers wait for a put, "
                    f"max_unclaimed_offers={self._max_unclaimed_offers}",
                    hint="the peers disagree about the plan, or this side sends too late",
                )
            )

    def _write(self, transfer: PostedTransfer, offer: RemoteOffer) -> None:
        place = (transfer.channel, transfer.tag)
        if transfer.nbytes != offer.nbytes:
            # The receiver raises, and closes the connection: that ends the put.
            self._waiting_puts[place].append(transfer)
            self.link.send(FrameKind.SIZE, _SIZE.pack(*place, transfer.nbytes))
            return
        if transfer.nbytes == 0:
            self.link.send(FrameKind.DONE, PLACE.pack(*place))
            self._end(transfer, None)
            return
        try:
            agent = self._region_of(transfer).agent
            metadata = self._remote_regions[offer.region]
            write = agent.write(
                transfer.buffer.tensor,
                metadata,
                offer.address,
                offer.device_index,
                self._notice(place),
            )
        except self.worker.memory.agent.errors as error:
            self._waiting_puts[place].append(transfer)
            self._fail_with(f"cannot write: {type(error).__name__}: {error}")
            return
        self.link.send(FrameKind.BEGIN, PLACE.pack(*place))
        self._moving.add(transfer)
        self.worker.write(write, transfer, lambda error: self._on_written(transfer, error))

    def _notice(self, place: Place) -> bytes:
        """The notice behind the bytes for ``place``; empty where a write that is done is there."""
        return b""

    def _on_written(self, transfer: PostedTransfer, error: Exception | None) -> None:
        self._moving.discard(transfer)
        if self._torn_down:
            self._end(transfer, transfer.failure or self._later_error())
            self._finish_link()
            return
        if error is not None:
            self._fail_with(f"connection lost: {type(error).__name__}: {error}")
            self._end(transfer, self._later_error())
            return
        self.link.send(FrameKind.DONE, PLACE.pack(transfer.channel, transfer.tag))
        self._end(transfer, None)

    # The link

    def _on_frame(self, kind: FrameKind, payload: bytes) -> None:
        self._pings.last_heard = time.monotonic()
        if self._torn_down:
            return
        try:
            self._take_frame(kind, payload)
        except struct.error as error:
            raise BadFrame(f"{kind.name} of {len(payload)} bytes: {error}") from error

    def _take_frame(self, kind: FrameKind, payload: bytes) -> None:
        match kind:
            case FrameKind.REGION:
                (number,) = _NUMBER.unpack_from(payload)
                self._remote_regions[number] = payload[_NUMBER.size :]
            case FrameKind.OFFER:
                channel, tag, *where = _OFFER.unpack(payload)
                offer = RemoteOffer(*where)
                if offer.nbytes and offer.region not in self._remote_regions:
                    raise BadFrame(f"an offer in region {offer.region}, which is not known")
                self._take_offer_frame((channel, tag), offer)
            case FrameKind.BEGIN:
                self._take_begin(PLACE.unpack(payload))
            case FrameKind.DONE:
                self._take_done(PLACE.unpack(payload))
            case FrameKind.SIZE:
                channel, tag, nbytes = _SIZE.unpack(payload)
                self._take_size((channel, tag), nbytes)
            case FrameKind.SKIP:
                self._take_skip(PLACE.unpack(payload))
            case FrameKind.CONTROL:
                (operation,) = _NUMBER.unpack_from(payload)
                self._take_control(operation, payload[_NUMBER.size :])
            case _:
                raise BadFrame(f"{kind.name}, which UCX has no use for")

    def _on_bad(self, bad: ValueError) -> None:
        if self._on_bad_greeting is not None and not self.greeted:
            self._on_bad_greeting(bad)
        else:
            if isinstance(bad, UnprovenFrame) and self._metrics is not None:
                dropped = self._metrics.series.messages_dropped_total
                dropped.labels(self.transport_name, DropCause.UNPROVEN).inc()
            self._fail_with(f"the peer speaks another protocol: {bad}")

    def _on_link_ended(self, error: Exception | None) -> None:
        """The peer sends nothing more. Unless the network is to blame, it writes nothing more."""
        self._peer_ended = error is None
        died = not self._torn_down
        if died:
            # A peer that closes says so first: without a word its process has ended.
            self.fail(
                self._new_error(
                    PeerReset if error is None else PeerLost,
                    "connection lost" + (f": {error}" if error else ""),
                    hint=_PEER_DIED,
                )
            )
        if error is None:
            self._release_advertised()
        elif self._advertised:
            logger.error(
                "connection with %s: %s; whether it still writes cannot be known, %d buffers that "
                "were offered to it are withheld",
                self.peer,
                error,
                len(self._advertised),
            )
            self.worker.withhold(self._advertised)
            self._advertised = {}
        if died and not self._moving:
            for metadata in self._remote_regions.values():
                self.worker.memory.agent.forget_dead(metadata)
        self._finish_link()

    def _fail_with(self, message: str, hint: str = _PEER_DIED) -> None:
        self.fail(self._new_error(PeerLost, message, hint=hint))

    # The end

    def _send_close_notice(self) -> None:
        self._tear_down(None)

    def _disconnect(self, offers: list[PostedTransfer]) -> None:
        """Every transfer ends now. The buffers of those that the network may still touch come back
        later."""
        self.worker.lingering.add(self)
        if self.greeted:
            self.send_control(CLOSE_NOTICE, self._close_notice())
        advertised = {each.transfer for each in self._advertised.values()}
        waiting = [transfer for puts in self._waiting_puts.values() for transfer in puts]
        for transfer in (*offers, *waiting):
            self._end(
                transfer,
                transfer.failure or self._later_error(),
                release_buffer=transfer not in advertised,
            )
        for transfer in self._moving:
            self._end(transfer, transfer.failure or self._later_error(), release_buffer=False)
        self._waiting_puts.clear()
        self._remote_offers.clear()
        for each in self._advertised.values():
            if each.begun and each.region is not None:
                self.worker.expect_no_more(each.region.agent)
        self._help_along()
        self._finish_link()

    def _help_along(self) -> None:
        """Lets the peer's last writes, which it may not even have begun, come to their end, without
        haste."""
        agents = {each.region.agent for each in self._advertised.values() if each.region}
        for agent in agents:
            agent.progress()
        if agents:
            self.worker.call_at(time.monotonic() + _HELP_SECONDS, self._help_along)

    def _release_advertised(self) -> None:
        advertised, self._advertised = self._advertised, {}
        for each in advertised.values():
            self._end(each.transfer, each.transfer.failure or self._later_error())

    def _finish_link(self) -> None:
        """Ends this side's direction once its writes are over; closes when both have ended."""
        if not self._torn_down or self._moving:
            return
        if not self.link.finished:
            self.link.finish(self._close_link)
        else:
            self._close_link()

    def _close_link(self) -> None:
        if self._peer_ended or not self._advertised:
            self.link.close()
            self.worker.lingering.discard(self)
