"""What a Hello says about the target modules of the worker's model: checks of its size, and the report made of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from contract.expert_names import ANY, PROJECTIONS
from contract.hello_bounds import MAX_REASON_BYTES
from contract.v1 import plan_pb2
from control_plane.errors import FieldViolation
from control_plane.registry.model.served_modules import ModuleKind, Modules, ServedModule, WorkerReport

_INT32_MAX = 2**31 - 1
MAX_TARGET_ENTRIES = 1 << 12
MAX_TARGET_MODULES = 1 << 16
MAX_PATH_BYTES = 256
MAX_LAYER = 1 << 16
MAX_EXPERTS = 1 << 12  # of a layer
_PATH = re.compile(r"[A-Za-z0-9_]+(\.([A-Za-z0-9_]+|\*))*")
_EXPERT_PATHS = tuple(f".experts.{ANY}.{part}" for part in PROJECTIONS)
_KINDS = {
    plan_pb2.TargetModules.KIND_LINEAR: ModuleKind.LINEAR,
    plan_pb2.TargetModules.KIND_HEAD: ModuleKind.HEAD,
    plan_pb2.TargetModules.KIND_EMBEDDING: ModuleKind.EMBEDDING,
    plan_pb2.TargetModules.KIND_EXPERT: ModuleKind.EXPERT,
    plan_pb2.TargetModules.KIND_ROUTER: ModuleKind.ROUTER,
}


def report_of(hello: plan_pb2.Hello) -> WorkerReport:
    """What a checked Hello says that the worker serves. Workers of one model share the modules."""
    reported = plan_pb2.Hello(target_modules=hello.target_modules)
    modules = _modules_of(reported.SerializeToString(deterministic=True))
    return WorkerReport(hello.max_model_len, modules, max(hello.max_model_len, hello.max_adapter_model_len))


def memory_of(hello: plan_pb2.Hello) -> dict[str, int]:
    """Where the worker's memory went, by field of WorkerStatus."""
    use = hello.memory
    return {
        "memory_bytes": use.device_bytes,
        "weights_bytes": use.weights_bytes,
        "step_memory_bytes": use.step_bytes,
        "kv_bytes": use.kv_bytes,
        "host_kv_bytes": use.host_kv_bytes,
        "graph_bytes": use.graph_bytes,
        "headroom_bytes": use.headroom_bytes,
        "pinned_bytes": use.pinned_bytes,
    }


def check_targets(hello: plan_pb2.Hello) -> list[FieldViolation]:
    """The first entry of target_modules that is wrong, if one is: thousands may be."""
    field = "hello.target_modules"
    if len(hello.target_modules) > MAX_TARGET_ENTRIES:
        return [FieldViolation(field, f"{len(hello.target_modules)} entries; at most {MAX_TARGET_ENTRIES}")]
    num_modules = 0
    for index, entry in enumerate(hello.target_modules):
        found = _check_target(entry, f"{field}[{index}]")
        if found is not None:
            return [found]
        num_modules += max(len(entry.layers) // 4, 1)
    if num_modules > MAX_TARGET_MODULES:
        return [FieldViolation(field, f"{num_modules} modules; at most {MAX_TARGET_MODULES}")]
    return []


@lru_cache(maxsize=4)
def _modules_of(raw: bytes) -> Modules:
    return {
        name: ServedModule(
            _KINDS[entry.kind],
            entry.in_features,
            entry.out_features,
            entry.reason,
            num_experts=entry.num_experts,
            is_interleaved=entry.is_interleaved,
        )
        for entry in plan_pb2.Hello.FromString(raw).target_modules
        for name in _names_of(entry)
    }


def _names_of(entry: plan_pb2.TargetModules) -> Iterator[str]:
    layers = np.frombuffer(entry.layers, dtype="<i4").tolist()
    if not layers:
        yield entry.path
    for layer in layers:
        yield entry.path.replace("*", str(layer), 1)


def _check_target(entry: plan_pb2.TargetModules, field: str) -> FieldViolation | None:
    if len(entry.path) > MAX_PATH_BYTES or not _PATH.fullmatch(entry.path):
        return FieldViolation(
            f"{field}.path", f"{entry.path[:80]!r} is not a module's path of 1 to {MAX_PATH_BYTES} bytes"
        )
    if len(entry.layers) % 4 or len(entry.layers) > 4 * MAX_TARGET_MODULES:
        return FieldViolation(
            f"{field}.layers", f"{len(entry.layers)} bytes are not at most {MAX_TARGET_MODULES} whole int32"
        )
    layers = np.frombuffer(entry.layers, dtype="<i4")
    if bool(entry.num_experts) != (entry.kind == plan_pb2.TargetModules.KIND_EXPERT) or entry.num_experts > MAX_EXPERTS:
        return FieldViolation(
            f"{field}.num_experts", f"{entry.num_experts}; 1 to {MAX_EXPERTS} for modules of experts, else 0"
        )
    num_places = entry.path.split(".").count("*") - min(entry.num_experts, 1)
    if num_places != min(len(layers), 1) or (entry.num_experts and not entry.path.endswith(_EXPERT_PATHS)):
        return FieldViolation(f"{field}.layers", f"{len(layers)} layers for {num_places} places in {entry.path!r}")
    if len(layers) and (layers[0] < 0 or layers[-1] > MAX_LAYER or (np.diff(layers) <= 0).any()):
        return FieldViolation(f"{field}.layers", f"are not ascending numbers of 0 to {MAX_LAYER}")
    if entry.kind not in _KINDS:
        return FieldViolation(f"{field}.kind", f"{entry.kind} is not a known kind of module")
    for name in ("in_features", "out_features"):
        if not 1 <= getattr(entry, name) <= _INT32_MAX:
            return FieldViolation(f"{field}.{name}", f"{getattr(entry, name)} is not in 1..{_INT32_MAX}")
    if len(entry.reason) > MAX_REASON_BYTES or not (entry.reason.isascii() and entry.reason.isprintable()):
        return FieldViolation(f"{field}.reason", f"is not printable ASCII of at most {MAX_REASON_BYTES} bytes")
    return None
