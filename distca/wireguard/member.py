"""A member of the data network: joins, keeps its peers as the control plane tells them, leaves.

While the control plane is away the peers stay as they are, so that rows go on.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network

from core_attention.whole_file import write_whole
from distca.contract import rpc
from distca.contract.reconnect import Addresses, is_transient, reach
from distca.contract.rotation import Rotation
from distca.contract.timeouts import default_seconds
from distca.process.interrupt import StopRequest
from distca.wireguard.contact import NetworkContact
from distca.wireguard.peers import Peer, merged
from distca.wireguard.settings import MemberSettings
from distca.wireguard.state import MemberState
from distca.wireguard.tunnel import Tunnel

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5
"""Between two answers: when many join at a time, each answer tells of several."""

_LOOK_SECONDS = 300.0
"""How long a control plane that is away is looked for before the log says so again."""

_END_SECONDS = default_seconds("tunnel_end_seconds")
"""How long the thread may take to end: longer than a call, and than a program that is run."""

_NOTICE_SECONDS = 0.2
"""How late the end of the process is noticed."""


class AddressLostError(Exception):
    """The control plane gives a member that comes back another address than it had."""


def run(settings: MemberSettings, tell: Callable[[str], None]) -> None:
    """Is a member until SIGTERM or SIGINT.

    Args:
        settings: of the member.
        tell: called with its address, on a thread, once rows can go.

    Raises:
        distca.contract.rpc.RpcError: the control plane cannot be reached at start, or refuses.
        distca.wireguard.tools.TunnelError: the interface cannot be made or set.
        distca.wireguard.state.StateFileError: the state file is of no use.
        AddressLostError: the member came back, and the address is another one's.
        OSError: a file cannot be read or written.
        KeyboardInterrupt: it was SIGINT; after leaving.
    """
    member = Member(settings, tell)
    with StopRequest() as stop:
        try:
            member.start()
            while not stop.requested and member.wait(_NOTICE_SECONDS):
                pass
        finally:
            member.leave()
    member.check()
    stop.check()


class Member:
    """Keeps one interface in step with the control plane.

    Args:
        settings: of the member.
        tell: called with the address, on a thread, once rows can go.
    """

    def __init__(self, settings: MemberSettings, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._tell = tell
        reached = settings.rpc.following_files()
        self._addresses = Addresses(reached)
        self._rotation = Rotation(reached)
        self._state = MemberState.load(settings.state_file)
        self._tunnel = Tunnel(
            settings.interface,
            port=settings.port,
            private_text=self._state.private_text,
            mtu=settings.mtu,
        )
        self._network: IPv4Network | None = None
        self._contact: NetworkContact | None = None
        self._peers: tuple[Peer, ...] = ()
        self._revision = ""
        self._ending = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._keep, name="distca-wireguard", daemon=True)

    def start(self) -> None:
        """Joins and keeps the peers in step, on a thread."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits until the thread has ended, but no longer than that; whether it goes on."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def leave(self) -> None:
        """Leaves the network and removes the interface. Idempotent; the control plane need not be
        there."""
        self._ending.set()
        contact = self._contact
        if contact is not None:
            try:
                # This also ends the renewal that waits for news.
                contact.leave(self._state.public_key)
            except rpc.RpcError as error:
                logger.info("left without saying so: %s", error)
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        self._end_contact()
        self._tunnel.close()

    def check(self) -> None:
        """Raises what has ended the thread, if that was not :meth:`leave`. Raises as
        :func:`run`."""
        if self._error is not None:
            raise self._error

    def _keep(self) -> None:
        try:
            self._join()
            while not self._ending.wait(_PAUSE_SECONDS):
                self._tunnel.check()
                self._renew_or_return()
        except Exception as error:
            # Whatever ends this thread ends the process, which tells why.
            if not self._ending.is_set():
                self._error = error

    def _join(self) -> None:
        # First what may fail on this machine: nobody is told of a member that cannot be one.
        self._tunnel.open(replace=self._settings.replace)
        self._contact = self._reach(self._settings.connect_seconds)
        assert self._network is not None
        self._tunnel.bring_up(IPv4Address(self._state.address), self._network)
        self._renew(self._contact)
        if self._settings.address_file is not None:
            told = {"address": self._state.address, "interface": self._settings.interface}
            write_whole(self._settings.address_file, json.dumps(told))
        self._tell(self._state.address)

    def _renew_or_return(self) -> None:
        contact = self._contact
        try:
            if contact is None:
                contact = self._contact = self._reach(_LOOK_SECONDS)
            elif self._rotation.is_due(contact.settings):
                logger.info("going over to new certificates")
                self._end_contact()
                contact = self._contact = self._reach(_LOOK_SECONDS)
            self._renew(contact)
        except rpc.LeaseExpired:
            if not self._ending.is_set() and contact is not None:
                logger.warning("the lease has expired; joining again")
                self._join_at(contact)
        except rpc.RpcError as error:
            if self._ending.is_set():
                return
            if not (is_transient(error) or type(error) is rpc.RpcError):
                raise
            self._end_contact()
            self._addresses.advance()
            logger.warning(
                "the control plane is away, and looked for; the %d peers stay: %s",
                len(self._peers),
                error,
            )

    def _end_contact(self) -> None:
        contact, self._contact = self._contact, None
        if contact is not None:
            contact.end()

    def _reach(self, timeout_seconds: float) -> NetworkContact:
        return reach(
            self._attempt,
            self._addresses,
            timeout_seconds=timeout_seconds,
            giving_up=self._ending,
        )

    def _attempt(self, settings: rpc.RpcSettings) -> NetworkContact:
        contact = NetworkContact(settings)
        try:
            self._join_at(contact)
        except BaseException:
            contact.end()
            raise
        return contact

    def _join_at(self, contact: NetworkContact) -> None:
        state, network = contact.join(self._state, self._settings.endpoint)
        if self._network is not None and (state.address, network) != (
            self._state.address,
            self._network,
        ):
            raise AddressLostError(
                f"the control plane gives {state.address} of {network} to this member, which had "
                f"{self._state.address} of {self._network}: it has another network or another "
                "token secret now, or gave the address away; start this member again, and what "
                "uses the address"
            )
        if state != self._state and self._settings.state_file is not None:
            state.save(self._settings.state_file)
        self._state, self._network, self._revision = state, network, ""
        logger.info("in the data network %s at %s", network, state.address)

    def _renew(self, contact: NetworkContact) -> None:
        answer = contact.renew(self._state.public_key, self._revision)
        if answer.revision == self._revision:
            return
        assert self._network is not None
        own = self._state.public_key
        told = [
            Peer.from_proto(peer, self._network) for peer in answer.peers if peer.public_key != own
        ]
        peers = merged(self._peers, told, complete=answer.complete)
        if peers != self._peers:
            self._tunnel.set_peers(peers)
            logger.info("the data network has %d other members", len(peers))
        self._peers, self._revision = peers, answer.revision
