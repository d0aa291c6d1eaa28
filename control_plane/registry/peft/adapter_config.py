"""Reads adapter_config.json with a closed schema: every field of PEFT is read here, harmless, or refused by name.

Never uses PEFT itself (it imports modules that a config names, and runs its strings as regular expressions), never
follows base_model_name_or_path. Patterns are plain dotted names here; on those the meaning is PEFT's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from control_plane.registry.peft.config_fields import check_fields, show
from control_plane.registry.peft.kinds import FLAGS, kind_with
from control_plane.registry.peft.kinds.adapter_kind import AdapterKind
from control_plane.registry.peft.safetensors_header import parse_json_object, refuse, refuse_lfs_pointer

_T = TypeVar("_T")
MAX_CONFIG_BYTES = 1 << 20
MAX_NAMES = 100_000
MAX_SCALING = 1000.0
_FIELD = "adapter_config.json"
_PLAIN_NAME = re.compile(r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z")


class NamePattern(Generic[_T]):
    """Values by plain names or suffixes of module names, "^full.name" for one exact module; the first that fits counts.

    Finding it costs a few look-ups, however many names there are.
    """

    def __init__(self, entries: Iterable[tuple[str, _T]]) -> None:
        # By name: its place in the configuration, and the value.
        self._by_name = {name: (place, value) for place, (name, value) in enumerate(entries)}

    def first(self, module: str, default: _T) -> _T:
        """The value of the first name that fits the module."""
        names = ["^" + module, *_suffixes(module)]
        found = [entry for name in names if (entry := self._by_name.get(name)) is not None]
        return min(found, key=lambda entry: entry[0])[1] if found else default


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says, checked against itself only."""

    kind: AdapterKind
    rank: int
    alpha: float
    is_rslora: bool
    rank_pattern: NamePattern[int]
    alpha_pattern: NamePattern[float]
    target_modules: frozenset[str] | None  # names or suffixes; None: all linears
    exclude_modules: frozenset[str]
    ties_weights: bool  # adapters of embedding and head are one, where the base model ties these two

    @property
    def manifest_kind(self) -> str:
        """The manifest's word for kind and scaling."""
        return ("rs" if self.is_rslora else "") + self.kind.name

    def is_targeted(self, module: str, *, is_linear: bool = True) -> bool:
        """Whether PEFT would put an adapter on `module`. is_linear: of "all-linear", which leaves the head out."""
        suffixes = _suffixes(module)
        if not self.exclude_modules.isdisjoint(suffixes):
            return False
        if self.target_modules is None:
            return is_linear
        return not self.target_modules.isdisjoint(suffixes)

    def rank_of(self, module: str) -> int:
        """Rank of A and B of `module`."""
        return self.rank_pattern.first(module, self.rank)

    def scaling_of(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA."""
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.first(module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rslora else alpha / rank


def read_adapter_config(raw: bytes) -> AdapterConfig:
    """Parse and check. Raises InvalidAdapter, its field being the key at fault."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise refuse(_FIELD, f"{len(raw)} bytes, limit {MAX_CONFIG_BYTES}")
    refuse_lfs_pointer(raw, _FIELD)
    config = parse_json_object(raw, _FIELD)
    check_fields(config)
    _flag(config, "fan_in_fan_out")  # whatever it says: PEFT corrects it by the type of each module
    rank = config.get("r", 8)
    if type(rank) is not int or rank < 1:
        raise refuse("r", f"is {show(rank)}; a rank of at least 1 is expected")
    return AdapterConfig(
        kind=kind_with([flag for flag in FLAGS if _flag(config, flag)]),
        rank=rank,
        alpha=_number("lora_alpha", config.get("lora_alpha", 8)),
        is_rslora=_flag(config, "use_rslora"),
        rank_pattern=NamePattern(_pattern(config, "rank_pattern", _rank)),
        alpha_pattern=NamePattern(_pattern(config, "alpha_pattern", _number)),
        target_modules=_target_modules(config.get("target_modules")),
        exclude_modules=_names("exclude_modules", config.get("exclude_modules") or ()),
        ties_weights=_flag(config, "ensure_weight_tying"),
    )


def check_scaling(module: str, scaling: float) -> float:
    """`scaling`, if it is one that trained adapters have."""
    if not math.isfinite(scaling) or abs(scaling) > MAX_SCALING:
        raise refuse("lora_alpha", f"gives {module} a scaling of {scaling:g}, limit {MAX_SCALING:g}")
    return scaling


def _target_modules(value: Any) -> frozenset[str] | None:
    if isinstance(value, str):
        if value.lower() == "all-linear":
            return None
        raise refuse(
            "target_modules",
            f"is the pattern {show(value)}, and patterns are not read; list module names, or all-linear",
        )
    if value is None:
        raise refuse(
            "target_modules", "is null, so PEFT chose the modules itself; list the module names that PEFT chose"
        )
    names = _names("target_modules", value)
    if not names:
        raise refuse("target_modules", "names no module; list module names, or all-linear")
    return names


def _names(field: str, value: Any) -> frozenset[str]:
    if isinstance(value, list | tuple) and len(value) > MAX_NAMES:
        raise refuse(field, f"has {len(value)} names, limit {MAX_NAMES}; list suffixes of module names")
    if not isinstance(value, list | tuple):
        raise refuse(field, f"is {show(value)}, and patterns are not read; list module names")
    for name in value:
        _check_name(field, name)
    return frozenset(value)


def _check_name(field: str, name: Any) -> None:
    if not isinstance(name, str) or not _PLAIN_NAME.match(name):
        raise refuse(field, f"holds {show(name)}; only plain dotted module names are read, no patterns")


def _pattern(config: dict[str, Any], field: str, read: Callable[[str, Any], _T]) -> Iterable[tuple[str, _T]]:
    value = config.get(field)
    if value is None:
        return
    if not isinstance(value, dict):
        raise refuse(field, f"is {show(value)}; a map of module names to numbers is expected")
    for name, number in value.items():
        # PEFT documents "^full.name" for one exact module.
        _check_name(field, name.removeprefix("^"))
        yield name, read(field, number)


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise refuse(field, f"holds the rank {show(value)}; at least 1 is expected")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e9:
        raise refuse(field, f"is {show(value)}; a finite number is expected")
    return float(value)


def _flag(config: dict[str, Any], field: str) -> bool:
    """Off where it is left out or null."""
    value = config.get(field)
    if value is not None and type(value) is not bool:
        raise refuse(field, f"is {show(value)}; true or false is expected")
    return bool(value)


def _suffixes(module: str) -> list[str]:
    """The names in a configuration that fit a module: "a.b.c" gives "a.b.c", "b.c" and "c"."""
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
