"""Turns the files of a PEFT adapter into the packed layout of docs/protocol.md, checking everything on the way.

Runs in a worker thread. One decoder layer is in memory at a time. The same input gives the same bytes, hence the same
digest, on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from control_plane.registry.adapter_config import MAX_CONFIG_BYTES, AdapterConfig, check_scaling, read_adapter_config
from control_plane.registry.base_model import BaseModel
from control_plane.registry.safetensors_header import FIELD, TensorEntry, read_header, refuse, shorten
from control_plane.registry.tensor_codec import Float32Array, decode, encode

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
RANKS_PER_PAGE = 8  # of the worker's arena
_SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_KEY_PREFIX = "base_model.model."
# Parts of tensor names that belong to kinds of adapters that are not served.
_OTHER_KINDS = {
    "lora_embedding_A": "LoRA on embeddings",
    "lora_embedding_B": "LoRA on embeddings",
    "modules_to_save": "fully trained modules",
    "trainable_tokens_delta": "trained tokens",
    "base_layer": "LoRA on stacked parameters, such as experts",
}

# How the name of a tensor ends, and which part of a module it is.
_PARTS = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_B.bias": "lora_B.bias",
    ".lora_magnitude_vector": "lora_magnitude_vector",
    ".lora_magnitude_vector.weight": "lora_magnitude_vector",  # as PEFT reads it too
}

ChunkSink = Callable[[int, bytes], None]  # (chunk index, bytes)


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One linear that the adapter changes."""

    name: str
    a: TensorEntry
    b: TensorEntry
    rank: int
    scaling: float
    in_features: int
    out_features: int
    bias: TensorEntry | None = None  # LoRA bias
    magnitude: TensorEntry | None = None  # DoRA

    @property
    def has_vector(self) -> bool:
        return self.bias is not None or self.magnitude is not None


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """A packed adapter, without its chunks."""

    digest: str
    manifest: bytes
    kind: str
    max_rank: int
    size_bytes: int  # manifest and chunks
    arena_bytes: int
    target_modules: tuple[str, ...]  # sorted


def ingest(files: Mapping[str, Path], base_model: BaseModel, *, max_adapter_bytes: int, sink: ChunkSink) -> PackedInfo:
    """Check the adapter in full and give its chunks to `sink`, in order. Raises InvalidAdapter.

    `files` maps adapter_config.json and adapter_model.safetensors to local files that the server wrote or chose.
    """
    for name in sorted(set(files) - {CONFIG_FILE, WEIGHTS_FILE}):
        raise refuse(shorten(name), f"only {CONFIG_FILE} and {WEIGHTS_FILE} belong to an adapter")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise refuse(name, "is missing; save the adapter with PEFT's save_pretrained")
    with files[CONFIG_FILE].open("rb") as config_file:
        config = read_adapter_config(config_file.read(MAX_CONFIG_BYTES + 1))
    with files[WEIGHTS_FILE].open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_adapter_bytes:
            raise refuse(WEIGHTS_FILE, f"{size} bytes, limit {max_adapter_bytes}; raise --max-adapter-bytes")
        # Room for other kinds of adapters too: they are refused by their tensors' names, not by a count.
        max_tensors = 4 * len(base_model.linear_shapes) + 64
        entries = read_header(file, size, max_tensors=max_tensors)
        modules = plan_modules(config, entries, base_model.linear_shapes)
        return _pack(file, config, modules, base_model, sink)


def plan_modules(
    config: AdapterConfig, entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, int]]
) -> list[ModulePlan]:
    """What the adapter changes, ordered by name; every name, shape and rank checked against config and base model."""
    pairs: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries.values():
        module, side = _split_key(entry.name, shapes)
        parts = pairs.setdefault(module, {})
        if side in parts:
            raise refuse(shorten(entry.name), f"is there a second time, as {shorten(parts[side].name)}; remove one")
        parts[side] = entry
    for module in sorted(pairs):
        _check_parts(module, pairs[module], config)
        if not config.is_targeted(module):
            raise refuse("target_modules", f"does not name {module}, for which there are tensors; PEFT would drop them")
    for name in config.target_modules or ():
        head = name.rsplit(".", 1)[-1]
        if head in ("lm_head", "embed_out", "embed_tokens", "embed_in"):
            raise refuse("target_modules", f"names {name}; adapters on embeddings and heads are not served")
    for module in sorted(shapes):
        if config.is_targeted(module) and module not in pairs:
            raise refuse(f"{module}.lora_A", "is missing, target_modules names the module; save the adapter again")
    return [_plan_module(module, pairs[module], config, shapes[module]) for module in sorted(pairs)]


def _split_key(key: str, shapes: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    """Module path and part of a tensor's name: base_model.model.{module}.lora_A.weight and the like."""
    label = shorten(key)
    for part in key.split("."):
        if part in _OTHER_KINDS:
            raise refuse(label, f"belongs to {_OTHER_KINDS[part]}, which is not served; train plain LoRA")
    for suffix, side in _PARTS.items():
        if key.startswith(_KEY_PREFIX) and key.endswith(suffix):
            module = key[len(_KEY_PREFIX) : -len(suffix)]
            if module in shapes:
                return module, side
            raise refuse(label, "the base model has no such linear in its decoder layers; is it another model's?")
    raise refuse(label, "is not a LoRA tensor's name: base_model.model.{module}.lora_A.weight or lora_B is expected")


def _plan_module(
    module: str, parts: Mapping[str, TensorEntry], config: AdapterConfig, shape: tuple[int, int]
) -> ModulePlan:
    out_features, in_features = shape
    rank = config.rank_of(module)
    shapes: dict[str, tuple[int, ...]] = {
        "lora_A": (rank, in_features),
        "lora_B": (out_features, rank),
        "lora_B.bias": (out_features,),
        "lora_magnitude_vector": (out_features,),
    }
    for side, entry in parts.items():
        if entry.shape != shapes[side]:
            raise refuse(
                f"{module}.{side}",
                f"shape {list(entry.shape)}, expected {list(shapes[side])} (rank {rank} by the config, {out_features} "
                f"x {in_features} of the base model)",
            )
    return ModulePlan(
        module,
        parts["lora_A"],
        parts["lora_B"],
        rank,
        check_scaling(module, config.scaling_of(module)),
        in_features,
        out_features,
        parts.get("lora_B.bias"),
        parts.get("lora_magnitude_vector"),
    )


def _check_parts(module: str, parts: Mapping[str, TensorEntry], config: AdapterConfig) -> None:
    """Every tensor of a module that the configuration asks for, and no other."""
    for side, other in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
        if side not in parts:
            raise refuse(
                f"{module}.{side}",
                f"is missing, {other if other in parts else next(iter(parts))} is there; save the adapter again",
            )
    for side, key, is_wanted in (
        ("lora_B.bias", "lora_bias", config.has_lora_bias),
        ("lora_magnitude_vector", "use_dora", config.is_dora),
    ):
        if is_wanted and side not in parts:
            raise refuse(f"{module}.{side}", f"is missing, {key} is true; save the adapter again")
        if side in parts and not is_wanted:
            raise refuse(f"{module}.{side}", f"is there, {key} is not true; PEFT would drop it: save the adapter again")


def _pack(
    file: BinaryIO, config: AdapterConfig, modules: list[ModulePlan], base_model: BaseModel, sink: ChunkSink
) -> PackedInfo:
    groups: dict[int, list[ModulePlan]] = {}
    for plan in modules:
        layer = base_model.layer_of(plan.name)
        assert layer is not None, "linear_shapes holds linears of decoder layers only"
        groups.setdefault(layer, []).append(plan)
    chunks = []
    for index, layer in enumerate(sorted(groups)):
        data, described = _pack_chunk(file, groups[layer], base_model.dtype)
        sha256 = hashlib.sha256(data).hexdigest()
        chunks.append({"modules": described, "name": f"layers.{layer}", "sha256": sha256, "size_bytes": len(data)})
        sink(index, data)
    document = {
        "base_fingerprint": base_model.fingerprint,
        "chunks": chunks,
        "dtype": base_model.dtype,
        "format": 1,
        "kind": config.kind,
    }
    manifest = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return PackedInfo(
        digest=hashlib.sha256(manifest).hexdigest(),
        manifest=manifest,
        kind=config.kind,
        max_rank=max(plan.rank for plan in modules),
        size_bytes=len(manifest) + sum(int(chunk["size_bytes"]) for chunk in chunks),  # type: ignore[call-overload]
        arena_bytes=_arena_bytes(modules, ITEMSIZE[base_model.dtype]),
        target_modules=tuple(plan.name for plan in modules),
    )


def _arena_bytes(modules: list[ModulePlan], itemsize: int) -> int:
    """What the adapter takes of a worker's arena, by the formula of docs/protocol.md."""
    columns = math.gcd(*(width for plan in modules for width in (plan.in_features, plan.out_features)))
    page_bytes = RANKS_PER_PAGE * columns * itemsize
    num_pages = sum(
        -(-plan.rank // RANKS_PER_PAGE) * ((plan.in_features + plan.out_features) // columns) for plan in modules
    )
    num_values = sum(plan.out_features for plan in modules if plan.has_vector)
    return (num_pages + -(-4 * num_values // page_bytes)) * page_bytes


def _pack_chunk(file: BinaryIO, modules: list[ModulePlan], dtype: str) -> tuple[bytes, list[dict[str, Any]]]:
    """One chunk's bytes and the manifest's description of its modules."""
    header: dict[str, Any] = {}
    payload: list[bytes] = []
    described = []
    position = 0
    for plan in modules:
        hashes = {}
        for side, entry in (("a", plan.a), ("b", plan.b), ("bias", plan.bias), ("magnitude", plan.magnitude)):
            if entry is None:
                continue
            values = _read_finite(file, entry)
            packed_dtype = dtype if side in ("a", "b") else "float32"
            packed = np.ascontiguousarray(values.T) if side == "b" else values
            raw = encode(packed, packed_dtype)
            if raw is None:
                raise refuse(shorten(entry.name), f"holds a value too large for {dtype}, the base model's type")
            hashes[f"{side}_sha256"] = hashlib.sha256(raw).hexdigest()
            header[f"{plan.name}.{side}"] = {
                "data_offsets": [position, position + len(raw)],
                "dtype": _SAFETENSORS_DTYPE[packed_dtype],
                "shape": list(packed.shape),
            }
            payload.append(raw)
            position += len(raw)
        described.append(
            {
                **hashes,
                "in_features": plan.in_features,
                "name": plan.name,
                "out_features": plan.out_features,
                "rank": plan.rank,
                "scaling": float(plan.scaling),
            }
        )
    head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    head += b" " * (-len(head) % 8)  # data begins at a multiple of 8 bytes
    return b"".join([len(head).to_bytes(8, "little"), head, *payload]), described


def _read_finite(file: BinaryIO, entry: TensorEntry) -> Float32Array:
    file.seek(entry.start)
    raw = file.read(entry.size_bytes)
    if len(raw) != entry.size_bytes:
        raise refuse(FIELD, "became shorter while it was read; send it again")
    values = decode(raw, entry.dtype, entry.shape)
    if not np.isfinite(values).all():
        raise refuse(shorten(entry.name), "holds NaN or infinite values; the training diverged")
    return values
