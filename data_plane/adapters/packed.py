"""Reads the chunks of packed adapters (docs/protocol.md). Trusts nothing it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from data_plane.adapters.manifest import ChunkEntry, Manifest, ModuleEntry
from data_plane.errors import AdapterCorrupt, AdapterMismatch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_chunk(
    manifest: Manifest, chunk: ChunkEntry, data: bytes
) -> Iterator[tuple[ModuleEntry, torch.Tensor, torch.Tensor]]:
    """Each module of a chunk with A [rank, in] and B [rank, out], checked against the manifest.

    Raises AdapterCorrupt, or AdapterMismatch for a weight that is not finite.
    """
    where = f"adapter {manifest.digest}: chunk {chunk.name}"
    dtype = TORCH_DTYPES[manifest.dtype]
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise AdapterCorrupt(f"{where}: {error}") from error
    expected = {f"{module.name}.{side}" for module in chunk.modules for side in "ab"}
    if tensors.keys() != expected:
        raise AdapterCorrupt(f"{where}: tensors {sorted(tensors.keys() ^ expected)[:4]} are missing or too many")
    for module in chunk.modules:
        a, b = tensors[f"{module.name}.a"], tensors[f"{module.name}.b"]
        sides = (("a", a, module.in_features, module.a_sha256), ("b", b, module.out_features, module.b_sha256))
        for side, tensor, width, sha256 in sides:
            if tensor.dtype != dtype or tensor.shape != (module.rank, width):
                raise AdapterCorrupt(
                    f"{where}: {module.name}.{side} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"want {dtype} {(module.rank, width)}"
                )
            if hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest() != sha256:
                raise AdapterCorrupt(f"{where}: {module.name}.{side} does not hash to {sha256}")
            if not bool(torch.isfinite(tensor).all()):
                raise AdapterMismatch(f"{where}: {module.name}.{side} holds a value that is not finite")
        yield module, a, b
