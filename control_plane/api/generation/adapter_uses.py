"""The adapters of a request: what the client names, which versions these are, and whether they can be combined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from motet.v1 import generation_pb2

from contract.plan_stream.plan_bounds import MAX_ROW_ADAPTERS
from control_plane.checks import Violations, check_digest, refuse
from control_plane.errors import FieldViolation, InvalidRequest
from control_plane.registry.records import AdapterVersion, ResolvedAdapter
from control_plane.registry.versions.version_names import version_name_of
from control_plane.scheduler.types import AdapterUse, Combination, Composition

MAX_SCALE = 100.0  # either sign

_COMBINATIONS = {
    generation_pb2.COMBINATION_UNSPECIFIED: Combination.CAT,
    generation_pb2.COMBINATION_CAT: Combination.CAT,
    generation_pb2.COMBINATION_LINEAR: Combination.LINEAR,
}


@dataclass(frozen=True, slots=True)
class CheckedUse:
    """One adapter that a request names."""

    adapter_id: str
    selector: str  # number or label of one of its versions; empty: none is named so
    digest: str  # names the version where `selector` does not
    scale: float

    @property
    def names_version(self) -> bool:
        """Whether the client names one version of the adapter."""
        return bool(self.selector or self.digest)


@dataclass(frozen=True, slots=True)
class CheckedUses:
    """The adapters that a request names in `adapters`, or the one in `adapter`; none: the base model."""

    uses: tuple[CheckedUse, ...] = ()
    combination: Combination = Combination.CAT
    is_list: bool = False  # they are in `adapters`
    task_id: int | None = None  # a LoRA task, instead of adapters
    task_digest: str = ""  # the weights that the task must have; empty: any


def check_uses(request: generation_pb2.GenerateRequest, violations: Violations) -> CheckedUses:
    """The adapters as plain values. Adds a violation for everything that is wrong with them."""
    if request.adapter_digest:
        check_digest(request.adapter_digest, "adapter_digest", violations)
        if not request.adapter and not request.HasField("lora_task_id"):
            violations.add("adapter_digest", "is set without adapter; name the adapter too")
    if request.HasField("lora_task_id"):
        for field in ("adapter", "adapters", "combination"):
            if getattr(request, field):
                violations.add("lora_task_id", f"is set together with {field}; name an adapter or a LoRA task")
        return CheckedUses(task_id=request.lora_task_id, task_digest=request.adapter_digest)
    if request.combination not in _COMBINATIONS:
        violations.add("combination", f"{request.combination} is not known; use CAT or LINEAR")
        return CheckedUses()
    if not request.adapters:
        if request.combination:
            violations.add("combination", "is set without adapters; name two or more")
        if not request.adapter:
            return CheckedUses()
        name = version_name_of(request.adapter, request.adapter_digest, "adapter", violations)
        return CheckedUses((CheckedUse(name.adapter_id, name.selector, request.adapter_digest, 1.0),))
    if request.adapter:
        violations.add("adapters", "is set together with adapter; name all of them in adapters")
    if len(request.adapters) > MAX_ROW_ADAPTERS:
        violations.add("adapters", f"has {len(request.adapters)} adapters; use at most {MAX_ROW_ADAPTERS}")
        return CheckedUses()
    if request.combination and len(request.adapters) == 1:
        violations.add("combination", "is set with one adapter; leave it unset, or name two or more")
    uses = tuple(_checked_use(use, f"adapters[{index}]", violations) for index, use in enumerate(request.adapters))
    combination = _COMBINATIONS[request.combination]
    for index, use in enumerate(uses):
        if use.adapter_id in [other.adapter_id for other in uses[:index]]:
            violations.add(f"adapters[{index}].name", f"names {use.adapter_id!r} again; {_once(combination)}")
    return CheckedUses(uses, combination, is_list=True)


def _once(combination: Combination) -> str:
    """What to do about an adapter that is named twice. LINEAR sums square roots of scales, so no sum equals that."""
    return "name it once" + ("" if combination is Combination.LINEAR else ", with the sum of the scales")


def _checked_use(use: generation_pb2.AdapterUse, field: str, violations: Violations) -> CheckedUse:
    name = version_name_of(use.name, use.digest, f"{field}.name", violations)
    if use.digest:
        check_digest(use.digest, f"{field}.digest", violations)
    scale = use.scale if use.HasField("scale") else 1.0
    if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
        violations.add(f"{field}.scale", f"is {scale:g}; give a value from {-MAX_SCALE:g} to {MAX_SCALE:g}")
    return CheckedUse(name.adapter_id, name.selector, use.digest, scale + 0.0)  # no negative zero


def composition_of(checked: CheckedUses, resolved: Sequence[ResolvedAdapter]) -> Composition | None:
    """How the versions act together; None for the base model and for one adapter as it is.

    Raises InvalidRequest, with every reason, if they cannot be combined or scaled.
    """
    if len(resolved) < 2 and all(use.scale == 1.0 for use in checked.uses):
        return None
    problems = []
    for index, adapter in enumerate(resolved):
        reason = _obstacle(adapter.version, is_alone=len(resolved) == 1)
        if reason:
            problems.append(FieldViolation(f"adapters[{index}]", reason))
        if adapter.ref.digest in [other.ref.digest for other in resolved[:index]]:
            reason = f"is the same version as an adapter before it; {_once(checked.combination)}"
            problems.append(FieldViolation(f"adapters[{index}]", reason))
    if problems:
        raise InvalidRequest(*problems)
    if checked.combination is Combination.LINEAR:
        ranks = [_ranks_of(adapter.version) for adapter in resolved]
        if len({rank for each in resolved for rank in (each.version.min_rank, each.version.max_rank)}) > 1:
            raise refuse(
                "combination",
                f"LINEAR sums matrices of equal ranks, and the adapters have ranks {' and '.join(ranks)}; use CAT",
            )
    uses = (AdapterUse(each.ref, use.scale) for each, use in zip(resolved, checked.uses, strict=True))
    return Composition(tuple(uses), checked.combination)


def _obstacle(version: AdapterVersion, *, is_alone: bool) -> str:
    """Why the version cannot be combined, or scaled where it `is_alone`; empty if it can."""
    if not version.parts:
        return (
            "was registered before Motet kept what combinations and scales need; delete the version and register it "
            "again"
        )
    if version.alora_invocation_tokens:
        what = "scales" if is_alone else "combinations"
        return f"acts from its invocation tokens on (aLoRA), and {what} of such adapters are not served; use it alone"
    if version.context_length and not is_alone:
        return "has a rotary embedding of its own, and combined adapters share one; use it alone"
    others = set(version.parts) - {"a", "b", *(["bias"] if is_alone else [])}
    if not others:
        return ""
    names = ", ".join(sorted(_NAMES.get(part, part) for part in others))
    what = "a scale is not defined" if is_alone else "PEFT defines no combination"
    way = "use it alone" if others == {"bias"} else "use it alone and without a scale"
    return f"has {names}, for which {what}; {way}"


# Parts of the packed layout, in the words of PEFT.
_NAMES = {
    "rows": "tokens or rows of its own",
    "magnitude": "DoRA magnitudes",
    "bias": "a LoRA bias",
    "base_bias": "trained biases of the base model",
}


def named_uses(checked: CheckedUses, resolved: Sequence[ResolvedAdapter]) -> list[generation_pb2.AdapterUse]:
    """The adapters of the request with their full names and the versions that are used."""
    if checked.task_id is not None:
        return [generation_pb2.AdapterUse(name=each.adapter_id, digest=each.ref.digest, scale=1.0) for each in resolved]
    return [
        generation_pb2.AdapterUse(name=f"adapters/{each.adapter_id}", digest=each.ref.digest, scale=use.scale)
        for each, use in zip(resolved, checked.uses, strict=True)
    ]


def _ranks_of(version: AdapterVersion) -> str:
    lowest, highest = version.min_rank, version.max_rank
    return f"{highest}" if lowest == highest else f"{lowest} to {highest}"
