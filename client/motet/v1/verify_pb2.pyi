from google.longrunning import operations_pb2 as _operations_pb2
from motet.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyVersionRequest(_message.Message):
    __slots__ = ("name", "digest", "prompts", "activate")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    prompts: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenIds]
    activate: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[_types_pb2.TokenIds, _Mapping]]] = ..., activate: bool = ...) -> None: ...
