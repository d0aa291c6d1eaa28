"""What the SDK takes and returns: frozen dataclasses, no protobuf, no behaviour beyond reading.

`wire.py` builds them from messages.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from motet.v1.sampling import SamplingInEffect
from motet.v1.status import (
    ActiveAdapterStatus,
    AdapterStatus,
    AuditStatus,
    LimitStatus,
    ModelStatus,
    QueueStatus,
    TenantStatus,
    WorkerStatus,
)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search instead of sampling. Left out or None: the server's default, reported in `started`."""

    width: int  # beams, from 2 to 16
    length_penalty: float | None = None  # exponent of the length that a log-probability is divided by; default 1
    early_stopping: bool | None = None  # end with `width` ended completions, not when no running beam can beat them


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position."""

    token_id: int
    logprob: float  # natural logarithm; the lowest float32 stands for all that is less
    token: bytes = b""  # with token_bytes: what it adds to a text; may end within a character


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token and its most likely alternatives, under the distribution that `logprobs_mode` names."""

    token_id: int
    logprob: float  # natural logarithm; the lowest float32 stands for all that is less
    rank: int  # tokens that were more likely, plus one
    top: tuple[TokenLogprob, ...]  # as many as requested, the most likely first
    token: bytes = b""  # with token_bytes: what it adds to a text; may end within a character


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    UNSPECIFIED = "unspecified"  # a reason this SDK does not know
    LENGTH = "length"  # max_tokens or the end of the context was reached
    STOP_TOKEN = "stop_token"  # an end-of-sequence token or one of stop_token_ids
    STOP_STRING = "stop_string"  # one of the stop strings


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one completion and its prompt."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    completion_tokens: int  # tokens generated, those before a broken stream included


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went, seen by the server. After a broken stream: of its last part."""

    queue_time_s: float
    time_to_first_token_s: float
    total_time_s: float


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One of the adapters that a request combines."""

    name: str  # of the adapter, also "name@number" or "name@label"
    scale: float = 1.0  # what its scaling is multiplied by, from -100 to 100
    digest: str = ""  # pins one version of it; empty for the active one


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(SamplingInEffect):
    """What the server made of the request. Known from the first chunk on.

    The sampling parameters are those in effect; `top_k` is None, or the vocabulary size, where all tokens are kept.
    """

    request_id: str
    adapter: str  # "adapters/{id}", or "lora_tasks/{number}"; empty for the base model
    adapter_digest: str  # version in use, fixed for the whole stream; empty for the base model
    prompt_tokens: int
    cached_tokens: int  # prompt tokens taken from the prefix cache
    queue_time_s: float
    max_tokens: int  # in effect
    min_tokens: int = 0
    n: int = 1  # completions that are returned
    best_of: int = 1  # completions that are sampled
    beam_search: BeamSearch | None = None
    tenant: str = ""  # who the request is counted for; empty: the server has no tenants
    model_fingerprint: str = ""  # base model in use, as in status(): 64 hexadecimal digits
    prompt_sha256: str = ""  # of the prompt's token ids, each as 4 bytes, least significant first
    render_time: datetime | None = None  # for a conversation: when its chat template was rendered, UTC
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # where requested: the prompt's tokens from the second on
    adapters: tuple[AdapterUse, ...] = ()  # of a request with `adapters`: full names, versions in use and scales
    lora_task_id: int | None = None  # of a request with `lora_task`


@dataclass(frozen=True, slots=True)
class Finished:
    """How one completion ended."""

    finish_reason: FinishReason
    stop_string: str  # the one that ended it; empty for other reasons
    usage: Usage
    timings: Timings
    seed: int  # seed in effect for this completion
    index: int = 0  # which completion of the request
    cumulative_logprob: float | None = None  # sum over its tokens, for beam search and where logprobs were requested
    score: float | None = None  # for beam search: what the completions are ranked by


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came next of one completion. Its last one has no tokens and says how it ended."""

    text: str  # may lag behind token_ids: unfinished code points and possible stop strings are held back
    token_ids: tuple[int, ...]
    token_offset: int  # position of token_ids[0] among the generated tokens
    adapter_digest: str  # version in use; empty for the base model
    index: int = 0  # which completion of the request
    finish_reason: FinishReason | None = None  # set on the completion's last chunk only
    usage: Usage | None = None  # set on the completion's last chunk only
    logprobs: tuple[TokenLogprobs, ...] = ()  # where requested: one for each of token_ids


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole completion of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprobs, ...] = ()  # where requested: one for each of token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.finished.finish_reason


@dataclass(frozen=True, slots=True)
class Generation:
    """All that a request gave; `text`, `token_ids` and `finished` are those of the first completion."""

    text: str
    token_ids: tuple[int, ...]
    started: Started
    finished: Finished
    completions: tuple[Completion, ...]  # by index


class AdapterState(enum.StrEnum):
    """Where an adapter stands in its life."""

    UNSPECIFIED = "unspecified"  # a state this SDK does not know
    ACTIVE = "active"
    DELETING = "deleting"
    FAILED = "failed"


class AdapterVisibility(enum.StrEnum):
    """Who sees an adapter beside its owner. They may use it and not change it."""

    UNSPECIFIED = "unspecified"  # a visibility this SDK does not know
    PRIVATE = "private"  # nobody
    SHARED = "shared"  # the tenants of `shared_with`
    PUBLIC = "public"  # every tenant


class AdapterTier(enum.StrEnum):
    """A memory tier that can hold an adapter."""

    UNSPECIFIED = "unspecified"  # a tier this SDK does not know
    STORE = "store"
    HOST_CACHE = "host_cache"
    ARENA = "arena"


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """One place where an adapter's active version lies."""

    tier: AdapterTier
    worker_id: str  # for ARENA; empty otherwise


class AdapterEventKind(enum.StrEnum):
    """What a watch reports."""

    UNSPECIFIED = "unspecified"  # an event that this SDK does not know
    RESYNC = "resync"  # what was known is not valid any more: a snapshot follows, as PRESENT events
    SYNCED = "synced"  # the snapshot is complete; also, now and then, where nothing happened
    PRESENT = "present"  # the adapter is there: part of a snapshot
    CREATED = "created"  # it is new, or new to the caller
    VERSION_ADDED = "version_added"
    VERSION_ACTIVATED = "version_activated"
    VERSION_DELETED = "version_deleted"
    UPDATED = "updated"
    DELETED = "deleted"  # it is gone, or the caller may not see it any more
    MOVED = "moved"  # its active version is in other places than before


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """One event of a watch."""

    kind: AdapterEventKind
    adapter_id: str = ""  # empty for RESYNC and SYNCED
    adapter: Adapter | None = None  # after the change; None for RESYNC, SYNCED, DELETED and MOVED
    digest: str = ""  # of the version, for MOVED
    placements: tuple[AdapterPlacement, ...] = ()  # all places of it, for MOVED
    reason: str = ""  # for people, with RESYNC
    resume_token: str = ""  # continues the watch after this event; empty within a snapshot


class ResidencyOutcome(enum.StrEnum):
    """What became of a version in one place, after a load or an unload."""

    UNSPECIFIED = "unspecified"  # an outcome this SDK does not know
    LOADED = "loaded"  # it is there now
    WAS_LOADED = "was_loaded"  # it was there already; callers without the role "admin" get LOADED
    LOADING = "loading"  # the time to wait is over, and the load goes on
    NO_ROOM = "no_room"  # there is no room beside what is used or pinned
    FAILED = "failed"  # the load failed, or the worker cannot have it; `reason` says why
    UNLOADED = "unloaded"  # it is not there any more
    WAS_ABSENT = "was_absent"  # it was not there
    IN_USE = "in_use"  # requests use it: it leaves with the last of them, unless another one comes
    PINNED = "pinned"  # a pin keeps it there


@dataclass(frozen=True, slots=True)
class Residency:
    """What became of a version in one place, after a load or an unload."""

    tier: AdapterTier
    worker_id: str  # for ARENA; empty for callers without the role "admin", who get one result for all workers
    outcome: ResidencyOutcome
    missing_bytes: int = 0  # of NO_ROOM: how many bytes of the arena more would have to be free; for admins only
    reason: str = ""  # for people


class SignatureMethod(enum.StrEnum):
    """What a signer's identity rests on."""

    UNSPECIFIED = "unspecified"  # a method this SDK does not know
    KEY = "key"  # a public key that the operator trusts
    CERTIFICATE = "certificate"  # a certificate below one that the operator trusts


@dataclass(frozen=True, slots=True)
class VersionSignature:
    """A signature that was valid when the files of a version were registered."""

    signer: str  # how the operator names the trusted key or certificate
    method: SignatureMethod
    key_fingerprint: str  # SHA-256 of the signing key's SubjectPublicKeyInfo, 64 lower-case hexadecimal digits
    verify_time: datetime | None  # UTC
    subject: str = ""  # of the signing certificate; empty for a key


@dataclass(frozen=True, slots=True)
class AdapterCanary:
    """A version that gets a share of the new requests which name no version."""

    digest: str
    per_mille: int  # the share, in thousandths


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable version of an adapter."""

    digest: str  # 64 lower-case hexadecimal digits
    kind: str  # "lora", "rslora", "dora" or "rsdora"
    max_rank: int
    dtype: str
    size_bytes: int
    target_modules: tuple[str, ...]  # filled by get() and register() only
    create_time: datetime | None  # UTC
    number: int = 0  # counts the versions of the name from 1; 0: the server does not number them
    signature: VersionSignature | None = None  # None: the files had none, or the server trusts no signers
    version_labels: tuple[str, ...] = ()  # that point to it; filled by versions() only
    source: str = ""  # where the server read its files, with the commit on a Hub; empty: they were uploaded
    context_length: int = 0  # tokens that its own rotary embedding was trained for; 0: it has the base model's
    vocab_size: int | None = None  # tokens of its own vocabulary; None: the base model's
    num_rows: int = 0  # rows of embedding and head that it replaces or adds
    files: tuple[str, ...] = ()  # what it has of its own: "chat_template", "generation_config", "tokenizer"
    verification: VersionVerification | None = None  # the last one; None: there was none
    num_labels: int = 0  # of its score head; 0: it has none, and classify() cannot use it
    class_labels: tuple[str, ...] = ()  # those labels; filled by get() and register() only
    alora_invocation_tokens: tuple[int, ...] = ()  # it acts from their last place in a prompt on; empty: on all tokens
    warnings: tuple[str, ...] = ()  # what its owner should know, such as another base model in its configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRollout:
    """How a version is rolled out when it is registered."""

    keep_active: bool = False  # the active version stays active; the first version of a name becomes active anyway
    canary_per_mille: int = 0  # the version becomes the canary with this share, in thousandths; implies keep_active
    version_labels: tuple[str, ...] = ()  # labels that point to the version from then on
    keep_versions: int | None = None  # how many of the newest versions are kept from then on; 0: all; None: as it is
    ttl_s: float | None = None  # seconds from the registration to the deletion of the adapter; None: as it is
    hold: bool = False  # the version does not become active, also where none is; without a canary and version labels


class RegistrationChange(enum.StrEnum):
    """What registering changed."""

    UNSPECIFIED = "unspecified"  # a change this SDK does not know
    CREATED = "created"  # the name is new
    VERSION_ADDED = "version_added"  # other bytes under a known name: a new version, active now
    VERSION_ACTIVATED = "version_activated"  # a known version that was not active, or not served, is active again
    NONE = "none"  # the version was active already
    VERSION_SIGNED = "version_signed"  # the version was active already, and has another signature
    VERSION_STAGED = "version_staged"  # the version is there, and another one stays active


@dataclass(frozen=True, slots=True)
class Registration:
    """What registering an adapter changed, or would change with `validate_only`."""

    change: RegistrationChange
    previous_version: AdapterVersion | None  # active before; None if the name is new
    version: AdapterVersion | None = None  # that the files are


@dataclass(frozen=True, slots=True)
class Adapter:
    """A named LoRA fine-tune of the base model."""

    id: str  # without the "adapters/" prefix
    uid: str  # of this registration of the name
    display_name: str
    labels: Mapping[str, str]
    state: AdapterState
    state_reason: str  # for people; empty when active
    active_version: AdapterVersion | None  # what new requests get
    pinned: bool
    placements: tuple[AdapterPlacement, ...]  # filled by get() and pin() only, and in full for admins only
    create_time: datetime | None  # UTC
    update_time: datetime | None  # UTC
    etag: str  # give it back to make a change conditional
    registration: Registration | None = None  # filled by register() and register_from_root() only
    owner: str = ""  # tenant that it belongs to; empty: no tenant's
    visibility: AdapterVisibility = AdapterVisibility.UNSPECIFIED
    shared_with: tuple[str, ...] = ()  # tenants, if it is SHARED; filled for its owner and for admins only
    version_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # label to digest
    canary: AdapterCanary | None = None
    keep_versions: int = 0  # how many of the newest versions are kept; 0: all
    expire_time: datetime | None = None  # when the server deletes it, UTC; None: never
    previous_digests: tuple[str, ...] = ()  # versions that were active before, the latest first


@dataclass(frozen=True, slots=True)
class VersionVerification:
    """Served log-probabilities of a version against those of merged float32 weights."""

    passed: bool  # largest_error <= tolerance
    tolerance: float  # natural logarithm, as the following ones
    largest_error: float
    largest_effect: float  # what the adapter changes; not above the tolerance: these prompts show nothing
    num_prompts: int
    num_logprobs: int  # that were compared
    verify_time: datetime | None  # UTC
    duration_s: float


@dataclass(frozen=True, slots=True)
class PushedVersion:
    """What a push gave. Times are the server's, in seconds."""

    adapter: Adapter
    num_workers: int  # that had the version on their device when new requests got it; 0 for callers that are not admins
    receive_s: float  # from the header to the last byte
    pack_s: float  # checking, converting, hashing
    cache_s: float  # writing to the host cache, where several workers load it from there; else about 0
    load_s: float  # loading onto devices
    visible_s: float  # from the header until new requests got the version
    durable_s: float  # from the header until the version was durable
    files_from: str = ""  # digest of the version whose tokenizer additions, template and defaults it has; empty: none


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The system at one moment."""

    server_version: str
    model: ModelStatus
    workers: tuple[WorkerStatus, ...]
    queues: QueueStatus
    adapters: AdapterStatus
    limits: LimitStatus
    tenants: tuple[TenantStatus, ...] = ()  # the busiest of those that sent requests lately, by name
    num_other_tenants: int = 0  # those that are not among them
    own_tenant_only: bool = False  # without the role admin: no workers, queues and tiers, and one tenant
    drained_worker_ids: tuple[str, ...] = ()  # attached or not, in order
    active_adapters: tuple[ActiveAdapterStatus, ...] = ()  # with most unfinished requests, busiest first
    num_other_active_adapters: int = 0  # with unfinished requests, that are not among them
    audit: AuditStatus | None = None  # not there without the role "admin"
