import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from motet.v1 import adapters_pb2 as _adapters_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushHeader(_message.Message):
    __slots__ = ("adapter_id", "config", "weights_bytes", "visibility", "shared_with", "owner", "validate_only", "hold", "signature", "files_from", "without_files")
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    FILES_FROM_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FILES_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    config: bytes
    weights_bytes: int
    visibility: _adapters_pb2.AdapterVisibility
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    validate_only: bool
    hold: bool
    signature: bytes
    files_from: str
    without_files: bool
    def __init__(self, adapter_id: _Optional[str] = ..., config: _Optional[bytes] = ..., weights_bytes: _Optional[int] = ..., visibility: _Optional[_Union[_adapters_pb2.AdapterVisibility, str]] = ..., shared_with: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., validate_only: bool = ..., hold: bool = ..., signature: _Optional[bytes] = ..., files_from: _Optional[str] = ..., without_files: bool = ...) -> None: ...

class PushChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class PushVersionRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    chunk: PushChunk
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[_Union[PushChunk, _Mapping]] = ...) -> None: ...

class PushTimings(_message.Message):
    __slots__ = ("receive_time", "pack_time", "cache_time", "load_time", "visible_time", "durable_time")
    RECEIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    PACK_TIME_FIELD_NUMBER: _ClassVar[int]
    CACHE_TIME_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_TIME_FIELD_NUMBER: _ClassVar[int]
    DURABLE_TIME_FIELD_NUMBER: _ClassVar[int]
    receive_time: _duration_pb2.Duration
    pack_time: _duration_pb2.Duration
    cache_time: _duration_pb2.Duration
    load_time: _duration_pb2.Duration
    visible_time: _duration_pb2.Duration
    durable_time: _duration_pb2.Duration
    def __init__(self, receive_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pack_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cache_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., load_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., visible_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., durable_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PushVersionResponse(_message.Message):
    __slots__ = ("adapter", "timings", "num_workers", "files_from")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    FILES_FROM_FIELD_NUMBER: _ClassVar[int]
    adapter: _adapters_pb2.Adapter
    timings: PushTimings
    num_workers: int
    files_from: str
    def __init__(self, adapter: _Optional[_Union[_adapters_pb2.Adapter, _Mapping]] = ..., timings: _Optional[_Union[PushTimings, _Mapping]] = ..., num_workers: _Optional[int] = ..., files_from: _Optional[str] = ...) -> None: ...
