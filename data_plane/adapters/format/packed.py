"""Reads the chunks of packed adapters (docs/protocol.md). Trusts nothing it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from data_plane.adapters.format.manifest import ChunkEntry, Manifest, ModuleEntry
from data_plane.errors import AdapterCorrupt, AdapterMismatch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModuleTensors(NamedTuple):
    """One module of a chunk."""

    module: ModuleEntry
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [rank, out]
    vector: torch.Tensor | None  # float32 [out]: the LoRA bias or DoRA's magnitudes, as the entry says


def read_chunk(manifest: Manifest, chunk: ChunkEntry, data: bytes) -> Iterator[ModuleTensors]:
    """Each module of a chunk, checked against the manifest.

    Raises AdapterCorrupt, or AdapterMismatch for a weight that is not finite.
    """
    where = f"adapter {manifest.digest}: chunk {chunk.name}"
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise AdapterCorrupt(f"{where}: {error}") from error
    expected = {f"{module.name}.{side}" for module in chunk.modules for side in _parts(manifest, module)}
    if tensors.keys() != expected:
        raise AdapterCorrupt(f"{where}: tensors {sorted(tensors.keys() ^ expected)[:4]} are missing or too many")
    for module in chunk.modules:
        parts = []
        for side, (dtype, shape, sha256) in _parts(manifest, module).items():
            tensor, name = tensors[f"{module.name}.{side}"], f"{module.name}.{side}"
            if tensor.dtype != dtype or tensor.shape != shape:
                raise AdapterCorrupt(f"{where}: {name} is {tensor.dtype} {tuple(tensor.shape)}, want {dtype} {shape}")
            if hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest() != sha256:
                raise AdapterCorrupt(f"{where}: {name} does not hash to {sha256}")
            if not bool(torch.isfinite(tensor).all()):
                raise AdapterMismatch(f"{where}: {name} holds a value that is not finite")
            parts.append(tensor)
        yield ModuleTensors(module, parts[0], parts[1], parts[2] if module.has_vector else None)


def _parts(manifest: Manifest, module: ModuleEntry) -> dict[str, tuple[torch.dtype, tuple[int, ...], str]]:
    """Dtype, shape and hash of each tensor of a module, in the order of ModuleTensors."""
    dtype = TORCH_DTYPES[manifest.dtype]
    parts: dict[str, tuple[torch.dtype, tuple[int, ...], str]] = {
        "a": (dtype, (module.rank, module.in_features), module.a_sha256),
        "b": (dtype, (module.rank, module.out_features), module.b_sha256),
    }
    for side, sha256 in (("bias", module.bias_sha256), ("magnitude", module.magnitude_sha256)):
        if sha256 is not None:
            parts[side] = (torch.float32, (module.out_features,), sha256)
    return parts
