import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from motet.v1 import adapters_pb2 as _adapters_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResidencyOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESIDENCY_OUTCOME_UNSPECIFIED: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_LOADED: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_WAS_LOADED: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_LOADING: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_NO_ROOM: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_FAILED: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_UNLOADED: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_WAS_ABSENT: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_IN_USE: _ClassVar[ResidencyOutcome]
    RESIDENCY_OUTCOME_PINNED: _ClassVar[ResidencyOutcome]

class AdapterChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_CHANGE_KIND_UNSPECIFIED: _ClassVar[AdapterChangeKind]
    ADAPTER_CHANGE_KIND_PRESENT: _ClassVar[AdapterChangeKind]
    ADAPTER_CHANGE_KIND_CREATED: _ClassVar[AdapterChangeKind]
    ADAPTER_CHANGE_KIND_VERSION_ADDED: _ClassVar[AdapterChangeKind]
    ADAPTER_CHANGE_KIND_VERSION_ACTIVATED: _ClassVar[AdapterChangeKind]
    ADAPTER_CHANGE_KIND_VERSION_DELETED: _ClassVar[AdapterChangeKind]
    ADAPTER_CHANGE_KIND_UPDATED: _ClassVar[AdapterChangeKind]
    ADAPTER_CHANGE_KIND_DELETED: _ClassVar[AdapterChangeKind]
RESIDENCY_OUTCOME_UNSPECIFIED: ResidencyOutcome
RESIDENCY_OUTCOME_LOADED: ResidencyOutcome
RESIDENCY_OUTCOME_WAS_LOADED: ResidencyOutcome
RESIDENCY_OUTCOME_LOADING: ResidencyOutcome
RESIDENCY_OUTCOME_NO_ROOM: ResidencyOutcome
RESIDENCY_OUTCOME_FAILED: ResidencyOutcome
RESIDENCY_OUTCOME_UNLOADED: ResidencyOutcome
RESIDENCY_OUTCOME_WAS_ABSENT: ResidencyOutcome
RESIDENCY_OUTCOME_IN_USE: ResidencyOutcome
RESIDENCY_OUTCOME_PINNED: ResidencyOutcome
ADAPTER_CHANGE_KIND_UNSPECIFIED: AdapterChangeKind
ADAPTER_CHANGE_KIND_PRESENT: AdapterChangeKind
ADAPTER_CHANGE_KIND_CREATED: AdapterChangeKind
ADAPTER_CHANGE_KIND_VERSION_ADDED: AdapterChangeKind
ADAPTER_CHANGE_KIND_VERSION_ACTIVATED: AdapterChangeKind
ADAPTER_CHANGE_KIND_VERSION_DELETED: AdapterChangeKind
ADAPTER_CHANGE_KIND_UPDATED: AdapterChangeKind
ADAPTER_CHANGE_KIND_DELETED: AdapterChangeKind

class ResidencyResult(_message.Message):
    __slots__ = ("tier", "worker_id", "outcome", "missing_bytes", "reason")
    TIER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MISSING_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    tier: _adapters_pb2.AdapterTier
    worker_id: str
    outcome: ResidencyOutcome
    missing_bytes: int
    reason: str
    def __init__(self, tier: _Optional[_Union[_adapters_pb2.AdapterTier, str]] = ..., worker_id: _Optional[str] = ..., outcome: _Optional[_Union[ResidencyOutcome, str]] = ..., missing_bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "digest", "tier", "worker_ids", "wait")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    tier: _adapters_pb2.AdapterTier
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    wait: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., tier: _Optional[_Union[_adapters_pb2.AdapterTier, str]] = ..., worker_ids: _Optional[_Iterable[str]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest", "results")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    results: _containers.RepeatedCompositeFieldContainer[ResidencyResult]
    def __init__(self, digest: _Optional[str] = ..., results: _Optional[_Iterable[_Union[ResidencyResult, _Mapping]]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "digest", "tier", "worker_ids", "wait")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    tier: _adapters_pb2.AdapterTier
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    wait: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., tier: _Optional[_Union[_adapters_pb2.AdapterTier, str]] = ..., worker_ids: _Optional[_Iterable[str]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("digest", "results")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    results: _containers.RepeatedCompositeFieldContainer[ResidencyResult]
    def __init__(self, digest: _Optional[str] = ..., results: _Optional[_Iterable[_Union[ResidencyResult, _Mapping]]] = ...) -> None: ...

class WatchAdaptersRequest(_message.Message):
    __slots__ = ("name", "resume_token", "with_residency")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WITH_RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    name: str
    resume_token: str
    with_residency: bool
    def __init__(self, name: _Optional[str] = ..., resume_token: _Optional[str] = ..., with_residency: bool = ...) -> None: ...

class WatchAdaptersResponse(_message.Message):
    __slots__ = ("resume_token", "resync", "synced", "change", "residency")
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    SYNCED_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    resume_token: str
    resync: WatchResync
    synced: WatchSynced
    change: AdapterChange
    residency: ResidencyChange
    def __init__(self, resume_token: _Optional[str] = ..., resync: _Optional[_Union[WatchResync, _Mapping]] = ..., synced: _Optional[_Union[WatchSynced, _Mapping]] = ..., change: _Optional[_Union[AdapterChange, _Mapping]] = ..., residency: _Optional[_Union[ResidencyChange, _Mapping]] = ...) -> None: ...

class WatchResync(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class WatchSynced(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterChange(_message.Message):
    __slots__ = ("kind", "adapter")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    kind: AdapterChangeKind
    adapter: _adapters_pb2.Adapter
    def __init__(self, kind: _Optional[_Union[AdapterChangeKind, str]] = ..., adapter: _Optional[_Union[_adapters_pb2.Adapter, _Mapping]] = ...) -> None: ...

class ResidencyChange(_message.Message):
    __slots__ = ("adapter", "digest", "placements")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    digest: str
    placements: _containers.RepeatedCompositeFieldContainer[_adapters_pb2.AdapterPlacement]
    def __init__(self, adapter: _Optional[str] = ..., digest: _Optional[str] = ..., placements: _Optional[_Iterable[_Union[_adapters_pb2.AdapterPlacement, _Mapping]]] = ...) -> None: ...
