"""Loads and unloads of adapters, as calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from motet.adapters.rollouts import duration_of
from motet.calls import UnaryCall, resource_name
from motet.errors import invalid_field
from motet.types import AdapterTier, Residency, ResidencyOutcome
from motet.v1 import adapters_pb2, residency_pb2

CALL_S = 30.0  # for a call beside the time that the server may wait
_SERVICE = "/motet.v1.AdapterResidencyService/"
_TIERS = {
    AdapterTier.HOST_CACHE: adapters_pb2.ADAPTER_TIER_HOST_CACHE,
    AdapterTier.ARENA: adapters_pb2.ADAPTER_TIER_ARENA,
}
_TIER_BY_MESSAGE = {message: tier for tier, message in _TIERS.items()}
_OUTCOMES = {getattr(residency_pb2, f"RESIDENCY_OUTCOME_{outcome.name}"): outcome for outcome in ResidencyOutcome}


def load_adapter(
    name: str, digest: str, tier: AdapterTier | str, worker_ids: Sequence[str], wait_s: float
) -> UnaryCall[tuple[Residency, ...]]:
    request = residency_pb2.LoadAdapterRequest(
        name=resource_name(name), digest=digest, tier=_tier(tier), worker_ids=worker_ids, wait=_wait(wait_s)
    )
    return UnaryCall(_SERVICE + "LoadAdapter", request, residency_pb2.LoadAdapterResponse, _results, is_repeatable=True)


def unload_adapter(
    name: str, digest: str, tier: AdapterTier | str, worker_ids: Sequence[str], wait_s: float
) -> UnaryCall[tuple[Residency, ...]]:
    request = residency_pb2.UnloadAdapterRequest(
        name=resource_name(name), digest=digest, tier=_tier(tier), worker_ids=worker_ids, wait=_wait(wait_s)
    )
    return UnaryCall(
        _SERVICE + "UnloadAdapter", request, residency_pb2.UnloadAdapterResponse, _results, is_repeatable=True
    )


def _results(response: Any) -> tuple[Residency, ...]:
    return tuple(
        Residency(
            tier=_TIER_BY_MESSAGE.get(result.tier, AdapterTier.UNSPECIFIED),
            worker_id=result.worker_id,
            outcome=_OUTCOMES.get(result.outcome, ResidencyOutcome.UNSPECIFIED),
            missing_bytes=result.missing_bytes,
            reason=result.reason,
        )
        for result in response.results
    )


def _tier(tier: AdapterTier | str) -> adapters_pb2.AdapterTier:
    for known, message in _TIERS.items():
        if known == tier:
            return message
    values = ", ".join(repr(known.value) for known in _TIERS)
    raise invalid_field("tier", f"is {str(tier)!r}; use one of {values}")


def _wait(wait_s: float) -> Any:
    if wait_s < 0:  # the call would have no time itself, and end with DEADLINE_EXCEEDED
        raise invalid_field("wait", f"is {wait_s!r} seconds; give 0 or more")
    return duration_of(wait_s, "wait")
