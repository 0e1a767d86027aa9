from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HELLO_REFUSAL_UNSPECIFIED: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_MALFORMED: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_VERSION: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_SERVER: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_UNKNOWN: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_ADDRESS: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_RANK: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_EPOCH_OVER: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_MEMORY: _ClassVar[HelloRefusal]
HELLO_REFUSAL_UNSPECIFIED: HelloRefusal
HELLO_REFUSAL_MALFORMED: HelloRefusal
HELLO_REFUSAL_VERSION: HelloRefusal
HELLO_REFUSAL_SERVER: HelloRefusal
HELLO_REFUSAL_UNKNOWN: HelloRefusal
HELLO_REFUSAL_ADDRESS: HelloRefusal
HELLO_REFUSAL_RANK: HelloRefusal
HELLO_REFUSAL_EPOCH_OVER: HelloRefusal
HELLO_REFUSAL_MEMORY: HelloRefusal

class Hello(_message.Message):
    __slots__ = ("version", "job_id", "rank", "server_id", "first_step", "epoch")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    job_id: str
    rank: int
    server_id: str
    first_step: int
    epoch: int
    def __init__(self, version: _Optional[int] = ..., job_id: _Optional[str] = ..., rank: _Optional[int] = ..., server_id: _Optional[str] = ..., first_step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("server_id", "device", "kernel")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    device: str
    kernel: str
    def __init__(self, server_id: _Optional[str] = ..., device: _Optional[str] = ..., kernel: _Optional[str] = ...) -> None: ...
