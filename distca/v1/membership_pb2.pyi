from distca.v1 import profile_pb2 as _profile_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerDescription(_message.Message):
    __slots__ = ("server_id", "data_address", "host", "device", "memory_bytes", "capacity_rows", "profiles", "version", "transport")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    data_address: str
    host: str
    device: str
    memory_bytes: int
    capacity_rows: int
    profiles: _containers.RepeatedCompositeFieldContainer[_profile_pb2.CostProfile]
    version: str
    transport: str
    def __init__(self, server_id: _Optional[str] = ..., data_address: _Optional[str] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., capacity_rows: _Optional[int] = ..., profiles: _Optional[_Iterable[_Union[_profile_pb2.CostProfile, _Mapping]]] = ..., version: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class RegisterServerRequest(_message.Message):
    __slots__ = ("server", "replace")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    server: ServerDescription
    replace: bool
    def __init__(self, server: _Optional[_Union[ServerDescription, _Mapping]] = ..., replace: bool = ...) -> None: ...

class RegisterServerResponse(_message.Message):
    __slots__ = ("lease_id", "lease_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class ServerLoad(_message.Message):
    __slots__ = ("queued_tasks", "open_ticks", "busy_ratio", "buffer_bytes", "oldest_ready_seconds", "moved_bytes_per_second", "stands_in")
    QUEUED_TASKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_TICKS_FIELD_NUMBER: _ClassVar[int]
    BUSY_RATIO_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_READY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STANDS_IN_FIELD_NUMBER: _ClassVar[int]
    queued_tasks: int
    open_ticks: int
    busy_ratio: float
    buffer_bytes: int
    oldest_ready_seconds: float
    moved_bytes_per_second: float
    stands_in: str
    def __init__(self, queued_tasks: _Optional[int] = ..., open_ticks: _Optional[int] = ..., busy_ratio: _Optional[float] = ..., buffer_bytes: _Optional[int] = ..., oldest_ready_seconds: _Optional[float] = ..., moved_bytes_per_second: _Optional[float] = ..., stands_in: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("lease_id", "load")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    load: ServerLoad
    def __init__(self, lease_id: _Optional[str] = ..., load: _Optional[_Union[ServerLoad, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("lease_seconds", "draining")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    draining: bool
    def __init__(self, lease_seconds: _Optional[float] = ..., draining: bool = ...) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("server_id", "lease_id")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    lease_id: str
    def __init__(self, server_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class DrainServerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeregisterServerRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class DeregisterServerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRankLostRequest(_message.Message):
    __slots__ = ("lease_id", "job_id", "rank")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    job_id: str
    rank: int
    def __init__(self, lease_id: _Optional[str] = ..., job_id: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class ReportRankLostResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("server", "load", "draining", "seconds_since_heartbeat", "in_place_job_id", "in_place_rank")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_RANK_FIELD_NUMBER: _ClassVar[int]
    server: ServerDescription
    load: ServerLoad
    draining: bool
    seconds_since_heartbeat: float
    in_place_job_id: str
    in_place_rank: int
    def __init__(self, server: _Optional[_Union[ServerDescription, _Mapping]] = ..., load: _Optional[_Union[ServerLoad, _Mapping]] = ..., draining: bool = ..., seconds_since_heartbeat: _Optional[float] = ..., in_place_job_id: _Optional[str] = ..., in_place_rank: _Optional[int] = ...) -> None: ...
