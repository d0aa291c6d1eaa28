import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from motet.v1 import adapters_pb2 as _adapters_pb2
from motet.v1 import constraints_pb2 as _constraints_pb2
from motet.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Combination(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMBINATION_UNSPECIFIED: _ClassVar[Combination]
    COMBINATION_CAT: _ClassVar[Combination]
    COMBINATION_LINEAR: _ClassVar[Combination]
COMBINATION_UNSPECIFIED: Combination
COMBINATION_CAT: Combination
COMBINATION_LINEAR: Combination

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "adapter", "adapter_digest", "text", "token_ids", "chat", "sampling", "stopping", "cache_salt", "resume_from", "decoding", "priority", "preconditions", "adapters", "combination", "lora_task_id", "routing_key", "output", "constraint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRECONDITIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    COMBINATION_FIELD_NUMBER: _ClassVar[int]
    LORA_TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTING_KEY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter: str
    adapter_digest: str
    text: str
    token_ids: _types_pb2.TokenIds
    chat: _types_pb2.ChatMessages
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    cache_salt: str
    resume_from: _types_pb2.TokenIds
    decoding: _types_pb2.DecodingParams
    priority: int
    preconditions: Preconditions
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterUse]
    combination: Combination
    lora_task_id: int
    routing_key: str
    output: _types_pb2.OutputParams
    constraint: _constraints_pb2.Constraint
    def __init__(self, request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_types_pb2.ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., resume_from: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., decoding: _Optional[_Union[_types_pb2.DecodingParams, _Mapping]] = ..., priority: _Optional[int] = ..., preconditions: _Optional[_Union[Preconditions, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[AdapterUse, _Mapping]]] = ..., combination: _Optional[_Union[Combination, str]] = ..., lora_task_id: _Optional[int] = ..., routing_key: _Optional[str] = ..., output: _Optional[_Union[_types_pb2.OutputParams, _Mapping]] = ..., constraint: _Optional[_Union[_constraints_pb2.Constraint, _Mapping]] = ...) -> None: ...

class AdapterUse(_message.Message):
    __slots__ = ("name", "digest", "scale")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    scale: float
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., scale: _Optional[float] = ...) -> None: ...

class Preconditions(_message.Message):
    __slots__ = ("model_fingerprint", "prompt_sha256")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    prompt_sha256: str
    def __init__(self, model_fingerprint: _Optional[str] = ..., prompt_sha256: _Optional[str] = ...) -> None: ...

class GenerateWithTaskHeader(_message.Message):
    __slots__ = ("request", "files")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    files: _containers.RepeatedCompositeFieldContainer[_adapters_pb2.UploadFile]
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., files: _Optional[_Iterable[_Union[_adapters_pb2.UploadFile, _Mapping]]] = ...) -> None: ...

class GenerateWithTaskRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GenerateWithTaskHeader
    chunk: _adapters_pb2.UploadChunk
    def __init__(self, header: _Optional[_Union[GenerateWithTaskHeader, _Mapping]] = ..., chunk: _Optional[_Union[_adapters_pb2.UploadChunk, _Mapping]] = ...) -> None: ...

class GenerateWithTaskResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: GenerateResponse
    def __init__(self, response: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    delta: GenerationDelta
    finished: GenerationFinished
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., delta: _Optional[_Union[GenerationDelta, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("request_id", "adapter", "adapter_digest", "sampling", "stopping", "prompt_tokens", "cached_tokens", "queue_time", "decoding", "prompt_logprobs", "tenant", "model_fingerprint", "prompt_sha256", "render_time", "adapters", "lora_task_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHA256_FIELD_NUMBER: _ClassVar[int]
    RENDER_TIME_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LORA_TASK_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    adapter: str
    adapter_digest: str
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    prompt_tokens: int
    cached_tokens: int
    queue_time: _duration_pb2.Duration
    decoding: _types_pb2.DecodingParams
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    tenant: str
    model_fingerprint: str
    prompt_sha256: str
    render_time: _timestamp_pb2.Timestamp
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterUse]
    lora_task_id: int
    def __init__(self, request_id: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decoding: _Optional[_Union[_types_pb2.DecodingParams, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., tenant: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., prompt_sha256: _Optional[str] = ..., render_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[AdapterUse, _Mapping]]] = ..., lora_task_id: _Optional[int] = ...) -> None: ...

class GenerationDelta(_message.Message):
    __slots__ = ("index", "token_offset", "token_ids", "text", "completion_tokens", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    completion_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., token_offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., completion_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("index", "reason", "stop_string", "usage", "timings", "seed", "cumulative_logprob", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: _types_pb2.FinishReason
    stop_string: str
    usage: _types_pb2.Usage
    timings: _types_pb2.Timings
    seed: int
    cumulative_logprob: float
    score: float
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_types_pb2.Timings, _Mapping]] = ..., seed: _Optional[int] = ..., cumulative_logprob: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...
