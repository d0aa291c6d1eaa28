"""Turns messages of the protocol into the SDK's dataclasses. The only place that knows both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from motet import types
from motet.adapters.uses import uses_from
from motet.errors import invalid_field
from motet.requests import enum_choices
from motet.v1 import adapters_pb2, generation_pb2, push_pb2, status, status_pb2, types_pb2
from motet.v1.sampling import SamplingInEffect

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    _Plain = TypeVar("_Plain", bound=DataclassInstance)

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_LENGTH: types.FinishReason.LENGTH,
    types_pb2.FINISH_REASON_STOP_TOKEN: types.FinishReason.STOP_TOKEN,
    types_pb2.FINISH_REASON_STOP_STRING: types.FinishReason.STOP_STRING,
}
_STATES = {
    adapters_pb2.ADAPTER_STATE_ACTIVE: types.AdapterState.ACTIVE,
    adapters_pb2.ADAPTER_STATE_DELETING: types.AdapterState.DELETING,
    adapters_pb2.ADAPTER_STATE_FAILED: types.AdapterState.FAILED,
}
_VISIBILITIES = {
    adapters_pb2.ADAPTER_VISIBILITY_PRIVATE: types.AdapterVisibility.PRIVATE,
    adapters_pb2.ADAPTER_VISIBILITY_SHARED: types.AdapterVisibility.SHARED,
    adapters_pb2.ADAPTER_VISIBILITY_PUBLIC: types.AdapterVisibility.PUBLIC,
}
_MESSAGE_BY_VISIBILITY = {visibility: message for message, visibility in _VISIBILITIES.items()}
_CHANGES = {
    adapters_pb2.REGISTRATION_CHANGE_CREATED: types.RegistrationChange.CREATED,
    adapters_pb2.REGISTRATION_CHANGE_VERSION_ADDED: types.RegistrationChange.VERSION_ADDED,
    adapters_pb2.REGISTRATION_CHANGE_VERSION_ACTIVATED: types.RegistrationChange.VERSION_ACTIVATED,
    adapters_pb2.REGISTRATION_CHANGE_NONE: types.RegistrationChange.NONE,
    adapters_pb2.REGISTRATION_CHANGE_VERSION_SIGNED: types.RegistrationChange.VERSION_SIGNED,
    adapters_pb2.REGISTRATION_CHANGE_VERSION_STAGED: types.RegistrationChange.VERSION_STAGED,
}
_METHODS = {
    adapters_pb2.SIGNATURE_METHOD_KEY: types.SignatureMethod.KEY,
    adapters_pb2.SIGNATURE_METHOD_CERTIFICATE: types.SignatureMethod.CERTIFICATE,
}
_TIERS = {
    adapters_pb2.ADAPTER_TIER_STORE: types.AdapterTier.STORE,
    adapters_pb2.ADAPTER_TIER_HOST_CACHE: types.AdapterTier.HOST_CACHE,
    adapters_pb2.ADAPTER_TIER_ARENA: types.AdapterTier.ARENA,
}


_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingInEffect))


def _sampling_value(sampling: types_pb2.SamplingParams, name: str) -> Any:
    """The value of a field as callers give it: an enum by name."""
    value, enum = getattr(sampling, name), sampling.DESCRIPTOR.fields_by_name[name].enum_type
    if enum is None:
        return value
    names = {number: choice for choice, number in enum_choices(enum).items()}
    return names.get(value, str(value))  # a newer server may know more


def started_from(message: generation_pb2.GenerationStarted) -> types.Started:
    """What the server made of a request."""
    sampling, decoding = message.sampling, message.decoding
    beams = decoding.beam_search
    return types.Started(
        request_id=message.request_id,
        adapter=message.adapter,
        adapter_digest=message.adapter_digest,
        adapters=uses_from(message),
        lora_task_id=message.lora_task_id if message.HasField("lora_task_id") else None,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        queue_time_s=_seconds(message.queue_time),
        max_tokens=message.stopping.max_tokens,
        min_tokens=message.stopping.min_tokens,
        n=decoding.n or 1,
        best_of=decoding.best_of or 1,
        beam_search=(
            types.BeamSearch(beams.width, beams.length_penalty, beams.early_stopping)
            if decoding.HasField("beam_search")
            else None
        ),
        tenant=message.tenant,
        model_fingerprint=message.model_fingerprint,
        prompt_sha256=message.prompt_sha256,
        render_time=_time(message.render_time),
        prompt_logprobs=logprobs_from(message.prompt_logprobs),
        **{name: _sampling_value(sampling, name) for name in _SAMPLING if sampling.HasField(name)},
    )


def logprobs_from(messages: Iterable[types_pb2.TokenLogprobs]) -> tuple[types.TokenLogprobs, ...]:
    """Log-probabilities, token by token."""
    return tuple(
        types.TokenLogprobs(
            returned.token_id,
            returned.logprob,
            returned.rank,
            tuple(types.TokenLogprob(each.token_id, each.logprob, each.token) for each in returned.top),
            returned.token,
        )
        for returned in messages
    )


def finished_from(message: generation_pb2.GenerationFinished) -> types.Finished:
    """How one completion ended."""
    return types.Finished(
        finish_reason=_FINISH_REASONS.get(message.reason, types.FinishReason.UNSPECIFIED),
        stop_string=message.stop_string,
        usage=types.Usage(
            prompt_tokens=message.usage.prompt_tokens,
            cached_tokens=message.usage.cached_tokens,
            completion_tokens=message.usage.completion_tokens,
        ),
        timings=types.Timings(
            queue_time_s=_seconds(message.timings.queue_time),
            time_to_first_token_s=_seconds(message.timings.time_to_first_token),
            total_time_s=_seconds(message.timings.total_time),
        ),
        seed=message.seed,
        index=message.index,
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        score=message.score if message.HasField("score") else None,
    )


def adapter_from(message: adapters_pb2.Adapter) -> types.Adapter:
    """One adapter."""
    return types.Adapter(
        id=message.name.removeprefix("adapters/"),
        uid=message.uid,
        display_name=message.display_name,
        labels=MappingProxyType(dict(message.labels)),
        state=_STATES.get(message.state, types.AdapterState.UNSPECIFIED),
        state_reason=message.state_reason,
        active_version=version_from(message.active_version) if message.HasField("active_version") else None,
        pinned=message.pinned,
        placements=placements_from(message.placements),
        create_time=_time(message.create_time),
        update_time=_time(message.update_time),
        etag=message.etag,
        registration=_registration_from(message.registration) if message.HasField("registration") else None,
        owner=message.owner,
        visibility=_VISIBILITIES.get(message.visibility, types.AdapterVisibility.UNSPECIFIED),
        shared_with=tuple(message.shared_with),
        version_labels=MappingProxyType(dict(message.version_labels)),
        canary=(
            types.AdapterCanary(message.canary.digest, message.canary.per_mille) if message.HasField("canary") else None
        ),
        keep_versions=message.keep_versions,
        expire_time=_time(message.expire_time),
        previous_digests=tuple(message.previous_digests),
    )


def placements_from(messages: Iterable[adapters_pb2.AdapterPlacement]) -> tuple[types.AdapterPlacement, ...]:
    """Where a version lies."""
    return tuple(
        types.AdapterPlacement(_TIERS.get(place.tier, types.AdapterTier.UNSPECIFIED), place.worker_id)
        for place in messages
    )


def visibility_message(visibility: types.AdapterVisibility | str | None) -> adapters_pb2.AdapterVisibility:
    """The visibility as the protocol has it; None is unset. Raises InvalidArgument."""
    if visibility is None:
        return adapters_pb2.ADAPTER_VISIBILITY_UNSPECIFIED
    for known, message in _MESSAGE_BY_VISIBILITY.items():
        if known == visibility:
            return message
    values = ", ".join(repr(known.value) for known in _MESSAGE_BY_VISIBILITY)
    raise invalid_field("visibility", f"is {str(visibility)!r}; use one of {values}")


def rollout_message(rollout: types.VersionRollout | None) -> adapters_pb2.VersionRollout | None:
    """The rollout as the protocol has it. Raises InvalidArgument for what the wire cannot carry."""
    if rollout is None:
        return None
    message = adapters_pb2.VersionRollout(
        keep_active=rollout.keep_active, version_labels=rollout.version_labels, hold=rollout.hold
    )
    try:
        message.canary_per_mille = rollout.canary_per_mille
        if rollout.keep_versions is not None:
            message.keep_versions = rollout.keep_versions
        if rollout.ttl_s is not None:
            message.ttl.FromMicroseconds(round(rollout.ttl_s * 1e6))
    except (ValueError, OverflowError) as error:
        raise invalid_field("rollout", f"holds a number that cannot be sent: {error}") from error
    return message


def _registration_from(message: adapters_pb2.Registration) -> types.Registration:
    return types.Registration(
        change=_CHANGES.get(message.change, types.RegistrationChange.UNSPECIFIED),
        previous_version=version_from(message.previous_version) if message.HasField("previous_version") else None,
        version=version_from(message.version) if message.HasField("version") else None,
    )


def pushed_from(message: push_pb2.PushVersionResponse) -> types.PushedVersion:
    """What a push gave."""
    timings = message.timings
    return types.PushedVersion(
        adapter=adapter_from(message.adapter),
        num_workers=message.num_workers,
        receive_s=_seconds(timings.receive_time),
        pack_s=_seconds(timings.pack_time),
        cache_s=_seconds(timings.cache_time),
        load_s=_seconds(timings.load_time),
        visible_s=_seconds(timings.visible_time),
        durable_s=_seconds(timings.durable_time),
        files_from=message.files_from,
    )


def version_from(message: adapters_pb2.AdapterVersion) -> types.AdapterVersion:
    """One version of an adapter."""
    return types.AdapterVersion(
        digest=message.digest,
        kind=message.kind,
        max_rank=message.max_rank,
        dtype=message.dtype,
        size_bytes=message.size_bytes,
        target_modules=tuple(message.target_modules),
        create_time=_time(message.create_time),
        number=message.number,
        signature=_signature_from(message.signature) if message.HasField("signature") else None,
        version_labels=tuple(message.version_labels),
        context_length=message.context_length,
        source=message.source,
        alora_invocation_tokens=tuple(message.alora_invocation_tokens),
        vocab_size=message.vocab_size or None,
        num_rows=message.num_rows,
        num_labels=message.num_labels,
        class_labels=tuple(message.class_labels),
        files=tuple(message.files),
        warnings=tuple(message.warnings),
        verification=_verification_from(message.verification) if message.HasField("verification") else None,
    )


def _verification_from(message: adapters_pb2.VersionVerification) -> types.VersionVerification:
    return types.VersionVerification(
        passed=message.verdict == adapters_pb2.VERIFICATION_VERDICT_PASSED,
        tolerance=message.tolerance,
        largest_error=message.largest_error,
        largest_effect=message.largest_effect,
        num_prompts=message.num_prompts,
        num_logprobs=message.num_logprobs,
        verify_time=_time(message.verify_time),
        duration_s=message.duration_s,
    )


def _signature_from(message: adapters_pb2.VersionSignature) -> types.VersionSignature:
    return types.VersionSignature(
        signer=message.signer,
        method=_METHODS.get(message.method, types.SignatureMethod.UNSPECIFIED),
        key_fingerprint=message.key_fingerprint,
        verify_time=_time(message.verify_time),
        subject=message.subject,
    )


def status_from(message: status_pb2.GetStatusResponse) -> types.ServerStatus:
    """The system at one moment."""
    return types.ServerStatus(
        server_version=message.server_version,
        model=_same_fields(status.ModelStatus, message.model),
        workers=tuple(_same_fields(status.WorkerStatus, worker) for worker in message.workers),
        queues=_same_fields(status.QueueStatus, message.queues),
        adapters=_same_fields(status.AdapterStatus, message.adapters),
        limits=_same_fields(status.LimitStatus, message.limits),
        tenants=tuple(_same_fields(status.TenantStatus, tenant) for tenant in message.tenants),
        num_other_tenants=message.num_other_tenants,
        own_tenant_only=message.own_tenant_only,
        drained_worker_ids=tuple(message.drained_worker_ids),
        active_adapters=tuple(_same_fields(status.ActiveAdapterStatus, each) for each in message.active_adapters),
        num_other_active_adapters=message.num_other_active_adapters,
        audit=_same_fields(status.AuditStatus, message.audit) if message.HasField("audit") else None,
    )


def _same_fields(plain: type[_Plain], message: Any) -> _Plain:
    """A dataclass whose fields are named and typed as the message's; None for an optional one that is not set."""
    unset = {
        field.name
        for field in message.DESCRIPTOR.fields
        if field.has_presence and field.message_type is None and not message.HasField(field.name)
    }
    names = [field.name for field in dataclasses.fields(plain)]
    return plain(**{name: None if name in unset else getattr(message, name) for name in names})


def _seconds(duration: Duration) -> float:
    return duration.ToTimedelta().total_seconds()


def _time(timestamp: Timestamp) -> datetime | None:
    if not timestamp.seconds and not timestamp.nanos:
        return None
    return timestamp.ToDatetime(tzinfo=UTC)
