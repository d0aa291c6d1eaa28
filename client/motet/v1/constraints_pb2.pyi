from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choices", "lark", "structural_tags")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAGS_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choices: Choices
    lark: str
    structural_tags: StructuralTags
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ..., lark: _Optional[str] = ..., structural_tags: _Optional[_Union[StructuralTags, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StructuralTags(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedCompositeFieldContainer[StructuralTag]
    def __init__(self, tags: _Optional[_Iterable[_Union[StructuralTag, _Mapping]]] = ...) -> None: ...

class StructuralTag(_message.Message):
    __slots__ = ("trigger", "begin", "end", "json_schema", "lark")
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    trigger: str
    begin: str
    end: str
    json_schema: str
    lark: str
    def __init__(self, trigger: _Optional[str] = ..., begin: _Optional[str] = ..., end: _Optional[str] = ..., json_schema: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...
