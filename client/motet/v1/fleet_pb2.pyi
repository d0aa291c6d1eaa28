from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., force: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("num_moved",)
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    num_moved: int
    def __init__(self, num_moved: _Optional[int] = ...) -> None: ...

class UndrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
