"""The gRPC service of the encrypted data network: keys in, peers out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from ipaddress import IPv4Network
from typing import TypeAlias

import grpc

from control_plane.access.caller import caller_of
from control_plane.errors import NoDataNetworkError, NoIdentityError
from control_plane.network.data_network import DataNetwork
from control_plane.network.network_keys import NetworkKeys
from control_plane.network.revisions import Revisions
from distca.contract.identity import Identity, Role
from distca.v1 import data_network_pb2, data_network_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext

_RENEWALS_PER_LEASE = 5
"""More than others make: members often renew all at the same moment, after news, and a control
plane that has heard nobody for half a lease believes that it was cut off itself."""

_SETTLE_SECONDS = 0.2
"""Between a change and its news: changes rarely come alone, and each answer costs with the number
of members. It also bounds what one tenant costs whose members come and go all the time."""


class DataNetworkService(data_network_pb2_grpc.DataNetworkServicer):
    """Answers members.

    Args:
        network: that addresses are given out of; None refuses every call.
        keys: of the network.
        lease_seconds: how long a member lives without renewal.
        max_members_per_identity: members that one identity may have.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        network: IPv4Network | None,
        keys: NetworkKeys,
        *,
        lease_seconds: float,
        max_members_per_identity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._revisions = Revisions()
        self._telling = False
        self._answers: dict[Identity | None, data_network_pb2.RenewMemberResponse] = {}
        self._members: DataNetwork | None = None
        if network is not None:
            self._members = DataNetwork(
                network,
                keys,
                lease_seconds=lease_seconds,
                max_members_per_identity=max_members_per_identity,
                changed=self._changed,
                now=clock(),
            )

    def lead(self) -> None:
        """Members come from another control plane, or from the process before this one."""
        if self._members is not None:
            self._members.lead(now=self._clock())

    def sweep(self) -> None:
        """Takes out whose lease has run out."""
        if self._members is not None:
            self._members.sweep(now=self._clock())

    def shut_down(self) -> None:
        """Ends the calls that wait."""
        self._revisions.end()

    async def DescribeNetwork(  # noqa: N802 - named by the protocol
        self, request: data_network_pb2.DescribeNetworkRequest, context: Context
    ) -> data_network_pb2.DescribeNetworkResponse:
        return data_network_pb2.DescribeNetworkResponse(
            network=str(self._network.network), public_key=self._keys.public_key
        )

    async def JoinNetwork(  # noqa: N802
        self, request: data_network_pb2.JoinNetworkRequest, context: Context
    ) -> data_network_pb2.JoinNetworkResponse:
        network = self._network
        self._keys.check_proof(request.public_key, request.proof)
        member = network.join(
            _identity_of(context),
            request.public_key,
            request.endpoint,
            had=request.address,
            ticket=request.ticket,
            now=self._clock(),
        )
        return data_network_pb2.JoinNetworkResponse(
            address=str(member.address),
            ticket=network.ticket_of(member),
            lease_seconds=network.lease_seconds,
        )

    async def RenewMember(  # noqa: N802
        self, request: data_network_pb2.RenewMemberRequest, context: Context
    ) -> data_network_pb2.RenewMemberResponse:
        network, owner = self._network, _identity_of(context)
        network.renew(owner, request.public_key, now=self._clock())
        await self._revisions.later_than(
            request.revision, seconds=network.lease_seconds / _RENEWALS_PER_LEASE
        )
        # It may have left meanwhile.
        network.get(owner, request.public_key)
        if request.revision == self._revisions.current:
            return data_network_pb2.RenewMemberResponse(
                revision=self._revisions.current, complete=network.complete
            )
        return self._answer_to(owner)

    async def LeaveNetwork(  # noqa: N802
        self, request: data_network_pb2.LeaveNetworkRequest, context: Context
    ) -> data_network_pb2.LeaveNetworkResponse:
        self._network.leave(_identity_of(context), request.public_key)
        return data_network_pb2.LeaveNetworkResponse()

    @property
    def _network(self) -> DataNetwork:
        if self._members is None:
            raise NoDataNetworkError(
                "this control plane hands out no addresses of a data network; start it with "
                "--data-network, for example 10.99.0.0/16"
            )
        return self._members

    def _answer_to(self, owner: Identity) -> data_network_pb2.RenewMemberResponse:
        """What members of ``owner`` see; made once for all of them, as there may be thousands."""
        view = None if owner.role is Role.SERVER else owner
        answer = self._answers.get(view)
        if answer is None:
            answer = self._answers[view] = data_network_pb2.RenewMemberResponse(
                revision=self._revisions.current,
                complete=self._network.complete,
                peers=[
                    data_network_pb2.NetworkPeer(
                        public_key=member.public_key,
                        endpoint=member.endpoint,
                        address=str(member.address),
                    )
                    for member in self._network.seen_by(owner)
                ],
            )
        return answer

    def _changed(self) -> None:
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(_SETTLE_SECONDS, self._tell)

    def _tell(self) -> None:
        self._telling = False
        self._answers.clear()
        self._revisions.advance()


def _identity_of(context: Context) -> Identity:
    identity = caller_of(context).identity
    if identity is None:
        raise NoIdentityError("only members with a certificate join a data network")
    return identity
