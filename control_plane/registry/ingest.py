"""Turns the files of a PEFT adapter into the packed layout of docs/protocol.md, checking everything on the way.

Runs in a worker thread. One decoder layer is in memory at a time. The same input gives the same bytes, hence the same
digest, on every machine.
"""

from __future__ import annotations

import hashlib
import json
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
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_A": "LoRA on embeddings",
    "lora_embedding_B": "LoRA on embeddings",
    "modules_to_save": "fully trained modules",
    "trainable_tokens_delta": "trained tokens",
    "base_layer": "LoRA on stacked parameters, such as experts",
    "bias": "a LoRA bias",
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
        pairs.setdefault(module, {})[side] = entry
    for module in sorted(pairs):
        for side, other in (("A", "B"), ("B", "A")):
            if side not in pairs[module]:
                raise refuse(f"{module}.lora_{side}", f"is missing, lora_{other} is there; save the adapter again")
        if not config.is_targeted(module):
            raise refuse("target_modules", f"does not name {module}, for which there are tensors; PEFT would drop them")
    for name in config.target_modules or ():
        head = name.rsplit(".", 1)[-1]
        if head in ("lm_head", "embed_out", "embed_tokens", "embed_in"):
            raise refuse("target_modules", f"names {name}; adapters on embeddings and heads are not served")
    for module in sorted(shapes):
        if config.is_targeted(module) and module not in pairs:
            raise refuse(f"{module}.lora_A", "is missing, target_modules names the module; save the adapter again")
    return [
        _plan_module(module, pairs[module]["A"], pairs[module]["B"], config, shapes[module]) for module in sorted(pairs)
    ]


def _split_key(key: str, shapes: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    """Module path and "A" or "B" of a tensor's name: base_model.model.{module}.lora_A.weight."""
    label = shorten(key)
    for part in key.split("."):
        if part in _OTHER_KINDS:
            raise refuse(label, f"belongs to {_OTHER_KINDS[part]}, which is not served; train plain LoRA")
    for side in ("A", "B"):
        suffix = f".lora_{side}.weight"
        if key.startswith(_KEY_PREFIX) and key.endswith(suffix):
            module = key[len(_KEY_PREFIX) : -len(suffix)]
            if module in shapes:
                return module, side
            raise refuse(label, "the base model has no such linear in its decoder layers; is it another model's?")
    raise refuse(label, "is not a LoRA tensor's name: base_model.model.{module}.lora_A.weight or lora_B is expected")


def _plan_module(
    module: str, a: TensorEntry, b: TensorEntry, config: AdapterConfig, shape: tuple[int, int]
) -> ModulePlan:
    out_features, in_features = shape
    rank = config.rank_of(module)
    for side, entry, expected in (("A", a, (rank, in_features)), ("B", b, (out_features, rank))):
        if entry.shape != expected:
            raise refuse(
                f"{module}.lora_{side}",
                f"shape {list(entry.shape)}, expected {list(expected)} (rank {rank} by the config, {out_features} x "
                f"{in_features} of the base model)",
            )
    return ModulePlan(module, a, b, rank, check_scaling(module, config.scaling_of(module)), in_features, out_features)


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
    itemsize = ITEMSIZE[base_model.dtype]
    return PackedInfo(
        digest=hashlib.sha256(manifest).hexdigest(),
        manifest=manifest,
        kind=config.kind,
        max_rank=max(plan.rank for plan in modules),
        size_bytes=len(manifest) + sum(int(chunk["size_bytes"]) for chunk in chunks),  # type: ignore[call-overload]
        arena_bytes=sum(
            -(-plan.rank // RANKS_PER_PAGE) * RANKS_PER_PAGE * (plan.in_features + plan.out_features) * itemsize
            for plan in modules
        ),
        target_modules=tuple(plan.name for plan in modules),
    )


def _pack_chunk(file: BinaryIO, modules: list[ModulePlan], dtype: str) -> tuple[bytes, list[dict[str, Any]]]:
    """One chunk's bytes and the manifest's description of its modules."""
    header: dict[str, Any] = {}
    payload: list[bytes] = []
    described = []
    position = 0
    for plan in modules:
        hashes = {}
        for side, entry, columns in (("a", plan.a, plan.in_features), ("b", plan.b, plan.out_features)):
            values = _read_finite(file, entry)
            raw = encode(values if side == "a" else np.ascontiguousarray(values.T), dtype)
            if raw is None:
                raise refuse(shorten(entry.name), f"holds a value too large for {dtype}, the base model's type")
            hashes[side] = hashlib.sha256(raw).hexdigest()
            header[f"{plan.name}.{side}"] = {
                "data_offsets": [position, position + len(raw)],
                "dtype": _SAFETENSORS_DTYPE[dtype],
                "shape": [plan.rank, columns],
            }
            payload.append(raw)
            position += len(raw)
        described.append(
            {
                "a_sha256": hashes["a"],
                "b_sha256": hashes["b"],
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
