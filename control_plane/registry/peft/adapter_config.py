"""Reads adapter_config.json with a closed schema: every field of PEFT is read here, harmless, or refused by name.

Never uses PEFT itself (it imports modules that a config names, and runs its strings as regular expressions), never
follows base_model_name_or_path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.peft.config_fields import check_fields, show, trained_whole
from control_plane.registry.peft.fields.long_context import FIELDS as ROPE_FIELDS
from control_plane.registry.peft.kinds import FLAGS, kind_with
from control_plane.registry.peft.kinds.adapter_kind import AdapterKind
from control_plane.registry.peft.kinds.score_head import MAX_SCORE_LABELS, LabelNames
from control_plane.registry.peft.module_names import LayerChoice, NamePattern, is_plain, suffixes
from control_plane.registry.peft.peft_types import LORA, advice_for
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import parse_json_object, refuse, refuse_lfs_pointer

_T = TypeVar("_T")
MAX_CONFIG_BYTES = 1 << 20
MAX_NAMES = 100_000
_MAX_NUMBER = 1e9  # of an alpha
MAX_SCALING = 1000.0
MAX_LABEL_BYTES = 256
PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
_FIELD = "adapter_config.json"


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says, checked against itself only."""

    kind: AdapterKind
    rank: int
    alpha: float
    is_rslora: bool
    rank_pattern: NamePattern[int]
    alpha_pattern: NamePattern[float]
    targets: TargetNames
    target_parameters: frozenset[str]  # names or suffixes of parameters, such as the stacked ones of experts
    trains_biases: bool  # biases of the base model were trained too
    label_names: LabelNames
    ties_weights: bool  # adapters of embedding and head are one, where the base model ties these two
    rope: Mapping[str, Any]  # what fields/long_context.py reads
    alora_invocation_tokens: Any = None  # what fields/activation.py reads
    saved_modules: frozenset[str] = frozenset()  # names of embeddings and heads that were trained whole
    # Tokens that were trained alone, by the name of an embedding or a head; "": the embedding.
    trained_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    base_name: str = ""  # of the model that it was trained on, or its path there; compared, never followed

    @property
    def manifest_kind(self) -> str:
        """The manifest's word for kind and scaling."""
        return ("rs" if self.is_rslora else "") + self.kind.name

    def targets_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names this parameter, as PEFT compares them."""
        return not self.target_parameters.isdisjoint(suffixes(name))

    def rank_of(self, module: str, num_rows: int) -> int:
        """Rank of A and B of `module`. The rows of its A decide where only a regular expression could say it."""
        if self.rank_pattern.may_be(module, num_rows, self.rank):
            return num_rows
        known = self.rank_pattern.known(module, self.rank)
        return self.rank if known is None else known

    def scaling_of(self, module: str, rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA. Raises InvalidAdapter where only an expression could say it."""
        alpha = self.alpha_pattern.known(module, self.alpha)
        if alpha is None:
            raise refuse(
                "alpha_pattern",
                f"{show(self.alpha_pattern.expression)} is a regular expression, which is not run and may give "
                f'{module} another alpha; list the modules by name instead, as "^{module}"',
            )
        scaling = alpha / math.sqrt(rank) if self.is_rslora else alpha / rank
        if not math.isfinite(scaling) or abs(scaling) > MAX_SCALING:
            raise refuse(
                "lora_alpha",
                f"gives {module} a scaling of {scaling:g}, limit {MAX_SCALING:g}; check lora_alpha and r, or multiply "
                "lora_B by a part of it",
            )
        return scaling


@dataclass(frozen=True)
class TargetNames:
    """Which modules the adapter changes, as far as the configuration says so without an expression."""

    names: frozenset[str] | None  # names or suffixes; None: all linears, or those that an expression finds
    is_all_linear: bool  # "all-linear", which leaves the head out
    excluded: frozenset[str]
    layers: LayerChoice | None  # None: all
    # An expression decides, or PEFT's own choice: modules may be left out that the rest of the configuration names.
    has_expression: bool

    def may_have(self, module: str, *, is_linear: bool = True) -> bool:
        """Whether PEFT would put an adapter on `module`, if no expression decides. is_linear: not embedding or head."""
        ends = suffixes(module)
        if not self.excluded.isdisjoint(ends):
            return False
        if self.names is None:
            return is_linear or not self.is_all_linear
        if module in self.names:
            return True  # whatever its layer
        return not self.names.isdisjoint(ends) and (self.layers is None or self.layers.has(module))


def read_adapter_config(raw: bytes, problems: Problems) -> AdapterConfig | None:
    """Parse and check. Notes all that is wrong; None if a value that other checks need cannot be read.

    Raises InvalidAdapter for another kind of adapter: nothing else about it means anything here.
    """
    config: dict[str, Any] | None = None
    with problems.collected():
        if len(raw) > MAX_CONFIG_BYTES:
            raise refuse(_FIELD, f"{len(raw)} bytes, limit {MAX_CONFIG_BYTES}")
        refuse_lfs_pointer(raw, _FIELD)
        config = parse_json_object(raw, _FIELD)
    if config is None:
        return None
    peft_type = config.get("peft_type")
    if peft_type != LORA:
        problems.add(FieldViolation("peft_type", f"is {show(peft_type)}; {advice_for(peft_type)}"))
        problems.raise_all()
    check_fields(config, problems)
    return _Reader(config, problems).read()


class _Reader:
    """Reads the fields one by one, so that each bad one is noted."""

    def __init__(self, config: Mapping[str, Any], problems: Problems) -> None:
        self._config = config
        self._problems = problems
        self._is_whole = True

    def read(self) -> AdapterConfig | None:
        """The configuration, or None if a field could not be read."""
        no_tokens: dict[str, tuple[int, ...]] = {}
        no_labels: tuple[str, ...] = ()
        self._value("fan_in_fan_out", _flag, False)  # whatever it says: PEFT corrects it by the type of each module
        config = AdapterConfig(
            kind=self._kind(),
            rank=self._number_of("r", _rank, 8),
            alpha=self._number_of("lora_alpha", _number, 8.0),
            is_rslora=self._value("use_rslora", _flag, False),
            rank_pattern=self._value("rank_pattern", _ranks, NamePattern(())),
            alpha_pattern=self._value("alpha_pattern", _numbers, NamePattern(())),
            targets=self._targets(),
            target_parameters=self._value("target_parameters", _parameters, frozenset()),
            trains_biases=self._config.get("bias") not in (None, "none"),
            label_names=LabelNames(
                task_type=str(self._config.get("task_type") or ""),
                names=self._value("id2label", _labels, no_labels),
                problem_type=self._value("problem_type", _problem_type, ""),
            ),
            ties_weights=self._value("ensure_weight_tying", _flag, False),
            rope={name: self._config.get(name) for name in ROPE_FIELDS},
            alora_invocation_tokens=self._config.get("alora_invocation_tokens"),
            saved_modules=trained_whole(self._config.get("modules_to_save")),
            trained_tokens=self._value("trainable_token_indices", _tokens, no_tokens),
            base_name=base_name if isinstance(base_name := self._config.get("base_model_name_or_path"), str) else "",
        )
        return config if self._is_whole else None

    def _value(self, field: str, read: Callable[[str, Any], _T], default: _T) -> _T:
        """The field's value; the default where it is left out, null or cannot be read."""
        value = self._config.get(field)
        return default if value is None else self._attempt(lambda: read(field, value), default)

    def _number_of(self, field: str, read: Callable[[str, Any], _T], default: _T) -> _T:
        """The field's value, PEFT's default where it is left out. Null is refused: PEFT computes with it and fails."""
        return self._attempt(lambda: read(field, self._config[field]), default) if field in self._config else default

    def _attempt(self, read: Callable[[], _T], default: _T) -> _T:
        try:
            return read()
        except InvalidAdapter as error:
            self._problems.note(error)
            self._is_whole = False
            return default

    def _kind(self) -> AdapterKind:
        flags = [flag for flag in FLAGS if self._value(flag, _flag, False)]
        return self._attempt(lambda: kind_with(flags), kind_with(()))

    def _targets(self) -> TargetNames:
        nothing: frozenset[str] | None = frozenset()
        no_paths: tuple[str, ...] | None = ()
        no_layers: frozenset[int] = frozenset()
        excluded = self._value("exclude_modules", _names, nothing)
        has_expression = excluded is None
        # PEFT puts no adapter on a module that was trained whole, whatever target_modules says.
        left_out = (excluded or frozenset()) | trained_whole(self._config.get("modules_to_save"))
        indices = self._value("layers_to_transform", _layers, no_layers)
        paths = self._value("layers_pattern", _layer_paths, no_paths)
        layers = LayerChoice(indices, paths or ()) if indices else None
        has_expression = has_expression or paths is None
        value = self._config.get("target_modules")
        if isinstance(value, str) and value.lower() == "all-linear":
            # PEFT has no choice of layers here.
            return TargetNames(None, True, left_out, layers, has_expression or bool(indices))
        if value == [] and self._config.get("target_parameters"):
            return TargetNames(frozenset(), False, left_out, layers, has_expression)
        # Where it is null, PEFT chose the modules.
        names = self._value("target_modules", _target_modules, None)
        layers = None if paths is None else layers
        return TargetNames(names, False, left_out, layers, has_expression or names is None)


def _target_modules(field: str, value: Any) -> frozenset[str] | None:
    """The names; None for an expression."""
    names = _names(field, value)
    if names is not None and not names:
        raise refuse(field, "names no module; list module names, or all-linear")
    return names


def _names(field: str, value: Any) -> frozenset[str] | None:
    """The names of a list, compared as text as PEFT does; None for an expression."""
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refuse(field, f"is {show(value)}; a list of module names, or text, is expected")
    if len(value) > MAX_NAMES:
        raise refuse(field, f"has {len(value)} names, limit {MAX_NAMES}; list suffixes of module names")
    return frozenset(value)


def _parameters(field: str, value: Any) -> frozenset[str]:
    names = None if isinstance(value, str) else _names(field, value)
    if names is None:
        raise refuse(field, f"is {show(value)}; a list of parameter names is expected")
    return names


def _tokens(field: str, value: Any) -> dict[str, tuple[int, ...]]:
    """The tokens of a list, or of a list for each module."""
    lists = {"": value} if isinstance(value, list) else value
    if not isinstance(lists, dict):
        raise refuse(field, f"is {show(value)}; a list of token ids, or one for each module, is expected")
    for ids in lists.values():
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
            raise refuse(field, f"has {show(ids)}; a list of token ids is expected")
    return {name: tuple(ids) for name, ids in lists.items()}


def _layers(field: str, value: Any) -> frozenset[int]:
    indices = value if isinstance(value, list) else [value]
    if not all(type(index) is int and index >= 0 for index in indices):
        raise refuse(field, f"is {show(value)}; the index of a layer, or a list of them, is expected")
    return frozenset(indices)


def _layer_paths(field: str, value: Any) -> tuple[str, ...] | None:
    """The names before a layer's index; None for an expression."""
    paths = [value] if isinstance(value, str) and value else value or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise refuse(field, f"is {show(value)}; a name, or a list of names, is expected")
    return tuple(paths) if all(map(is_plain, paths)) else None


def _labels(field: str, value: Any) -> tuple[str, ...]:
    """The labels in order, of a map as transformers' configurations have it: {"0": "negative", "1": "positive"}."""
    is_map = isinstance(value, dict) and len(value) <= MAX_SCORE_LABELS
    names = [value.get(str(index)) for index in range(len(value))] if is_map else []
    if not names or not all(isinstance(name, str) and 1 <= len(name.encode()) <= MAX_LABEL_BYTES for name in names):
        raise refuse(
            field,
            f'is {show(value)}; a map from "0", "1" and so on to labels of 1 to {MAX_LABEL_BYTES} bytes is expected',
        )
    return tuple(map(str, names))


def _problem_type(field: str, value: Any) -> str:
    if value not in PROBLEM_TYPES:
        raise refuse(field, f"is {show(value)}; one of {', '.join(PROBLEM_TYPES)} is expected")
    return str(value)


def _ranks(field: str, value: Any) -> NamePattern[int]:
    return _pattern(field, value, _rank)


def _numbers(field: str, value: Any) -> NamePattern[float]:
    return _pattern(field, value, _number)


def _pattern(field: str, value: Any, read: Callable[[str, Any], _T]) -> NamePattern[_T]:
    if not isinstance(value, dict):
        raise refuse(field, f"is {show(value)}; a map of module names to numbers is expected")
    return NamePattern((name, read(field, number)) for name, number in value.items())


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise refuse(field, f"has {show(value)}; a rank of at least 1 is expected")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _MAX_NUMBER:
        raise refuse(field, f"has {show(value)}; a number from {-_MAX_NUMBER:g} to {_MAX_NUMBER:g} is expected")
    return float(value)


def _flag(field: str, value: Any) -> bool:
    if type(value) is not bool:
        raise refuse(field, f"is {show(value)}; true or false is expected")
    return value
