import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from motet.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelRequest(_message.Message):
    __slots__ = ("adapter", "adapter_digest")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    adapter_digest: str
    def __init__(self, adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "fingerprint", "dtype", "adapter", "adapter_digest", "vocab_size", "max_model_len", "eos_token_ids", "special_tokens", "has_tokenizer", "has_chat_template", "sampling", "max_tokens", "recommended_sampling", "labels", "response_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMMENDED_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    dtype: str
    adapter: str
    adapter_digest: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    special_tokens: _containers.RepeatedCompositeFieldContainer[SpecialToken]
    has_tokenizer: bool
    has_chat_template: bool
    sampling: _types_pb2.SamplingParams
    max_tokens: int
    recommended_sampling: _types_pb2.SamplingParams
    labels: _containers.RepeatedScalarFieldContainer[str]
    response_template: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., special_tokens: _Optional[_Iterable[_Union[SpecialToken, _Mapping]]] = ..., has_tokenizer: bool = ..., has_chat_template: bool = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., recommended_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., labels: _Optional[_Iterable[str]] = ..., response_template: _Optional[str] = ...) -> None: ...

class SpecialToken(_message.Message):
    __slots__ = ("id", "token")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    id: int
    token: str
    def __init__(self, id: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("adapter", "adapter_digest", "text", "chat", "add_special_tokens", "return_tokens")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    adapter_digest: str
    text: str
    chat: _types_pb2.ChatMessages
    add_special_tokens: bool
    return_tokens: bool
    def __init__(self, adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_types_pb2.ChatMessages, _Mapping]] = ..., add_special_tokens: bool = ..., return_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens", "max_model_len", "adapter", "adapter_digest", "model_fingerprint", "render_time")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RENDER_TIME_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    max_model_len: int
    adapter: str
    adapter_digest: str
    model_fingerprint: str
    render_time: _timestamp_pb2.Timestamp
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[bytes]] = ..., max_model_len: _Optional[int] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., render_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("adapter", "adapter_digest", "token_ids", "skip_special_tokens")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    adapter_digest: str
    token_ids: _types_pb2.TokenIds
    skip_special_tokens: bool
    def __init__(self, adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "adapter", "adapter_digest", "model_fingerprint")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    text: str
    adapter: str
    adapter_digest: str
    model_fingerprint: str
    def __init__(self, text: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...
