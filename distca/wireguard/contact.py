"""What a member says to the control plane about the data network."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from distca.contract import rpc
from distca.contract.contact import RENEWAL_SECONDS, Contact
from distca.v1 import data_network_pb2, data_network_pb2_grpc
from distca.wireguard.state import MemberState


class NetworkContact(Contact):
    """A control plane that hands out keys.

    Args:
        settings: how to reach it.

    Raises:
        distca.contract.rpc.ControlPlaneUnavailable: nobody answers.
    """

    def __init__(self, settings: rpc.RpcSettings) -> None:
        super().__init__(settings)
        self._network = data_network_pb2_grpc.DataNetworkStub(self._channel)

    def join(self, state: MemberState, endpoint: str) -> tuple[MemberState, IPv4Network]:
        """Joins or comes back; returns the member with its address, and the network.

        Raises:
            distca.contract.rpc.RpcError: the control plane refuses, or has gone.
            ValueError: its answer makes no sense.
        """
        about = self.call(self._network.DescribeNetwork, data_network_pb2.DescribeNetworkRequest())
        network = IPv4Network(about.network)
        joined = self.call(
            self._network.JoinNetwork,
            data_network_pb2.JoinNetworkRequest(
                public_key=state.public_key,
                proof=state.proof(about.public_key),
                endpoint=endpoint,
                address=state.address,
                ticket=state.ticket,
            ),
        )
        self.lease_seconds = joined.lease_seconds
        if IPv4Address(joined.address) not in network:
            raise ValueError(f"the control plane gave {joined.address}, which is not in {network}")
        return state.at(joined.address, joined.ticket), network

    def renew(self, public_key: bytes, revision: str) -> data_network_pb2.RenewMemberResponse:
        """Renews the lease; waits for other members than those of ``revision``, for a fifth of the
        lease.

        Raises:
            distca.contract.rpc.RpcError: the lease has expired, or the control plane has gone.
        """
        answer: data_network_pb2.RenewMemberResponse = self.call(
            self._network.RenewMember,
            data_network_pb2.RenewMemberRequest(public_key=public_key, revision=revision),
            timeout_seconds=self.renewal_seconds + RENEWAL_SECONDS,
        )
        return answer

    def leave(self, public_key: bytes) -> None:
        """Ends the lease.

        Raises:
            distca.contract.rpc.RpcError: there is none, or the control plane has gone.
        """
        self.call(
            self._network.LeaveNetwork,
            data_network_pb2.LeaveNetworkRequest(public_key=public_key),
            timeout_seconds=RENEWAL_SECONDS,
        )
