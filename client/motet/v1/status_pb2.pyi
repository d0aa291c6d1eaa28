from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("server_version", "model", "workers", "queues", "adapters", "limits", "tenants", "num_other_tenants", "audit", "drained_worker_ids", "active_adapters", "num_other_active_adapters", "own_tenant_only")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_TENANTS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    DRAINED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_ACTIVE_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    OWN_TENANT_ONLY_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    model: ModelStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    queues: QueueStatus
    adapters: AdapterStatus
    limits: LimitStatus
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    num_other_tenants: int
    audit: AuditStatus
    drained_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    active_adapters: _containers.RepeatedCompositeFieldContainer[ActiveAdapterStatus]
    num_other_active_adapters: int
    own_tenant_only: bool
    def __init__(self, server_version: _Optional[str] = ..., model: _Optional[_Union[ModelStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., queues: _Optional[_Union[QueueStatus, _Mapping]] = ..., adapters: _Optional[_Union[AdapterStatus, _Mapping]] = ..., limits: _Optional[_Union[LimitStatus, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., num_other_tenants: _Optional[int] = ..., audit: _Optional[_Union[AuditStatus, _Mapping]] = ..., drained_worker_ids: _Optional[_Iterable[str]] = ..., active_adapters: _Optional[_Iterable[_Union[ActiveAdapterStatus, _Mapping]]] = ..., num_other_active_adapters: _Optional[int] = ..., own_tenant_only: bool = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "max_model_len", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "device", "epoch", "num_steps", "num_plans_in_flight", "num_running", "num_waiting", "num_blocks", "num_blocks_held", "num_blocks_cached", "block_size", "arena_bytes", "arena_used_bytes", "num_adapters_loaded", "prefix_query_tokens", "prefix_hit_tokens", "num_preemptions", "num_tokens_sampled", "step_time_ms", "resident_bytes", "num_plans", "max_plan_steps", "round_trip_ms", "num_swapped", "num_swapped_out", "num_host_blocks", "num_host_blocks_held", "max_model_len", "memory_bytes", "weights_bytes", "step_memory_bytes", "kv_bytes", "host_kv_bytes", "graph_bytes", "headroom_bytes", "pinned_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_LOADED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANS_FIELD_NUMBER: _ClassVar[int]
    MAX_PLAN_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    device: str
    epoch: int
    num_steps: int
    num_plans_in_flight: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_held: int
    num_blocks_cached: int
    block_size: int
    arena_bytes: int
    arena_used_bytes: int
    num_adapters_loaded: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    num_tokens_sampled: int
    step_time_ms: float
    resident_bytes: int
    num_plans: int
    max_plan_steps: int
    round_trip_ms: float
    num_swapped: int
    num_swapped_out: int
    num_host_blocks: int
    num_host_blocks_held: int
    max_model_len: int
    memory_bytes: int
    weights_bytes: int
    step_memory_bytes: int
    kv_bytes: int
    host_kv_bytes: int
    graph_bytes: int
    headroom_bytes: int
    pinned_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., device: _Optional[str] = ..., epoch: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_plans_in_flight: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_held: _Optional[int] = ..., num_blocks_cached: _Optional[int] = ..., block_size: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., arena_used_bytes: _Optional[int] = ..., num_adapters_loaded: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_tokens_sampled: _Optional[int] = ..., step_time_ms: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., num_plans: _Optional[int] = ..., max_plan_steps: _Optional[int] = ..., round_trip_ms: _Optional[float] = ..., num_swapped: _Optional[int] = ..., num_swapped_out: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_host_blocks_held: _Optional[int] = ..., max_model_len: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., step_memory_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., host_kv_bytes: _Optional[int] = ..., graph_bytes: _Optional[int] = ..., headroom_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("num_requests", "num_waiting", "num_running", "num_accepted", "num_finished", "num_rejected", "num_migrated")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_waiting: int
    num_running: int
    num_accepted: int
    num_finished: int
    num_rejected: int
    num_migrated: int
    def __init__(self, num_requests: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_migrated: _Optional[int] = ...) -> None: ...

class ActiveAdapterStatus(_message.Message):
    __slots__ = ("adapter", "digest", "num_running", "num_waiting")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    digest: str
    num_running: int
    num_waiting: int
    def __init__(self, adapter: _Optional[str] = ..., digest: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("num_registered", "num_stored", "num_host_cached", "host_cache_bytes", "host_cache_budget_bytes", "host_cache_available", "host_cache_error")
    NUM_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_ERROR_FIELD_NUMBER: _ClassVar[int]
    num_registered: int
    num_stored: int
    num_host_cached: int
    host_cache_bytes: int
    host_cache_budget_bytes: int
    host_cache_available: bool
    host_cache_error: str
    def __init__(self, num_registered: _Optional[int] = ..., num_stored: _Optional[int] = ..., num_host_cached: _Optional[int] = ..., host_cache_bytes: _Optional[int] = ..., host_cache_budget_bytes: _Optional[int] = ..., host_cache_available: bool = ..., host_cache_error: _Optional[str] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("tenant", "weight", "num_requests", "max_running_requests", "num_queued_tokens", "max_queued_tokens", "num_tokens_left", "tokens_per_minute", "num_accepted", "num_rejected", "num_input_tokens", "num_generated_tokens", "num_requests_left", "requests_per_minute")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    weight: float
    num_requests: int
    max_running_requests: int
    num_queued_tokens: int
    max_queued_tokens: int
    num_tokens_left: int
    tokens_per_minute: int
    num_accepted: int
    num_rejected: int
    num_input_tokens: int
    num_generated_tokens: int
    num_requests_left: int
    requests_per_minute: int
    def __init__(self, tenant: _Optional[str] = ..., weight: _Optional[float] = ..., num_requests: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., num_tokens_left: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_rejected: _Optional[int] = ..., num_input_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_requests_left: _Optional[int] = ..., requests_per_minute: _Optional[int] = ...) -> None: ...

class AuditStatus(_message.Message):
    __slots__ = ("is_on", "num_lines", "num_lost", "error")
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    NUM_LINES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    is_on: bool
    num_lines: int
    num_lost: int
    error: str
    def __init__(self, is_on: bool = ..., num_lines: _Optional[int] = ..., num_lost: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class LimitStatus(_message.Message):
    __slots__ = ("max_waiting_requests", "max_adapter_bytes", "max_chunk_bytes")
    MAX_WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_waiting_requests: int
    max_adapter_bytes: int
    max_chunk_bytes: int
    def __init__(self, max_waiting_requests: _Optional[int] = ..., max_adapter_bytes: _Optional[int] = ..., max_chunk_bytes: _Optional[int] = ...) -> None: ...
