"""From an EmbedRequest or a ClassifyRequest to checked, plain values. Nothing is tokenised here."""

from __future__ import annotations

from dataclasses import dataclass

from motet.v1 import pooling_pb2

from contract.sampling import MAX_PRIORITY
from control_plane.api.generation.request import MAX_CACHE_SALT_BYTES, checked_token_ids
from control_plane.api.text.length_bound import prompt_too_long
from control_plane.checks import Violations, check_digest, check_request_id
from control_plane.registry.versions.version_names import VersionName, version_name_of
from control_plane.scheduler.types import PoolingKind

MAX_INPUTS = 64
KINDS = {
    pooling_pb2.POOLING_UNSPECIFIED: PoolingKind.LAST,
    pooling_pb2.POOLING_LAST: PoolingKind.LAST,
    pooling_pb2.POOLING_MEAN: PoolingKind.MEAN,
    pooling_pb2.POOLING_FIRST: PoolingKind.FIRST,
}

AnyRequest = pooling_pb2.EmbedRequest | pooling_pb2.ClassifyRequest


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """What both calls have in common, well formed."""

    client_request_id: str  # may be empty
    adapter: VersionName  # with an empty id: the base model
    adapter_digest: str  # names the version where `adapter` does not
    inputs: tuple[str | tuple[int, ...], ...]  # text or token ids
    cache_salt: bytes
    priority: int

    @property
    def names_version(self) -> bool:
        """Whether the client names one version of the adapter."""
        return bool(self.adapter.selector or self.adapter_digest)


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What only Embed has."""

    kind: PoolingKind
    is_normalized: bool
    dimensions: int | None  # None: all


def check_call(request: AnyRequest, violations: Violations, *, vocab_size: int, max_model_len: int) -> CheckedCall:
    """The common fields. Adds a violation for everything that is wrong.

    Raises ContextTooLong, before it looks at anything else, where an input has more token ids than the context takes.
    """
    num_inputs = len(request.inputs)
    for index, each in enumerate(request.inputs if num_inputs <= MAX_INPUTS else ()):
        if len(each.token_ids.ids) >= max_model_len:
            field, what = f"inputs[{index}].token_ids", f"{len(each.token_ids.ids)} tokens"
            raise prompt_too_long(field, what, max_model_len)
    check_request_id(request.request_id, "request_id", violations)
    adapter = VersionName("")
    if request.adapter:
        adapter = version_name_of(request.adapter, request.adapter_digest, "adapter", violations)
    if request.adapter_digest:
        check_digest(request.adapter_digest, "adapter_digest", violations)
        if not request.adapter:
            violations.add("adapter_digest", "is set without adapter; name the adapter too")
    if (num_bytes := len(request.cache_salt.encode())) > MAX_CACHE_SALT_BYTES:
        violations.add("cache_salt", f"has {num_bytes} bytes; use at most {MAX_CACHE_SALT_BYTES}")
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        violations.add("priority", f"is {request.priority}; give a value from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    if request.model_fingerprint:
        check_digest(request.model_fingerprint, "model_fingerprint", violations)
    inputs: tuple[str | tuple[int, ...], ...] = ()
    if not 1 <= num_inputs <= MAX_INPUTS:
        violations.add("inputs", f"has {num_inputs} inputs; give 1 to {MAX_INPUTS}")
    else:
        inputs = tuple(
            _checked_input(each, f"inputs[{index}]", vocab_size, violations)
            for index, each in enumerate(request.inputs)
        )
    return CheckedCall(
        client_request_id=request.request_id,
        adapter=adapter,
        adapter_digest=request.adapter_digest,
        inputs=inputs,
        cache_salt=request.cache_salt.encode(),
        priority=request.priority,
    )


def check_embed(request: pooling_pb2.EmbedRequest, violations: Violations) -> EmbedOptions:
    """The fields that only Embed has. Adds a violation for everything that is wrong."""
    kind = KINDS.get(request.pooling)
    if kind is None:
        violations.add("pooling", f"is {request.pooling}, which is not a pooling; use LAST, MEAN or FIRST")
    if request.HasField("dimensions") and request.dimensions < 1:
        violations.add("dimensions", f"is {request.dimensions}; give at least 1, or leave it unset for all")
    return EmbedOptions(
        kind=kind or PoolingKind.LAST,
        is_normalized=request.normalize if request.HasField("normalize") else True,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
    )


def check_classify(request: pooling_pb2.ClassifyRequest, violations: Violations) -> None:
    """The fields that only Classify has. Adds a violation for everything that is wrong."""
    if not request.adapter:
        violations.add("adapter", "is empty; name an adapter with a score head: the base model has no classes")
    if request.problem_type not in pooling_pb2.ProblemType.values():
        violations.add(
            "problem_type",
            f"is {request.problem_type}, which is not a problem type; use SINGLE_LABEL, MULTI_LABEL or REGRESSION",
        )


def _checked_input(
    each: pooling_pb2.PoolingInput, field: str, vocab_size: int, violations: Violations
) -> str | tuple[int, ...]:
    kind = each.WhichOneof("input")
    if kind == "text":
        if not each.text:
            violations.add(f"{field}.text", "is empty; an input needs at least one token")
        return each.text
    if kind is None:
        violations.add(field, "is not set; send one of text and token_ids")
        return ""
    if not each.token_ids.ids:
        violations.add(f"{field}.token_ids.ids", "is empty; an input needs at least one token")
    return checked_token_ids(each.token_ids.ids, f"{field}.token_ids.ids", vocab_size, violations)
