"""Between the plain values of the control plane and the protobuf messages of the client port."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from motet.v1 import adapters_pb2, types_pb2

from control_plane.access.visibility import Visibility, may_change
from control_plane.adapters.life_cycle import Placements
from control_plane.api.rollout_fields import add_rollout
from control_plane.caller import current_caller
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, Registered
from control_plane.registry.versions.rollout import NO_ROLLOUT
from control_plane.registry.versions.verification import Verification
from control_plane.scheduler.types import FinishReason, TokenLogprobs
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict

MAX_PAGE_BYTES = 2 * 2**20  # at which a page ends: a gRPC client takes messages of up to 4 MiB by default
FINISH_REASONS = {
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
}
_VISIBILITIES = {
    Visibility.PRIVATE: adapters_pb2.ADAPTER_VISIBILITY_PRIVATE,
    Visibility.SHARED: adapters_pb2.ADAPTER_VISIBILITY_SHARED,
    Visibility.PUBLIC: adapters_pb2.ADAPTER_VISIBILITY_PUBLIC,
}
VISIBILITY_BY_MESSAGE = {message: visibility for visibility, message in _VISIBILITIES.items()}
_STATES = {
    AdapterState.ACTIVE: adapters_pb2.ADAPTER_STATE_ACTIVE,
    AdapterState.DELETING: adapters_pb2.ADAPTER_STATE_DELETING,
    AdapterState.FAILED: adapters_pb2.ADAPTER_STATE_FAILED,
}


_METHODS = {
    SignatureMethod.KEY: adapters_pb2.SIGNATURE_METHOD_KEY,
    SignatureMethod.CERTIFICATE: adapters_pb2.SIGNATURE_METHOD_CERTIFICATE,
}


def duration(seconds: float) -> duration_pb2.Duration:
    """A non-negative duration, to the microsecond."""
    message = duration_pb2.Duration()
    message.FromMicroseconds(max(round(seconds * 1e6), 0))
    return message


def timestamp(wall_s: float) -> timestamp_pb2.Timestamp:
    """A moment of the wall clock, to the microsecond."""
    message = timestamp_pb2.Timestamp()
    message.FromMicroseconds(round(wall_s * 1e6))
    return message


def add_logprobs(
    messages: RepeatedCompositeFieldContainer[types_pb2.TokenLogprobs],
    logprobs: Iterable[TokenLogprobs],
    spell: Callable[[int], bytes] | None = None,
) -> None:
    """Append log-probabilities to a repeated field, in place: twice as fast as messages that are copied into it.

    `spell`: the bytes of a token, where they are returned.
    """
    for entry in logprobs:
        message = messages.add(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)
        if spell is not None:
            message.token = spell(entry.token_id)
        add_top = message.top.add
        for token_id, logprob in entry.top:
            top = add_top(token_id=token_id, logprob=logprob)
            if spell is not None:
                top.token = spell(token_id)


def version_message(
    version: AdapterVersion, *, with_modules: bool = False, labels: Iterable[str] = ()
) -> adapters_pb2.AdapterVersion:
    return adapters_pb2.AdapterVersion(
        digest=version.digest,
        kind=version.kind,
        max_rank=version.max_rank,
        target_modules=version.target_modules if with_modules else (),
        dtype=version.dtype,
        size_bytes=version.size_bytes,
        create_time=timestamp(version.create_time_s),
        number=version.number,
        context_length=version.context_length,
        source=version.source,
        alora_invocation_tokens=version.alora_invocation_tokens,
        signature=None if version.signature is None else _signature_message(version.signature),
        class_labels=version.labels if with_modules else (),
        num_labels=len(version.labels),
        version_labels=labels,
        vocab_size=version.vocab_size,
        num_rows=version.num_rows,
        files=version.files,
        warnings=version.warnings,
        verification=None if version.verification is None else _verification_message(version.verification),
    )


def _verification_message(found: Verification) -> adapters_pb2.VersionVerification:
    passed, failed = adapters_pb2.VERIFICATION_VERDICT_PASSED, adapters_pb2.VERIFICATION_VERDICT_FAILED
    return adapters_pb2.VersionVerification(
        verdict=passed if found.is_passed else failed,
        tolerance=found.tolerance,
        largest_error=found.largest_error,
        largest_effect=found.largest_effect,
        num_prompts=found.num_prompts,
        num_logprobs=found.num_logprobs,
        verify_time=timestamp(found.verify_time_s),
        duration_s=found.duration_s,
    )


def _signature_message(verdict: SignatureVerdict) -> adapters_pb2.VersionSignature:
    return adapters_pb2.VersionSignature(
        signer=verdict.signer,
        method=_METHODS[verdict.method],
        key_fingerprint=verdict.key_fingerprint,
        verify_time=timestamp(verdict.verify_time_s),
        subject=verdict.subject,
    )


def adapter_message(
    record: AdapterRecord, *, with_modules: bool = False, placements: Placements | None = None
) -> adapters_pb2.Adapter:
    """The adapter for the caller: only those who may change it see with whom it is shared."""
    active, ownership, caller = record.active_version, record.ownership, current_caller()
    is_own = may_change(caller.principal, caller.tenant, ownership, record.adapter_id)
    message = adapters_pb2.Adapter(
        name=f"adapters/{record.adapter_id}",
        uid=record.uid,
        display_name=record.display_name,
        labels=dict(record.labels),
        state=_STATES[record.state],
        state_reason=record.state_reason,
        active_version=None if active is None else version_message(active, with_modules=with_modules),
        pinned=record.is_pinned,
        placements=() if placements is None else placement_messages(placements),
        create_time=timestamp(record.create_time_s),
        update_time=timestamp(record.update_time_s),
        etag=record.etag,
        owner=ownership.owner,
        visibility=_VISIBILITIES[ownership.visibility],
        shared_with=ownership.shared_with if is_own else (),
    )
    if record.rollout is not NO_ROLLOUT:
        add_rollout(message, record.rollout)
    return message


def placement_messages(placements: Placements) -> Iterator[adapters_pb2.AdapterPlacement]:
    """One message for each place."""
    if placements.is_stored:
        yield adapters_pb2.AdapterPlacement(tier=adapters_pb2.ADAPTER_TIER_STORE)
    if placements.is_host_cached:
        yield adapters_pb2.AdapterPlacement(tier=adapters_pb2.ADAPTER_TIER_HOST_CACHE)
    for worker_id in placements.worker_ids:
        yield adapters_pb2.AdapterPlacement(tier=adapters_pb2.ADAPTER_TIER_ARENA, worker_id=worker_id)


def registered_message(registered: Registered) -> adapters_pb2.Adapter:
    """The adapter with its modules, and what registering it changed."""
    message = adapter_message(registered.record, with_modules=True)
    message.registration.change = _change(registered)
    version = registered.record.version(registered.digest)
    if version is not None:
        message.registration.version.CopyFrom(version_message(version))
    previous = None if registered.previous is None else registered.previous.active_version
    if previous is not None:
        message.registration.previous_version.CopyFrom(version_message(previous))
    return message


def _change(registered: Registered) -> adapters_pb2.RegistrationChange:
    record, previous = registered.record, registered.previous
    if previous is None or not previous.versions:  # a record that could not be read is written again
        return adapters_pb2.REGISTRATION_CHANGE_CREATED
    if registered.digest != record.active_digest:
        return adapters_pb2.REGISTRATION_CHANGE_VERSION_STAGED
    is_active_already = record.active_digest == previous.active_digest and previous.state is AdapterState.ACTIVE
    if is_active_already and not registered.is_repaired:
        before, now = previous.active_version, record.active_version
        if before is not None and now is not None and before.signature != now.signature:
            return adapters_pb2.REGISTRATION_CHANGE_VERSION_SIGNED
        return adapters_pb2.REGISTRATION_CHANGE_NONE
    if any(version.digest == record.active_digest for version in previous.versions):
        return adapters_pb2.REGISTRATION_CHANGE_VERSION_ACTIVATED
    return adapters_pb2.REGISTRATION_CHANGE_VERSION_ADDED
