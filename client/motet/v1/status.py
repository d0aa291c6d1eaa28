"""What a status says of the model, workers, queues, adapters, tenants, limits and the audit log.

Written by protos/generate.py from protos/motet/v1/status.proto: change that file instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """The base model."""

    name: str  # Last part of the checkpoint directory's name
    fingerprint: str  # Fingerprint of the checkpoint, 64 lower-case hexadecimal digits
    vocab_size: int  # Vocabulary size, a count of tokens
    max_model_len: int  # Longest context, prompt and completion together, a count of tokens: the longest of the attached workers, or of those that were attached last, and at most --max-model-len and the checkpoint's. 0: not known before a worker attached
    dtype: str  # Element type of the weights: "float32", "bfloat16" or "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker."""

    worker_id: str  # Its id
    device: str  # Device it runs on, for people
    epoch: int  # Fencing token of its session, counts up from 1
    num_steps: int  # Steps executed in this session, a count
    num_plans_in_flight: int  # Plans in flight, a count
    num_running: int  # Requests being computed, a count
    num_waiting: int  # Requests waiting for this worker, a count
    num_blocks: int  # KV blocks in all, a count
    num_blocks_held: int  # KV blocks held by requests, a count
    num_blocks_cached: int  # KV blocks that hold reusable prefixes and nobody's request, a count
    block_size: int  # Tokens of one KV block, a count
    arena_bytes: int  # Adapter arena, bytes
    arena_used_bytes: int  # Adapter arena in use, bytes
    num_adapters_loaded: int  # Adapters in the arena, a count
    prefix_query_tokens: int  # Prompt tokens looked up in the prefix cache, a count
    prefix_hit_tokens: int  # Prompt tokens found there, a count
    num_preemptions: int  # Preemptions, a count
    num_tokens_sampled: int  # Tokens sampled, a count
    step_time_ms: float  # Mean duration of the last steps, milliseconds
    resident_bytes: int  # Resident memory of the worker process, bytes
    num_plans: int  # Plans sent, a count; fewer than steps where a plan stands for several
    max_plan_steps: int  # Steps that a plan may stand for at present, a count
    round_trip_ms: float  # Median time to the worker and back, milliseconds; 0 before it was measured
    num_swapped: int  # Requests whose KV blocks lie in host memory, a count; waiting ones too
    num_swapped_out: int  # Preemptions by swap to host memory, a count
    num_host_blocks: int  # KV blocks in host memory in all, a count
    num_host_blocks_held: int  # Those in use, a count
    max_model_len: int  # Longest context that this worker computes, a count of tokens
    memory_bytes: int  # Memory of its device, bytes; on the CPU the machine's, or the container's; 0: the worker did not report it
    weights_bytes: int  # Memory taken once the checkpoint was loaded, bytes; on the CPU by the whole process
    step_memory_bytes: int  # Memory that the largest step takes while it runs, bytes; 0: not measured, because the KV blocks were named
    kv_bytes: int  # KV blocks, bytes
    host_kv_bytes: int  # KV blocks in host memory, bytes
    graph_bytes: int  # Captured graphs, bytes
    headroom_bytes: int  # Memory left free on purpose, bytes
    pinned_bytes: int  # At most so much host memory for adapters that were loaded lately, beside the arena, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """Requests in the system."""

    num_requests: int  # Accepted and not finished, a count
    num_waiting: int  # Waiting to run, a count
    num_running: int  # Being computed, a count
    num_accepted: int  # Accepted since start, a count
    num_finished: int  # Finished since start, a count
    num_rejected: int  # Refused because a queue was full since start, a count
    num_migrated: int  # Moved to another worker or session since start, a count


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAdapterStatus:
    """One adapter that requests use at present."""

    adapter: str  # Its id, of several names the first; empty for the base model, and for weights without a name
    digest: str  # Digest of the version, 64 lower-case hexadecimal digits; empty for the base model
    num_running: int  # Requests in the workers' batches, a count
    num_waiting: int  # Requests that wait, a count


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """Adapters by tier."""

    num_registered: int  # Names registered, a count
    num_stored: int  # Distinct digests in the artifact store, a count
    num_host_cached: int  # Digests in the host cache, a count
    host_cache_bytes: int  # Bytes in the host cache
    host_cache_budget_bytes: int  # Budget of the host cache, bytes
    host_cache_available: bool  # Whether the host cache responds
    host_cache_error: str  # Why the host cache does not respond, for people; empty when it does


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """One tenant: what it is granted, and what it uses."""

    tenant: str  # Its name. Without authentication, tenants that the operator does not name are counted by the client's host, which is the name here: "ipv4:10.0.0.7", or "ipv6:2001:db8::/64"
    weight: float  # Share of service against the other tenants' weights, while several wait, no unit
    num_requests: int  # Accepted and not finished, a count
    max_running_requests: int | None  # Most of them at once, a count; unset: no limit. Beyond any of these limits: RESOURCE_EXHAUSTED
    num_queued_tokens: int  # Prompt tokens of those that have no generated token yet, a count
    max_queued_tokens: int | None  # Most of them at once, a count; unset: no limit
    num_tokens_left: int | None  # Prompt and generated tokens that may be requested at once, a count; set where tokens_per_minute is
    tokens_per_minute: int | None  # How many are added every minute, and the most that are saved up, a count; unset: no limit
    num_accepted: int  # Accepted since the tenant is known, a count, like those below
    num_rejected: int  # Refused because of one of these limits, a count
    num_input_tokens: int  # Prompt tokens of finished requests, a count, cached ones included
    num_generated_tokens: int  # Generated tokens of finished requests, a count, those of samples that were not returned included
    num_requests_left: int | None  # Requests that may be sent at once, a count; set where requests_per_minute is
    requests_per_minute: int | None  # How many are added every minute, and the most that are saved up, a count; unset: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditStatus:
    """The audit log."""

    is_on: bool  # Whether there is one
    num_lines: int  # Lines since the start, a count
    num_lost: int  # Records of generations and refusals that were not written since the start, a count
    error: str  # Why the log cannot be written at present, for people; empty when it can. Changes are refused meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitStatus:
    """Limits a client may meet."""

    max_waiting_requests: int  # Most requests waiting, a count; beyond: RESOURCE_EXHAUSTED
    max_adapter_bytes: int  # Largest upload, bytes
    max_chunk_bytes: int  # Largest chunk of an upload, bytes
