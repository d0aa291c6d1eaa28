import datetime

from google.longrunning import operations_pb2 as _operations_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdapterVisibility(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_VISIBILITY_UNSPECIFIED: _ClassVar[AdapterVisibility]
    ADAPTER_VISIBILITY_PRIVATE: _ClassVar[AdapterVisibility]
    ADAPTER_VISIBILITY_SHARED: _ClassVar[AdapterVisibility]
    ADAPTER_VISIBILITY_PUBLIC: _ClassVar[AdapterVisibility]

class AdapterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_STATE_UNSPECIFIED: _ClassVar[AdapterState]
    ADAPTER_STATE_ACTIVE: _ClassVar[AdapterState]
    ADAPTER_STATE_DELETING: _ClassVar[AdapterState]
    ADAPTER_STATE_FAILED: _ClassVar[AdapterState]

class AdapterTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_TIER_UNSPECIFIED: _ClassVar[AdapterTier]
    ADAPTER_TIER_STORE: _ClassVar[AdapterTier]
    ADAPTER_TIER_HOST_CACHE: _ClassVar[AdapterTier]
    ADAPTER_TIER_ARENA: _ClassVar[AdapterTier]

class RegistrationChange(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGISTRATION_CHANGE_UNSPECIFIED: _ClassVar[RegistrationChange]
    REGISTRATION_CHANGE_CREATED: _ClassVar[RegistrationChange]
    REGISTRATION_CHANGE_VERSION_ADDED: _ClassVar[RegistrationChange]
    REGISTRATION_CHANGE_VERSION_ACTIVATED: _ClassVar[RegistrationChange]
    REGISTRATION_CHANGE_NONE: _ClassVar[RegistrationChange]
    REGISTRATION_CHANGE_VERSION_SIGNED: _ClassVar[RegistrationChange]
    REGISTRATION_CHANGE_VERSION_STAGED: _ClassVar[RegistrationChange]

class SignatureMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SIGNATURE_METHOD_UNSPECIFIED: _ClassVar[SignatureMethod]
    SIGNATURE_METHOD_KEY: _ClassVar[SignatureMethod]
    SIGNATURE_METHOD_CERTIFICATE: _ClassVar[SignatureMethod]

class VerificationVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_VERDICT_UNSPECIFIED: _ClassVar[VerificationVerdict]
    VERIFICATION_VERDICT_PASSED: _ClassVar[VerificationVerdict]
    VERIFICATION_VERDICT_FAILED: _ClassVar[VerificationVerdict]
ADAPTER_VISIBILITY_UNSPECIFIED: AdapterVisibility
ADAPTER_VISIBILITY_PRIVATE: AdapterVisibility
ADAPTER_VISIBILITY_SHARED: AdapterVisibility
ADAPTER_VISIBILITY_PUBLIC: AdapterVisibility
ADAPTER_STATE_UNSPECIFIED: AdapterState
ADAPTER_STATE_ACTIVE: AdapterState
ADAPTER_STATE_DELETING: AdapterState
ADAPTER_STATE_FAILED: AdapterState
ADAPTER_TIER_UNSPECIFIED: AdapterTier
ADAPTER_TIER_STORE: AdapterTier
ADAPTER_TIER_HOST_CACHE: AdapterTier
ADAPTER_TIER_ARENA: AdapterTier
REGISTRATION_CHANGE_UNSPECIFIED: RegistrationChange
REGISTRATION_CHANGE_CREATED: RegistrationChange
REGISTRATION_CHANGE_VERSION_ADDED: RegistrationChange
REGISTRATION_CHANGE_VERSION_ACTIVATED: RegistrationChange
REGISTRATION_CHANGE_NONE: RegistrationChange
REGISTRATION_CHANGE_VERSION_SIGNED: RegistrationChange
REGISTRATION_CHANGE_VERSION_STAGED: RegistrationChange
SIGNATURE_METHOD_UNSPECIFIED: SignatureMethod
SIGNATURE_METHOD_KEY: SignatureMethod
SIGNATURE_METHOD_CERTIFICATE: SignatureMethod
VERIFICATION_VERDICT_UNSPECIFIED: VerificationVerdict
VERIFICATION_VERDICT_PASSED: VerificationVerdict
VERIFICATION_VERDICT_FAILED: VerificationVerdict

class VersionSignature(_message.Message):
    __slots__ = ("signer", "method", "key_fingerprint", "verify_time", "subject")
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    KEY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    signer: str
    method: SignatureMethod
    key_fingerprint: str
    verify_time: _timestamp_pb2.Timestamp
    subject: str
    def __init__(self, signer: _Optional[str] = ..., method: _Optional[_Union[SignatureMethod, str]] = ..., key_fingerprint: _Optional[str] = ..., verify_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., subject: _Optional[str] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("change", "previous_version", "version")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    change: RegistrationChange
    previous_version: AdapterVersion
    version: AdapterVersion
    def __init__(self, change: _Optional[_Union[RegistrationChange, str]] = ..., previous_version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., version: _Optional[_Union[AdapterVersion, _Mapping]] = ...) -> None: ...

class AdapterCanary(_message.Message):
    __slots__ = ("digest", "per_mille")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PER_MILLE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    per_mille: int
    def __init__(self, digest: _Optional[str] = ..., per_mille: _Optional[int] = ...) -> None: ...

class VersionRollout(_message.Message):
    __slots__ = ("keep_active", "canary_per_mille", "version_labels", "keep_versions", "ttl", "hold")
    KEEP_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    CANARY_PER_MILLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_LABELS_FIELD_NUMBER: _ClassVar[int]
    KEEP_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    keep_active: bool
    canary_per_mille: int
    version_labels: _containers.RepeatedScalarFieldContainer[str]
    keep_versions: int
    ttl: _duration_pb2.Duration
    hold: bool
    def __init__(self, keep_active: bool = ..., canary_per_mille: _Optional[int] = ..., version_labels: _Optional[_Iterable[str]] = ..., keep_versions: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hold: bool = ...) -> None: ...

class AdapterPlacement(_message.Message):
    __slots__ = ("tier", "worker_id")
    TIER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    tier: AdapterTier
    worker_id: str
    def __init__(self, tier: _Optional[_Union[AdapterTier, str]] = ..., worker_id: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "uid", "display_name", "labels", "state", "state_reason", "active_version", "pinned", "placements", "create_time", "update_time", "etag", "registration", "owner", "visibility", "shared_with", "version_labels", "canary", "keep_versions", "expire_time", "previous_digests")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class VersionLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_REASON_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    UPDATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    VERSION_LABELS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    KEEP_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    display_name: str
    labels: _containers.ScalarMap[str, str]
    state: AdapterState
    state_reason: str
    active_version: AdapterVersion
    pinned: bool
    placements: _containers.RepeatedCompositeFieldContainer[AdapterPlacement]
    create_time: _timestamp_pb2.Timestamp
    update_time: _timestamp_pb2.Timestamp
    etag: str
    registration: Registration
    owner: str
    visibility: AdapterVisibility
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    version_labels: _containers.ScalarMap[str, str]
    canary: AdapterCanary
    keep_versions: int
    expire_time: _timestamp_pb2.Timestamp
    previous_digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., display_name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[AdapterState, str]] = ..., state_reason: _Optional[str] = ..., active_version: _Optional[_Union[AdapterVersion, _Mapping]] = ..., pinned: bool = ..., placements: _Optional[_Iterable[_Union[AdapterPlacement, _Mapping]]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., update_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., etag: _Optional[str] = ..., registration: _Optional[_Union[Registration, _Mapping]] = ..., owner: _Optional[str] = ..., visibility: _Optional[_Union[AdapterVisibility, str]] = ..., shared_with: _Optional[_Iterable[str]] = ..., version_labels: _Optional[_Mapping[str, str]] = ..., canary: _Optional[_Union[AdapterCanary, _Mapping]] = ..., keep_versions: _Optional[int] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., previous_digests: _Optional[_Iterable[str]] = ...) -> None: ...

class AdapterVersion(_message.Message):
    __slots__ = ("digest", "kind", "max_rank", "target_modules", "dtype", "size_bytes", "create_time", "number", "signature", "alora_invocation_tokens", "vocab_size", "num_rows", "files", "num_labels", "class_labels", "version_labels", "context_length", "source", "verification", "warnings")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ALORA_INVOCATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    NUM_LABELS_FIELD_NUMBER: _ClassVar[int]
    CLASS_LABELS_FIELD_NUMBER: _ClassVar[int]
    VERSION_LABELS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    kind: str
    max_rank: int
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    size_bytes: int
    create_time: _timestamp_pb2.Timestamp
    number: int
    signature: VersionSignature
    alora_invocation_tokens: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    num_rows: int
    files: _containers.RepeatedScalarFieldContainer[str]
    num_labels: int
    class_labels: _containers.RepeatedScalarFieldContainer[str]
    version_labels: _containers.RepeatedScalarFieldContainer[str]
    context_length: int
    source: str
    verification: VersionVerification
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., kind: _Optional[str] = ..., max_rank: _Optional[int] = ..., target_modules: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., size_bytes: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., number: _Optional[int] = ..., signature: _Optional[_Union[VersionSignature, _Mapping]] = ..., alora_invocation_tokens: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., num_rows: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ..., num_labels: _Optional[int] = ..., class_labels: _Optional[_Iterable[str]] = ..., version_labels: _Optional[_Iterable[str]] = ..., context_length: _Optional[int] = ..., source: _Optional[str] = ..., verification: _Optional[_Union[VersionVerification, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class VersionVerification(_message.Message):
    __slots__ = ("verdict", "tolerance", "largest_error", "largest_effect", "num_prompts", "num_logprobs", "verify_time", "duration_s")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    LARGEST_ERROR_FIELD_NUMBER: _ClassVar[int]
    LARGEST_EFFECT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    verdict: VerificationVerdict
    tolerance: float
    largest_error: float
    largest_effect: float
    num_prompts: int
    num_logprobs: int
    verify_time: _timestamp_pb2.Timestamp
    duration_s: float
    def __init__(self, verdict: _Optional[_Union[VerificationVerdict, str]] = ..., tolerance: _Optional[float] = ..., largest_error: _Optional[float] = ..., largest_effect: _Optional[float] = ..., num_prompts: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., verify_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., duration_s: _Optional[float] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("adapter_id", "display_name", "labels", "files", "validate_only", "request_id", "visibility", "shared_with", "owner", "rollout", "upload_id")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    display_name: str
    labels: _containers.ScalarMap[str, str]
    files: _containers.RepeatedCompositeFieldContainer[UploadFile]
    validate_only: bool
    request_id: str
    visibility: AdapterVisibility
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    rollout: VersionRollout
    upload_id: str
    def __init__(self, adapter_id: _Optional[str] = ..., display_name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., files: _Optional[_Iterable[_Union[UploadFile, _Mapping]]] = ..., validate_only: bool = ..., request_id: _Optional[str] = ..., visibility: _Optional[_Union[AdapterVisibility, str]] = ..., shared_with: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., rollout: _Optional[_Union[VersionRollout, _Mapping]] = ..., upload_id: _Optional[str] = ...) -> None: ...

class UploadFile(_message.Message):
    __slots__ = ("name", "size_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class UploadChunk(_message.Message):
    __slots__ = ("file_index", "offset", "data")
    FILE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file_index: int
    offset: int
    data: bytes
    def __init__(self, file_index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadAdapterRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: UploadHeader
    chunk: UploadChunk
    def __init__(self, header: _Optional[_Union[UploadHeader, _Mapping]] = ..., chunk: _Optional[_Union[UploadChunk, _Mapping]] = ...) -> None: ...

class UploadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class GetUploadRequest(_message.Message):
    __slots__ = ("upload_id",)
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    upload_id: str
    def __init__(self, upload_id: _Optional[str] = ...) -> None: ...

class GetUploadResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, received_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class CreateAdapterRequest(_message.Message):
    __slots__ = ("adapter_id", "source", "display_name", "labels", "validate_only", "request_id", "visibility", "shared_with", "owner", "rollout")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VISIBILITY_FIELD_NUMBER: _ClassVar[int]
    SHARED_WITH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    adapter_id: str
    source: str
    display_name: str
    labels: _containers.ScalarMap[str, str]
    validate_only: bool
    request_id: str
    visibility: AdapterVisibility
    shared_with: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    rollout: VersionRollout
    def __init__(self, adapter_id: _Optional[str] = ..., source: _Optional[str] = ..., display_name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., validate_only: bool = ..., request_id: _Optional[str] = ..., visibility: _Optional[_Union[AdapterVisibility, str]] = ..., shared_with: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., rollout: _Optional[_Union[VersionRollout, _Mapping]] = ...) -> None: ...

class GetAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "next_page_token")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    next_page_token: str
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdateAdapterRequest(_message.Message):
    __slots__ = ("adapter", "update_mask", "ttl")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    update_mask: _field_mask_pb2.FieldMask
    ttl: _duration_pb2.Duration
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UpdateAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class ListAdapterVersionsRequest(_message.Message):
    __slots__ = ("name", "page_size", "page_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    page_size: int
    page_token: str
    def __init__(self, name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAdapterVersionsResponse(_message.Message):
    __slots__ = ("versions", "next_page_token")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[AdapterVersion]
    next_page_token: str
    def __init__(self, versions: _Optional[_Iterable[_Union[AdapterVersion, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ActivateAdapterVersionRequest(_message.Message):
    __slots__ = ("name", "digest", "etag", "expected_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    etag: str
    expected_digest: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., etag: _Optional[str] = ..., expected_digest: _Optional[str] = ...) -> None: ...

class ActivateAdapterVersionResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class RollbackAdapterRequest(_message.Message):
    __slots__ = ("name", "etag", "expected_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    expected_digest: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., expected_digest: _Optional[str] = ...) -> None: ...

class RollbackAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class PinAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PinAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnpinAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class DeleteAdapterRequest(_message.Message):
    __slots__ = ("name", "etag", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class DeleteAdapterVersionRequest(_message.Message):
    __slots__ = ("name", "digest", "etag", "request_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    etag: str
    request_id: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class AdapterOperationMetadata(_message.Message):
    __slots__ = ("adapter", "verb", "create_time", "digest", "phase", "bytes_done", "bytes_total")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    verb: str
    create_time: _timestamp_pb2.Timestamp
    digest: str
    phase: str
    bytes_done: int
    bytes_total: int
    def __init__(self, adapter: _Optional[str] = ..., verb: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., digest: _Optional[str] = ..., phase: _Optional[str] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...
