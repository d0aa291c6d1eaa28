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

from control_plane.registry.adapter_config import MAX_CONFIG_BYTES, AdapterConfig, read_adapter_config
from control_plane.registry.base_model import BaseModel
from control_plane.registry.module_plans import ModulePlan, plan_modules
from control_plane.registry.outer_modules import is_same_weight
from control_plane.registry.safetensors_header import FIELD, TensorEntry, read_header, refuse, shorten
from control_plane.registry.tensor_codec import Float32Array, decode, encode

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
RANKS_PER_PAGE = 8  # of the worker's arena
_SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ChunkSink = Callable[[int, bytes], None]  # (chunk index, bytes)


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """One chunk as the manifest has it."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """A packed adapter, without the bytes of its chunks."""

    digest: str
    manifest: bytes
    chunks: tuple[PackedChunk, ...]
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
            raise refuse(
                WEIGHTS_FILE,
                f"{size} bytes, limit {max_adapter_bytes}; raise --max-adapter-bytes, or save with "
                "save_embedding_layers=False: PEFT else stores the base's weight beside adapters on embedding and head",
            )
        # Room for other kinds of adapters too: they are refused by their tensors' names, not by a count.
        max_tensors = 4 * len(base_model.linear_shapes) + 64
        entries = read_header(file, size, max_tensors=max_tensors)
        modules = plan_modules(config, entries, base_model)
        _check_base_weights(file, modules, base_model)
        return _pack(file, config, modules, base_model, sink)


def _check_base_weights(file: BinaryIO, modules: list[ModulePlan], base_model: BaseModel) -> None:
    """PEFT puts a saved weight or bias in the place of the base's: nothing may come of that."""
    for plan in modules:
        outer = base_model.outer_modules.get(plan.name)
        if outer is None:
            continue
        for part, entry, own in (("weight", plan.base_weight, outer.weight), ("bias", plan.base_bias, outer.bias)):
            if entry is not None and (own is None or not is_same_weight(file, entry, own, base_model.dtype)):
                raise refuse(
                    f"{plan.name}.base_layer.{part}",
                    "is not the base model's own; an embedding or head that was trained or resized is not served",
                )


def _pack(
    file: BinaryIO, config: AdapterConfig, modules: list[ModulePlan], base_model: BaseModel, sink: ChunkSink
) -> PackedInfo:
    groups: dict[int | None, list[ModulePlan]] = {}
    for plan in modules:
        groups.setdefault(plan.layer, []).append(plan)
    layers = sorted(layer for layer in groups if layer is not None)
    chunks, packed = [], []
    for index, layer in enumerate([*layers, *([None] if None in groups else [])]):
        data, described = _pack_chunk(file, groups[layer], base_model.dtype)
        sha256, name = hashlib.sha256(data).hexdigest(), "rest" if layer is None else f"layers.{layer}"
        chunks.append({"modules": described, "name": name, "sha256": sha256, "size_bytes": len(data)})
        packed.append(PackedChunk(len(data), sha256))
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
        chunks=tuple(packed),
        kind=config.kind,
        max_rank=max(plan.rank for plan in modules),
        size_bytes=len(manifest) + sum(chunk.size_bytes for chunk in packed),
        arena_bytes=_arena_bytes(modules, ITEMSIZE[base_model.dtype]),
        target_modules=tuple(plan.name for plan in modules),
    )


def _arena_bytes(modules: list[ModulePlan], itemsize: int) -> int:
    """What the adapter takes of a worker's arena, by the formula of docs/protocol.md."""
    columns = math.gcd(*(width for plan in modules for width in plan.widths))
    page_bytes = RANKS_PER_PAGE * columns * itemsize
    num_pages = sum(
        -(-plan.rank // RANKS_PER_PAGE) * sum(-(-width // columns) for width in (plan.in_features, plan.out_features))
        for plan in modules
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
                **({"is_embedding": True} if plan.is_embedding else {}),
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
