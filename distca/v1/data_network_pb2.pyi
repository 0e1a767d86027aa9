from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeNetworkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeNetworkResponse(_message.Message):
    __slots__ = ("network", "public_key")
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    network: str
    public_key: bytes
    def __init__(self, network: _Optional[str] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class JoinNetworkRequest(_message.Message):
    __slots__ = ("public_key", "proof", "endpoint", "address", "ticket")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    proof: bytes
    endpoint: str
    address: str
    ticket: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., endpoint: _Optional[str] = ..., address: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class JoinNetworkResponse(_message.Message):
    __slots__ = ("address", "ticket", "lease_seconds")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    address: str
    ticket: bytes
    lease_seconds: float
    def __init__(self, address: _Optional[str] = ..., ticket: _Optional[bytes] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class RenewMemberRequest(_message.Message):
    __slots__ = ("public_key", "revision")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    revision: str
    def __init__(self, public_key: _Optional[bytes] = ..., revision: _Optional[str] = ...) -> None: ...

class RenewMemberResponse(_message.Message):
    __slots__ = ("revision", "complete", "peers")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    revision: str
    complete: bool
    peers: _containers.RepeatedCompositeFieldContainer[NetworkPeer]
    def __init__(self, revision: _Optional[str] = ..., complete: bool = ..., peers: _Optional[_Iterable[_Union[NetworkPeer, _Mapping]]] = ...) -> None: ...

class NetworkPeer(_message.Message):
    __slots__ = ("public_key", "endpoint", "address")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    endpoint: str
    address: str
    def __init__(self, public_key: _Optional[bytes] = ..., endpoint: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class LeaveNetworkRequest(_message.Message):
    __slots__ = ("public_key",)
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    def __init__(self, public_key: _Optional[bytes] = ...) -> None: ...

class LeaveNetworkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
