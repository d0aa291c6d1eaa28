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
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
POOLING_FIRST: Pooling

class AttachRequest(_message.Message):
    __slots__ = ("hello", "step_result", "slot_state", "heartbeat", "fault", "pong", "leave")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    SLOT_STATE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step_result: StepResult
    slot_state: SlotState
    heartbeat: Heartbeat
    fault: Fault
    pong: Pong
    leave: Leave
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step_result: _Optional[_Union[StepResult, _Mapping]] = ..., slot_state: _Optional[_Union[SlotState, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "step_plan", "load_adapter", "evict_adapter", "ping", "put_grammar", "put_vocabulary", "forget_constraints")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_PLAN_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EVICT_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PUT_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PUT_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    FORGET_CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step_plan: StepPlan
    load_adapter: LoadAdapter
    evict_adapter: EvictAdapter
    ping: Ping
    put_grammar: PutGrammar
    put_vocabulary: PutVocabulary
    forget_constraints: ForgetConstraints
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step_plan: _Optional[_Union[StepPlan, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ..., evict_adapter: _Optional[_Union[EvictAdapter, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., put_grammar: _Optional[_Union[PutGrammar, _Mapping]] = ..., put_vocabulary: _Optional[_Union[PutVocabulary, _Mapping]] = ..., forget_constraints: _Optional[_Union[ForgetConstraints, _Mapping]] = ...) -> None: ...

class PutVocabulary(_message.Message):
    __slots__ = ("digest", "tokenizer", "num_tokens", "end_token_ids")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    tokenizer: str
    num_tokens: int
    end_token_ids: bytes
    def __init__(self, digest: _Optional[str] = ..., tokenizer: _Optional[str] = ..., num_tokens: _Optional[int] = ..., end_token_ids: _Optional[bytes] = ...) -> None: ...

class PutGrammar(_message.Message):
    __slots__ = ("digest", "grammar", "vocabulary")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    digest: str
    grammar: str
    vocabulary: str
    def __init__(self, digest: _Optional[str] = ..., grammar: _Optional[str] = ..., vocabulary: _Optional[str] = ...) -> None: ...

class ForgetConstraints(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "worker_id", "model_fingerprint", "dtype", "device", "num_blocks", "block_size", "max_rows", "max_step_tokens", "arena_bytes", "num_slots", "max_model_len", "vocab_size", "parallel", "num_host_blocks", "last_epoch", "target_modules", "max_adapter_model_len", "hidden_width", "memory", "quantization")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTER_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    worker_id: str
    model_fingerprint: str
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    max_rows: int
    max_step_tokens: int
    arena_bytes: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    parallel: ParallelLayout
    num_host_blocks: int
    last_epoch: int
    target_modules: _containers.RepeatedCompositeFieldContainer[TargetModules]
    max_adapter_model_len: int
    hidden_width: int
    memory: MemoryUse
    quantization: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., worker_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., parallel: _Optional[_Union[ParallelLayout, _Mapping]] = ..., num_host_blocks: _Optional[int] = ..., last_epoch: _Optional[int] = ..., target_modules: _Optional[_Iterable[_Union[TargetModules, _Mapping]]] = ..., max_adapter_model_len: _Optional[int] = ..., hidden_width: _Optional[int] = ..., memory: _Optional[_Union[MemoryUse, _Mapping]] = ..., quantization: _Optional[str] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ("device_bytes", "weights_bytes", "step_bytes", "kv_bytes", "host_kv_bytes", "graph_bytes", "headroom_bytes", "pinned_bytes")
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_bytes: int
    weights_bytes: int
    step_bytes: int
    kv_bytes: int
    host_kv_bytes: int
    graph_bytes: int
    headroom_bytes: int
    pinned_bytes: int
    def __init__(self, device_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., step_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., host_kv_bytes: _Optional[int] = ..., graph_bytes: _Optional[int] = ..., headroom_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class TargetModules(_message.Message):
    __slots__ = ("path", "layers", "kind", "in_features", "out_features", "reason", "num_experts", "is_interleaved")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[TargetModules.Kind]
        KIND_LINEAR: _ClassVar[TargetModules.Kind]
        KIND_HEAD: _ClassVar[TargetModules.Kind]
        KIND_EMBEDDING: _ClassVar[TargetModules.Kind]
        KIND_EXPERT: _ClassVar[TargetModules.Kind]
        KIND_ROUTER: _ClassVar[TargetModules.Kind]
    KIND_UNSPECIFIED: TargetModules.Kind
    KIND_LINEAR: TargetModules.Kind
    KIND_HEAD: TargetModules.Kind
    KIND_EMBEDDING: TargetModules.Kind
    KIND_EXPERT: TargetModules.Kind
    KIND_ROUTER: TargetModules.Kind
    PATH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    OUT_FEATURES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    IS_INTERLEAVED_FIELD_NUMBER: _ClassVar[int]
    path: str
    layers: bytes
    kind: TargetModules.Kind
    in_features: int
    out_features: int
    reason: str
    num_experts: int
    is_interleaved: bool
    def __init__(self, path: _Optional[str] = ..., layers: _Optional[bytes] = ..., kind: _Optional[_Union[TargetModules.Kind, str]] = ..., in_features: _Optional[int] = ..., out_features: _Optional[int] = ..., reason: _Optional[str] = ..., num_experts: _Optional[int] = ..., is_interleaved: bool = ...) -> None: ...

class ParallelLayout(_message.Message):
    __slots__ = ("tensor", "pipeline")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    pipeline: int
    def __init__(self, tensor: _Optional[int] = ..., pipeline: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "epoch", "heartbeat_interval_ms", "dead_after_ms", "plan_depth", "host_cache_url", "leave_after_ms", "stuck_after_ms", "host_cache_needs_password")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    DEAD_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PLAN_DEPTH_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_URL_FIELD_NUMBER: _ClassVar[int]
    LEAVE_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    STUCK_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_NEEDS_PASSWORD_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    epoch: int
    heartbeat_interval_ms: int
    dead_after_ms: int
    plan_depth: int
    host_cache_url: str
    leave_after_ms: int
    stuck_after_ms: int
    host_cache_needs_password: bool
    def __init__(self, protocol: _Optional[int] = ..., epoch: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., dead_after_ms: _Optional[int] = ..., plan_depth: _Optional[int] = ..., host_cache_url: _Optional[str] = ..., leave_after_ms: _Optional[int] = ..., stuck_after_ms: _Optional[int] = ..., host_cache_needs_password: bool = ...) -> None: ...

class NewRow(_message.Message):
    __slots__ = ("row", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "slot", "slot_generation", "biased_token_ids", "biases", "min_tokens", "banned_token_ids", "is_host_fed", "prompt", "sampling", "adapters", "active_from", "pooling", "num_labels", "grammar", "request_id", "trace_id")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    BIASED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_HOST_FED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FROM_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_LABELS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    row: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes
    slot: int
    slot_generation: int
    biased_token_ids: bytes
    biases: bytes
    min_tokens: int
    banned_token_ids: bytes
    is_host_fed: bool
    prompt: int
    sampling: _types_pb2.SamplingParams
    adapters: RowAdapters
    active_from: int
    pooling: Pooling
    num_labels: int
    grammar: str
    request_id: str
    trace_id: str
    def __init__(self, row: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., biased_token_ids: _Optional[bytes] = ..., biases: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., banned_token_ids: _Optional[bytes] = ..., is_host_fed: bool = ..., prompt: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., adapters: _Optional[_Union[RowAdapters, _Mapping]] = ..., active_from: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., num_labels: _Optional[int] = ..., grammar: _Optional[str] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class RowAdapter(_message.Message):
    __slots__ = ("slot", "slot_generation", "scale")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    slot_generation: int
    scale: float
    def __init__(self, slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class RowAdapters(_message.Message):
    __slots__ = ("members", "is_linear")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_LINEAR_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[RowAdapter]
    is_linear: bool
    def __init__(self, members: _Optional[_Iterable[_Union[RowAdapter, _Mapping]]] = ..., is_linear: bool = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step_id", "epoch", "freed_rows", "new_rows", "appended_blocks", "paused_rows", "resumed_rows", "prefills", "block_copies", "fed_tokens", "swap_outs", "swap_ins", "num_steps", "prompts")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FREED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NEW_ROWS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_ROWS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    FED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUTS_FIELD_NUMBER: _ClassVar[int]
    SWAP_INS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    epoch: int
    freed_rows: bytes
    new_rows: _containers.RepeatedCompositeFieldContainer[NewRow]
    appended_blocks: bytes
    paused_rows: bytes
    resumed_rows: bytes
    prefills: bytes
    block_copies: bytes
    fed_tokens: bytes
    swap_outs: bytes
    swap_ins: bytes
    num_steps: int
    prompts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., freed_rows: _Optional[bytes] = ..., new_rows: _Optional[_Iterable[_Union[NewRow, _Mapping]]] = ..., appended_blocks: _Optional[bytes] = ..., paused_rows: _Optional[bytes] = ..., resumed_rows: _Optional[bytes] = ..., prefills: _Optional[bytes] = ..., block_copies: _Optional[bytes] = ..., fed_tokens: _Optional[bytes] = ..., swap_outs: _Optional[bytes] = ..., swap_ins: _Optional[bytes] = ..., num_steps: _Optional[int] = ..., prompts: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "first_position", "token_ids", "logprobs", "ranks", "num_top", "top_token_ids", "top_logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    first_position: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    num_top: int
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, row: _Optional[int] = ..., first_position: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., num_top: _Optional[int] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "epoch", "rows", "token_ids", "failed_rows", "step_time_us", "sampled_logprobs", "prompt_logprobs", "num_moved_blocks", "move_time_us", "pooled", "unconstrained_rows", "waiting_rows")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    UNCONSTRAINED_ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_ROWS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    epoch: int
    rows: bytes
    token_ids: bytes
    failed_rows: bytes
    step_time_us: int
    sampled_logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    num_moved_blocks: int
    move_time_us: int
    pooled: _containers.RepeatedCompositeFieldContainer[PooledRow]
    unconstrained_rows: bytes
    waiting_rows: bytes
    def __init__(self, step_id: _Optional[int] = ..., epoch: _Optional[int] = ..., rows: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., failed_rows: _Optional[bytes] = ..., step_time_us: _Optional[int] = ..., sampled_logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., num_moved_blocks: _Optional[int] = ..., move_time_us: _Optional[int] = ..., pooled: _Optional[_Iterable[_Union[PooledRow, _Mapping]]] = ..., unconstrained_rows: _Optional[bytes] = ..., waiting_rows: _Optional[bytes] = ...) -> None: ...

class PooledRow(_message.Message):
    __slots__ = ("row", "values")
    ROW_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    row: int
    values: bytes
    def __init__(self, row: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("slot", "generation", "digest", "epoch")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    digest: str
    epoch: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., digest: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class EvictAdapter(_message.Message):
    __slots__ = ("slot", "generation", "epoch")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    epoch: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SlotState(_message.Message):
    __slots__ = ("slot", "generation", "digest", "state", "reason", "retryable", "arena_used_bytes", "load_time_us", "epoch", "mismatch")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[SlotState.State]
        STATE_READY: _ClassVar[SlotState.State]
        STATE_EMPTY: _ClassVar[SlotState.State]
        STATE_FAILED: _ClassVar[SlotState.State]
    STATE_UNSPECIFIED: SlotState.State
    STATE_READY: SlotState.State
    STATE_EMPTY: SlotState.State
    STATE_FAILED: SlotState.State
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    ARENA_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_US_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    digest: str
    state: SlotState.State
    reason: str
    retryable: bool
    arena_used_bytes: int
    load_time_us: int
    epoch: int
    mismatch: bool
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[SlotState.State, str]] = ..., reason: _Optional[str] = ..., retryable: bool = ..., arena_used_bytes: _Optional[int] = ..., load_time_us: _Optional[int] = ..., epoch: _Optional[int] = ..., mismatch: bool = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("num_steps", "num_plans_waiting", "arena_used_bytes", "resident_bytes", "step_id", "step_age_ms", "loads")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLANS_WAITING_FIELD_NUMBER: _ClassVar[int]
    ARENA_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_plans_waiting: int
    arena_used_bytes: int
    resident_bytes: int
    step_id: int
    step_age_ms: int
    loads: _containers.RepeatedCompositeFieldContainer[LoadInHand]
    def __init__(self, num_steps: _Optional[int] = ..., num_plans_waiting: _Optional[int] = ..., arena_used_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., step_id: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., loads: _Optional[_Iterable[_Union[LoadInHand, _Mapping]]] = ...) -> None: ...

class LoadInHand(_message.Message):
    __slots__ = ("slot", "generation", "age_ms")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    age_ms: int
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("reason", "step_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    step_id: int
    def __init__(self, reason: _Optional[str] = ..., step_id: _Optional[int] = ...) -> None: ...

class FetchAdapterRequest(_message.Message):
    __slots__ = ("digest", "worker_id", "reads_files")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    READS_FILES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    worker_id: str
    reads_files: bool
    def __init__(self, digest: _Optional[str] = ..., worker_id: _Optional[str] = ..., reads_files: bool = ...) -> None: ...

class FetchAdapterResponse(_message.Message):
    __slots__ = ("manifest", "data", "files")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    data: bytes
    files: AdapterFiles
    def __init__(self, manifest: _Optional[bytes] = ..., data: _Optional[bytes] = ..., files: _Optional[_Union[AdapterFiles, _Mapping]] = ...) -> None: ...

class AdapterFiles(_message.Message):
    __slots__ = ("paths",)
    PATHS_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, paths: _Optional[_Iterable[str]] = ...) -> None: ...
