from distca.v1 import profile_pb2 as _profile_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_VERDICT_UNSPECIFIED: _ClassVar[PlanVerdict]
    PLAN_VERDICT_KEPT: _ClassVar[PlanVerdict]
    PLAN_VERDICT_INDIVISIBLE: _ClassVar[PlanVerdict]
    PLAN_VERDICT_LIMITED: _ClassVar[PlanVerdict]
    PLAN_VERDICT_MISSED: _ClassVar[PlanVerdict]
PLAN_VERDICT_UNSPECIFIED: PlanVerdict
PLAN_VERDICT_KEPT: PlanVerdict
PLAN_VERDICT_INDIVISIBLE: PlanVerdict
PLAN_VERDICT_LIMITED: PlanVerdict
PLAN_VERDICT_MISSED: PlanVerdict

class RankManifest(_message.Message):
    __slots__ = ("step", "rank", "n_nano_batches", "nano_batch", "document_id", "document_length", "offset", "length", "document_parent", "document_offset")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    N_NANO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    NANO_BATCH_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_PARENT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    step: int
    rank: int
    n_nano_batches: int
    nano_batch: bytes
    document_id: bytes
    document_length: bytes
    offset: bytes
    length: bytes
    document_parent: bytes
    document_offset: bytes
    def __init__(self, step: _Optional[int] = ..., rank: _Optional[int] = ..., n_nano_batches: _Optional[int] = ..., nano_batch: _Optional[bytes] = ..., document_id: _Optional[bytes] = ..., document_length: _Optional[bytes] = ..., offset: _Optional[bytes] = ..., length: _Optional[bytes] = ..., document_parent: _Optional[bytes] = ..., document_offset: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("step", "n_ranks", "n_nano_batches", "whole", "document_id", "document_length", "document_nano_batch", "segment_document", "segment_offset", "segment_length", "segment_rank", "segment_row", "carried_document", "carried_offset", "carried_length", "carried_rank", "carried_row", "carried_origin")
    STEP_FIELD_NUMBER: _ClassVar[int]
    N_RANKS_FIELD_NUMBER: _ClassVar[int]
    N_NANO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_ID_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_NANO_BATCH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_RANK_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ROW_FIELD_NUMBER: _ClassVar[int]
    CARRIED_DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    CARRIED_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CARRIED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CARRIED_RANK_FIELD_NUMBER: _ClassVar[int]
    CARRIED_ROW_FIELD_NUMBER: _ClassVar[int]
    CARRIED_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    step: int
    n_ranks: int
    n_nano_batches: int
    whole: bool
    document_id: bytes
    document_length: bytes
    document_nano_batch: bytes
    segment_document: bytes
    segment_offset: bytes
    segment_length: bytes
    segment_rank: bytes
    segment_row: bytes
    carried_document: bytes
    carried_offset: bytes
    carried_length: bytes
    carried_rank: bytes
    carried_row: bytes
    carried_origin: bytes
    def __init__(self, step: _Optional[int] = ..., n_ranks: _Optional[int] = ..., n_nano_batches: _Optional[int] = ..., whole: bool = ..., document_id: _Optional[bytes] = ..., document_length: _Optional[bytes] = ..., document_nano_batch: _Optional[bytes] = ..., segment_document: _Optional[bytes] = ..., segment_offset: _Optional[bytes] = ..., segment_length: _Optional[bytes] = ..., segment_rank: _Optional[bytes] = ..., segment_row: _Optional[bytes] = ..., carried_document: _Optional[bytes] = ..., carried_offset: _Optional[bytes] = ..., carried_length: _Optional[bytes] = ..., carried_rank: _Optional[bytes] = ..., carried_row: _Optional[bytes] = ..., carried_origin: _Optional[bytes] = ...) -> None: ...

class TaskTable(_message.Message):
    __slots__ = ("document", "q_begin", "q_end", "server")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    Q_BEGIN_FIELD_NUMBER: _ClassVar[int]
    Q_END_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    q_begin: bytes
    q_end: bytes
    server: bytes
    def __init__(self, document: _Optional[bytes] = ..., q_begin: _Optional[bytes] = ..., q_end: _Optional[bytes] = ..., server: _Optional[bytes] = ...) -> None: ...

class PlanServer(_message.Message):
    __slots__ = ("server_id", "in_place_rank", "data_address")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    in_place_rank: int
    data_address: str
    def __init__(self, server_id: _Optional[str] = ..., in_place_rank: _Optional[int] = ..., data_address: _Optional[str] = ...) -> None: ...

class PhaseForecast(_message.Message):
    __slots__ = ("home_seconds", "seconds", "q_rows", "kv_rows", "bytes_in", "bytes_out")
    HOME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    Q_ROWS_FIELD_NUMBER: _ClassVar[int]
    KV_ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    home_seconds: bytes
    seconds: bytes
    q_rows: bytes
    kv_rows: bytes
    bytes_in: bytes
    bytes_out: bytes
    def __init__(self, home_seconds: _Optional[bytes] = ..., seconds: _Optional[bytes] = ..., q_rows: _Optional[bytes] = ..., kv_rows: _Optional[bytes] = ..., bytes_in: _Optional[bytes] = ..., bytes_out: _Optional[bytes] = ...) -> None: ...

class SlotForecast(_message.Message):
    __slots__ = ("n_halves", "home_seconds", "base_seconds", "seconds")
    N_HALVES_FIELD_NUMBER: _ClassVar[int]
    HOME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    n_halves: int
    home_seconds: bytes
    base_seconds: bytes
    seconds: bytes
    def __init__(self, n_halves: _Optional[int] = ..., home_seconds: _Optional[bytes] = ..., base_seconds: _Optional[bytes] = ..., seconds: _Optional[bytes] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("job_id", "epoch", "manifest", "servers", "forward", "backward", "mask", "planner", "reason", "forward_forecast", "backward_forecast", "verdict", "slots")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FORECAST_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FORECAST_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    manifest: Manifest
    servers: _containers.RepeatedCompositeFieldContainer[PlanServer]
    forward: TaskTable
    backward: TaskTable
    mask: _profile_pb2.MaskKind
    planner: str
    reason: str
    forward_forecast: PhaseForecast
    backward_forecast: PhaseForecast
    verdict: PlanVerdict
    slots: SlotForecast
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., servers: _Optional[_Iterable[_Union[PlanServer, _Mapping]]] = ..., forward: _Optional[_Union[TaskTable, _Mapping]] = ..., backward: _Optional[_Union[TaskTable, _Mapping]] = ..., mask: _Optional[_Union[_profile_pb2.MaskKind, str]] = ..., planner: _Optional[str] = ..., reason: _Optional[str] = ..., forward_forecast: _Optional[_Union[PhaseForecast, _Mapping]] = ..., backward_forecast: _Optional[_Union[PhaseForecast, _Mapping]] = ..., verdict: _Optional[_Union[PlanVerdict, str]] = ..., slots: _Optional[_Union[SlotForecast, _Mapping]] = ...) -> None: ...
