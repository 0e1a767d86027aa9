from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MASK_KIND_UNSPECIFIED: _ClassVar[MaskKind]
    MASK_KIND_CAUSAL: _ClassVar[MaskKind]
    MASK_KIND_FULL: _ClassVar[MaskKind]
MASK_KIND_UNSPECIFIED: MaskKind
MASK_KIND_CAUSAL: MaskKind
MASK_KIND_FULL: MaskKind

class AttentionShape(_message.Message):
    __slots__ = ("num_heads", "num_heads_kv", "head_dim", "head_dim_v", "dtype", "softcap", "mask")
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_KV_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_V_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    softcap: float
    mask: MaskKind
    def __init__(self, num_heads: _Optional[int] = ..., num_heads_kv: _Optional[int] = ..., head_dim: _Optional[int] = ..., head_dim_v: _Optional[int] = ..., dtype: _Optional[str] = ..., softcap: _Optional[float] = ..., mask: _Optional[_Union[MaskKind, str]] = ...) -> None: ...

class CostProfile(_message.Message):
    __slots__ = ("device", "kernel", "shape", "q_tokens", "kv_tokens", "forward_seconds", "backward_seconds")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    Q_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    device: str
    kernel: str
    shape: AttentionShape
    q_tokens: _containers.RepeatedScalarFieldContainer[int]
    kv_tokens: _containers.RepeatedScalarFieldContainer[int]
    forward_seconds: _containers.RepeatedScalarFieldContainer[float]
    backward_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, device: _Optional[str] = ..., kernel: _Optional[str] = ..., shape: _Optional[_Union[AttentionShape, _Mapping]] = ..., q_tokens: _Optional[_Iterable[int]] = ..., kv_tokens: _Optional[_Iterable[int]] = ..., forward_seconds: _Optional[_Iterable[float]] = ..., backward_seconds: _Optional[_Iterable[float]] = ...) -> None: ...
