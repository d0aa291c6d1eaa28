"""What workers say that they serve of the base model: its modules, and the longest context.

Values only. worker_reports.py keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

_FORMAT = 1


class ModuleKind(Enum):
    """What a module is to adapters."""

    LINEAR = "linear"
    HEAD = "head"
    EMBEDDING = "embedding"
    ROUTER = "router"  # chooses the experts of a token
    EXPERT = "expert"  # one product of every expert of a layer


@dataclass(frozen=True, slots=True)
class ServedModule:
    """One module of the base model that an adapter could name."""

    kind: ModuleKind
    in_features: int  # of an embedding: the vocabulary
    out_features: int
    reason: str = ""  # why it takes no adapters; empty: it takes them
    num_experts: int = 0  # its name stands for so many modules (contract/expert_names.py); 0: for one
    is_interleaved: bool = False  # of experts: outputs of gate and up follow each other in turn where they are stacked


Modules = Mapping[str, ServedModule]  # by path in the transformers model
NOTHING_REPORTED: Modules = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker serves, or several together."""

    max_model_len: int  # tokens
    modules: Modules = field(default_factory=lambda: NOTHING_REPORTED)  # empty: not reported
    max_adapter_model_len: int = 0  # of long-context adapters, tokens; 0: max_model_len


def joined(reports: Iterable[WorkerReport]) -> WorkerReport | None:
    """What at least one of the workers serves; None without a worker.

    If one of the workers reports no modules, the modules are unknown.
    """
    known = list(reports)
    if not known:
        return None
    modules: Modules = known[0].modules
    for report in known[1:]:
        if report.modules is modules or not modules:
            continue
        taken = {name: module for name, module in report.modules.items() if not module.reason or name not in modules}
        modules = {**modules, **taken} if report.modules else {}
    return WorkerReport(
        max(report.max_model_len for report in known),
        modules,
        max(report.max_adapter_model_len for report in known),
    )


def encode_report(report: WorkerReport) -> bytes:
    """The report as a document."""
    modules = {
        name: [
            module.kind.value,
            module.in_features,
            module.out_features,
            module.reason,
            *([module.num_experts, module.is_interleaved] if module.num_experts else []),
        ]
        for name, module in report.modules.items()
    }
    document = {
        "format": _FORMAT,
        "max_model_len": report.max_model_len,
        "max_adapter_model_len": report.max_adapter_model_len,
        "modules": modules,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode_report(raw: bytes) -> WorkerReport:
    """Read a document. Raises ValueError with what is wrong."""
    try:
        document: dict[str, Any] = json.loads(raw)
        if document["format"] != _FORMAT:
            raise ValueError("written by another version")
        modules = {str(name): _decode_module(*fields) for name, fields in document["modules"].items()}
        longest = int(document.get("max_adapter_model_len", 0))
        return WorkerReport(int(document["max_model_len"]), modules, longest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("fields are missing or of the wrong type") from error


def _decode_module(
    kind: str, in_features: int, out_features: int, reason: str, num_experts: int = 0, is_interleaved: bool = False
) -> ServedModule:
    sizes = (int(in_features), int(out_features))
    return ServedModule(
        ModuleKind(kind), *sizes, str(reason), num_experts=int(num_experts), is_interleaved=bool(is_interleaved)
    )
