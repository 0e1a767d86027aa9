from distca.v1 import membership_pb2 as _membership_pb2
from distca.v1 import plan_pb2 as _plan_pb2
from distca.v1 import profile_pb2 as _profile_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Placement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_UNSPECIFIED: _ClassVar[Placement]
    PLACEMENT_POOL: _ClassVar[Placement]
    PLACEMENT_IN_PLACE: _ClassVar[Placement]
    PLACEMENT_MIXED: _ClassVar[Placement]

class LossCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOSS_CAUSE_UNSPECIFIED: _ClassVar[LossCause]
    LOSS_CAUSE_TRANSPORT_ERROR: _ClassVar[LossCause]
    LOSS_CAUSE_UNREACHABLE: _ClassVar[LossCause]
    LOSS_CAUSE_DEADLINE: _ClassVar[LossCause]
    LOSS_CAUSE_CORRUPT_RESULT: _ClassVar[LossCause]
    LOSS_CAUSE_OWN_SERVER: _ClassVar[LossCause]
PLACEMENT_UNSPECIFIED: Placement
PLACEMENT_POOL: Placement
PLACEMENT_IN_PLACE: Placement
PLACEMENT_MIXED: Placement
LOSS_CAUSE_UNSPECIFIED: LossCause
LOSS_CAUSE_TRANSPORT_ERROR: LossCause
LOSS_CAUSE_UNREACHABLE: LossCause
LOSS_CAUSE_DEADLINE: LossCause
LOSS_CAUSE_CORRUPT_RESULT: LossCause
LOSS_CAUSE_OWN_SERVER: LossCause

class JobSpec(_message.Message):
    __slots__ = ("name", "n_ranks", "n_layers", "n_nano_batches", "shape", "placement", "tolerance", "planner", "min_forward_tokens", "min_backward_tokens", "softmax_scale", "checksums", "transport", "pipelining", "head_groups", "windows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    N_RANKS_FIELD_NUMBER: _ClassVar[int]
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    N_NANO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    MIN_FORWARD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_BACKWARD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOFTMAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PIPELINING_FIELD_NUMBER: _ClassVar[int]
    HEAD_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    n_ranks: int
    n_layers: int
    n_nano_batches: int
    shape: _profile_pb2.AttentionShape
    placement: Placement
    tolerance: float
    planner: str
    min_forward_tokens: int
    min_backward_tokens: int
    softmax_scale: float
    checksums: bool
    transport: str
    pipelining: Pipelining
    head_groups: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., n_ranks: _Optional[int] = ..., n_layers: _Optional[int] = ..., n_nano_batches: _Optional[int] = ..., shape: _Optional[_Union[_profile_pb2.AttentionShape, _Mapping]] = ..., placement: _Optional[_Union[Placement, str]] = ..., tolerance: _Optional[float] = ..., planner: _Optional[str] = ..., min_forward_tokens: _Optional[int] = ..., min_backward_tokens: _Optional[int] = ..., softmax_scale: _Optional[float] = ..., checksums: bool = ..., transport: _Optional[str] = ..., pipelining: _Optional[_Union[Pipelining, _Mapping]] = ..., head_groups: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ...) -> None: ...

class Pipelining(_message.Message):
    __slots__ = ("schedule_name", "schedule_csv", "pipeline_ranks", "layers", "forward_seconds", "backward_seconds")
    SCHEDULE_NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_CSV_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_RANKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    schedule_name: str
    schedule_csv: str
    pipeline_ranks: _containers.RepeatedScalarFieldContainer[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    forward_seconds: _containers.RepeatedScalarFieldContainer[float]
    backward_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, schedule_name: _Optional[str] = ..., schedule_csv: _Optional[str] = ..., pipeline_ranks: _Optional[_Iterable[int]] = ..., layers: _Optional[_Iterable[int]] = ..., forward_seconds: _Optional[_Iterable[float]] = ..., backward_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class DescribePoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribePoolResponse(_message.Message):
    __slots__ = ("transports",)
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transports: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenJobRequest(_message.Message):
    __slots__ = ("spec", "rank", "in_place_server", "host", "resume", "replace", "tensor_parallel_ranks")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_SERVER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANKS_FIELD_NUMBER: _ClassVar[int]
    spec: JobSpec
    rank: int
    in_place_server: _membership_pb2.ServerDescription
    host: str
    resume: ResumeJob
    replace: bool
    tensor_parallel_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Union[JobSpec, _Mapping]] = ..., rank: _Optional[int] = ..., in_place_server: _Optional[_Union[_membership_pb2.ServerDescription, _Mapping]] = ..., host: _Optional[str] = ..., resume: _Optional[_Union[ResumeJob, _Mapping]] = ..., replace: bool = ..., tensor_parallel_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class ResumeJob(_message.Message):
    __slots__ = ("job_id", "epoch")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class OpenJobResponse(_message.Message):
    __slots__ = ("job_id", "rank_lease_id", "lease_seconds", "token", "stall_seconds", "answer_seconds")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    rank_lease_id: str
    lease_seconds: float
    token: bytes
    stall_seconds: float
    answer_seconds: float
    def __init__(self, job_id: _Optional[str] = ..., rank_lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., token: _Optional[bytes] = ..., stall_seconds: _Optional[float] = ..., answer_seconds: _Optional[float] = ...) -> None: ...

class RenewRankRequest(_message.Message):
    __slots__ = ("job_id", "rank_lease_id", "next_step", "in_place_load", "sent_ticks")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_LOAD_FIELD_NUMBER: _ClassVar[int]
    SENT_TICKS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    rank_lease_id: str
    next_step: int
    in_place_load: _membership_pb2.ServerLoad
    sent_ticks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[str] = ..., rank_lease_id: _Optional[str] = ..., next_step: _Optional[int] = ..., in_place_load: _Optional[_Union[_membership_pb2.ServerLoad, _Mapping]] = ..., sent_ticks: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewRankResponse(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class CloseJobRequest(_message.Message):
    __slots__ = ("job_id", "rank_lease_id", "error")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    rank_lease_id: str
    error: str
    def __init__(self, job_id: _Optional[str] = ..., rank_lease_id: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class CloseJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRankRequest(_message.Message):
    __slots__ = ("job_id", "rank_lease_id", "hand_in", "progress")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HAND_IN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    rank_lease_id: str
    hand_in: HandIn
    progress: Progress
    def __init__(self, job_id: _Optional[str] = ..., rank_lease_id: _Optional[str] = ..., hand_in: _Optional[_Union[HandIn, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class HandIn(_message.Message):
    __slots__ = ("manifest", "forward_only", "joining")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    manifest: _plan_pb2.RankManifest
    forward_only: bool
    joining: Joining
    def __init__(self, manifest: _Optional[_Union[_plan_pb2.RankManifest, _Mapping]] = ..., forward_only: bool = ..., joining: _Optional[_Union[Joining, _Mapping]] = ...) -> None: ...

class Joining(_message.Message):
    __slots__ = ("sequence", "awaited", "round", "closes_round", "first_step", "open_places", "numbered", "turns")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLOSES_ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    OPEN_PLACES_FIELD_NUMBER: _ClassVar[int]
    NUMBERED_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    awaited: bool
    round: int
    closes_round: bool
    first_step: int
    open_places: _containers.RepeatedScalarFieldContainer[int]
    numbered: bool
    turns: int
    def __init__(self, sequence: _Optional[int] = ..., awaited: bool = ..., round: _Optional[int] = ..., closes_round: bool = ..., first_step: _Optional[int] = ..., open_places: _Optional[_Iterable[int]] = ..., numbered: bool = ..., turns: _Optional[int] = ...) -> None: ...

class WatchServerRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class PlanEvent(_message.Message):
    __slots__ = ("job_opened", "step_planned", "step_failed", "job_closed", "recover", "step_finished", "hand_in_refused")
    JOB_OPENED_FIELD_NUMBER: _ClassVar[int]
    STEP_PLANNED_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILED_FIELD_NUMBER: _ClassVar[int]
    JOB_CLOSED_FIELD_NUMBER: _ClassVar[int]
    RECOVER_FIELD_NUMBER: _ClassVar[int]
    STEP_FINISHED_FIELD_NUMBER: _ClassVar[int]
    HAND_IN_REFUSED_FIELD_NUMBER: _ClassVar[int]
    job_opened: JobOpened
    step_planned: StepPlanned
    step_failed: StepFailed
    job_closed: JobClosed
    recover: Recover
    step_finished: StepFinished
    hand_in_refused: HandInRefused
    def __init__(self, job_opened: _Optional[_Union[JobOpened, _Mapping]] = ..., step_planned: _Optional[_Union[StepPlanned, _Mapping]] = ..., step_failed: _Optional[_Union[StepFailed, _Mapping]] = ..., job_closed: _Optional[_Union[JobClosed, _Mapping]] = ..., recover: _Optional[_Union[Recover, _Mapping]] = ..., step_finished: _Optional[_Union[StepFinished, _Mapping]] = ..., hand_in_refused: _Optional[_Union[HandInRefused, _Mapping]] = ...) -> None: ...

class JobOpened(_message.Message):
    __slots__ = ("job_id", "spec", "verification_key", "owner")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_KEY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    spec: JobSpec
    verification_key: bytes
    owner: str
    def __init__(self, job_id: _Optional[str] = ..., spec: _Optional[_Union[JobSpec, _Mapping]] = ..., verification_key: _Optional[bytes] = ..., owner: _Optional[str] = ...) -> None: ...

class StepPlanned(_message.Message):
    __slots__ = ("plan", "forward_only", "first_tick", "sequence")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TICK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    forward_only: bool
    first_tick: bytes
    sequence: int
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., forward_only: bool = ..., first_tick: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class Recover(_message.Message):
    __slots__ = ("job_id", "epoch", "lost_server_ids", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOST_SERVER_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    lost_server_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lost_server_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class StepFinished(_message.Message):
    __slots__ = ("job_id", "step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    step: int
    def __init__(self, job_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("job_id", "step", "error", "sequence")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    step: int
    error: str
    sequence: int
    def __init__(self, job_id: _Optional[str] = ..., step: _Optional[int] = ..., error: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class HandInRefused(_message.Message):
    __slots__ = ("step", "sequence", "kind", "error")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step: int
    sequence: int
    kind: str
    error: str
    def __init__(self, step: _Optional[int] = ..., sequence: _Optional[int] = ..., kind: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class JobClosed(_message.Message):
    __slots__ = ("job_id", "error")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    error: str
    def __init__(self, job_id: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ReportStepRequest(_message.Message):
    __slots__ = ("job_id", "step", "lease_id", "server", "rank", "given_up", "waiting")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    step: int
    lease_id: str
    server: ServerMeasurement
    rank: RankMeasurement
    given_up: StepGivenUp
    waiting: StepWaiting
    def __init__(self, job_id: _Optional[str] = ..., step: _Optional[int] = ..., lease_id: _Optional[str] = ..., server: _Optional[_Union[ServerMeasurement, _Mapping]] = ..., rank: _Optional[_Union[RankMeasurement, _Mapping]] = ..., given_up: _Optional[_Union[StepGivenUp, _Mapping]] = ..., waiting: _Optional[_Union[StepWaiting, _Mapping]] = ...) -> None: ...

class ReportStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportServerLostRequest(_message.Message):
    __slots__ = ("job_id", "rank_lease_id", "server_id", "epoch", "detail", "cause")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    rank_lease_id: str
    server_id: str
    epoch: int
    detail: str
    cause: LossCause
    def __init__(self, job_id: _Optional[str] = ..., rank_lease_id: _Optional[str] = ..., server_id: _Optional[str] = ..., epoch: _Optional[int] = ..., detail: _Optional[str] = ..., cause: _Optional[_Union[LossCause, str]] = ...) -> None: ...

class ReportServerLostResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("epoch", "steps")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    steps: _containers.RepeatedCompositeFieldContainer[StepProgress]
    def __init__(self, epoch: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepProgress, _Mapping]]] = ...) -> None: ...

class StepProgress(_message.Message):
    __slots__ = ("step", "complete_ticks", "done")
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_TICKS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    step: int
    complete_ticks: _containers.RepeatedScalarFieldContainer[int]
    done: bool
    def __init__(self, step: _Optional[int] = ..., complete_ticks: _Optional[_Iterable[int]] = ..., done: bool = ...) -> None: ...

class DescribeJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DescribeJobResponse(_message.Message):
    __slots__ = ("spec", "joined_ranks", "pending_steps", "planned_step", "away_ranks", "last_step")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    JOINED_RANKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_STEPS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_STEP_FIELD_NUMBER: _ClassVar[int]
    AWAY_RANKS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    spec: JobSpec
    joined_ranks: _containers.RepeatedScalarFieldContainer[int]
    pending_steps: _containers.RepeatedCompositeFieldContainer[PendingStep]
    planned_step: int
    away_ranks: _containers.RepeatedScalarFieldContainer[int]
    last_step: StepStatus
    def __init__(self, spec: _Optional[_Union[JobSpec, _Mapping]] = ..., joined_ranks: _Optional[_Iterable[int]] = ..., pending_steps: _Optional[_Iterable[_Union[PendingStep, _Mapping]]] = ..., planned_step: _Optional[int] = ..., away_ranks: _Optional[_Iterable[int]] = ..., last_step: _Optional[_Union[StepStatus, _Mapping]] = ...) -> None: ...

class StepStatus(_message.Message):
    __slots__ = ("step", "step_seconds", "wait_seconds", "tokens", "moved_bytes", "phases")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    step: int
    step_seconds: float
    wait_seconds: float
    tokens: int
    moved_bytes: int
    phases: _containers.RepeatedCompositeFieldContainer[PhaseStatus]
    def __init__(self, step: _Optional[int] = ..., step_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., tokens: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., phases: _Optional[_Iterable[_Union[PhaseStatus, _Mapping]]] = ...) -> None: ...

class PhaseStatus(_message.Message):
    __slots__ = ("phase", "home_imbalance", "predicted_imbalance", "measured_imbalance", "busy_seconds")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    HOME_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    home_imbalance: float
    predicted_imbalance: float
    measured_imbalance: float
    busy_seconds: float
    def __init__(self, phase: _Optional[str] = ..., home_imbalance: _Optional[float] = ..., predicted_imbalance: _Optional[float] = ..., measured_imbalance: _Optional[float] = ..., busy_seconds: _Optional[float] = ...) -> None: ...

class PendingStep(_message.Message):
    __slots__ = ("step", "missing_ranks")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    step: int
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., missing_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStepRequest(_message.Message):
    __slots__ = ("job_id", "step")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    step: int
    def __init__(self, job_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class GetStepResponse(_message.Message):
    __slots__ = ("plan", "plan_seconds", "servers", "ranks")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    plan_seconds: float
    servers: _containers.RepeatedCompositeFieldContainer[ServerMeasurement]
    ranks: _containers.RepeatedCompositeFieldContainer[RankMeasurement]
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., plan_seconds: _Optional[float] = ..., servers: _Optional[_Iterable[_Union[ServerMeasurement, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankMeasurement, _Mapping]]] = ...) -> None: ...

class ServerMeasurement(_message.Message):
    __slots__ = ("server_id", "forward_busy_seconds", "backward_busy_seconds", "backward_layers")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_LAYERS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    forward_busy_seconds: _containers.RepeatedScalarFieldContainer[float]
    backward_busy_seconds: _containers.RepeatedScalarFieldContainer[float]
    backward_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, server_id: _Optional[str] = ..., forward_busy_seconds: _Optional[_Iterable[float]] = ..., backward_busy_seconds: _Optional[_Iterable[float]] = ..., backward_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class StepWaiting(_message.Message):
    __slots__ = ("nano_batch", "tick", "sent_ticks", "needed_ranks")
    NANO_BATCH_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    SENT_TICKS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_RANKS_FIELD_NUMBER: _ClassVar[int]
    nano_batch: int
    tick: int
    sent_ticks: _containers.RepeatedScalarFieldContainer[int]
    needed_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nano_batch: _Optional[int] = ..., tick: _Optional[int] = ..., sent_ticks: _Optional[_Iterable[int]] = ..., needed_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class StepGivenUp(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RankMeasurement(_message.Message):
    __slots__ = ("rank", "step_seconds", "wait_seconds", "tokens")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step_seconds: float
    wait_seconds: float
    tokens: int
    def __init__(self, rank: _Optional[int] = ..., step_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...
