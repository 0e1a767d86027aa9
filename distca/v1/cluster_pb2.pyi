from distca.v1 import jobs_pb2 as _jobs_pb2
from distca.v1 import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeClusterResponse(_message.Message):
    __slots__ = ("version", "unix_seconds", "uptime_seconds", "servers", "jobs", "planner_state")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    PLANNER_STATE_FIELD_NUMBER: _ClassVar[int]
    version: str
    unix_seconds: float
    uptime_seconds: float
    servers: _containers.RepeatedCompositeFieldContainer[_membership_pb2.ServerStatus]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    planner_state: str
    def __init__(self, version: _Optional[str] = ..., unix_seconds: _Optional[float] = ..., uptime_seconds: _Optional[float] = ..., servers: _Optional[_Iterable[_Union[_membership_pb2.ServerStatus, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., planner_state: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "name", "placement", "tolerance", "n_ranks", "n_joined_ranks", "planned_step", "finished_step", "epoch", "recovering", "last_step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    N_RANKS_FIELD_NUMBER: _ClassVar[int]
    N_JOINED_RANKS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    placement: _jobs_pb2.Placement
    tolerance: float
    n_ranks: int
    n_joined_ranks: int
    planned_step: int
    finished_step: int
    epoch: int
    recovering: bool
    last_step: _jobs_pb2.StepStatus
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., placement: _Optional[_Union[_jobs_pb2.Placement, str]] = ..., tolerance: _Optional[float] = ..., n_ranks: _Optional[int] = ..., n_joined_ranks: _Optional[int] = ..., planned_step: _Optional[int] = ..., finished_step: _Optional[int] = ..., epoch: _Optional[int] = ..., recovering: bool = ..., last_step: _Optional[_Union[_jobs_pb2.StepStatus, _Mapping]] = ...) -> None: ...
