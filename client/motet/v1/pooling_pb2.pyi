from motet.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_FIRST: _ClassVar[Pooling]

class ProblemType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROBLEM_TYPE_UNSPECIFIED: _ClassVar[ProblemType]
    PROBLEM_TYPE_SINGLE_LABEL: _ClassVar[ProblemType]
    PROBLEM_TYPE_MULTI_LABEL: _ClassVar[ProblemType]
    PROBLEM_TYPE_REGRESSION: _ClassVar[ProblemType]
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
POOLING_FIRST: Pooling
PROBLEM_TYPE_UNSPECIFIED: ProblemType
PROBLEM_TYPE_SINGLE_LABEL: ProblemType
PROBLEM_TYPE_MULTI_LABEL: ProblemType
PROBLEM_TYPE_REGRESSION: ProblemType

class PoolingInput(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _types_pb2.TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "adapter", "adapter_digest", "inputs", "cache_salt", "priority", "model_fingerprint", "pooling", "normalize", "dimensions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter: str
    adapter_digest: str
    inputs: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    cache_salt: str
    priority: int
    model_fingerprint: str
    pooling: Pooling
    normalize: bool
    dimensions: int
    def __init__(self, request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., normalize: bool = ..., dimensions: _Optional[int] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values", "prompt_tokens", "cached_tokens")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, values: _Optional[_Iterable[float]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "adapter", "adapter_digest", "model_fingerprint", "tenant", "embeddings", "pooling", "normalized")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter: str
    adapter_digest: str
    model_fingerprint: str
    tenant: str
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    pooling: Pooling
    normalized: bool
    def __init__(self, request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tenant: _Optional[str] = ..., embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., normalized: bool = ...) -> None: ...

class ClassifyRequest(_message.Message):
    __slots__ = ("request_id", "adapter", "adapter_digest", "inputs", "cache_salt", "priority", "model_fingerprint", "problem_type")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_TYPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter: str
    adapter_digest: str
    inputs: _containers.RepeatedCompositeFieldContainer[PoolingInput]
    cache_salt: str
    priority: int
    model_fingerprint: str
    problem_type: ProblemType
    def __init__(self, request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[PoolingInput, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., problem_type: _Optional[_Union[ProblemType, str]] = ...) -> None: ...

class Classification(_message.Message):
    __slots__ = ("logits", "probabilities", "prompt_tokens", "cached_tokens")
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    logits: _containers.RepeatedScalarFieldContainer[float]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, logits: _Optional[_Iterable[float]] = ..., probabilities: _Optional[_Iterable[float]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ClassifyResponse(_message.Message):
    __slots__ = ("request_id", "adapter", "adapter_digest", "model_fingerprint", "tenant", "labels", "problem_type", "classifications")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_TYPE_FIELD_NUMBER: _ClassVar[int]
    CLASSIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter: str
    adapter_digest: str
    model_fingerprint: str
    tenant: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    problem_type: ProblemType
    classifications: _containers.RepeatedCompositeFieldContainer[Classification]
    def __init__(self, request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tenant: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., problem_type: _Optional[_Union[ProblemType, str]] = ..., classifications: _Optional[_Iterable[_Union[Classification, _Mapping]]] = ...) -> None: ...
