"""Reads the chunks of packed adapters (docs/protocol.md). Does not trust its input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    tensors: Mapping[str, torch.Tensor]  # by the names of the kind's parts


def read_chunk(manifest: Manifest, chunk: ChunkEntry, data: bytes) -> Iterator[ModuleTensors]:
    """Each module of a chunk, its tensors' names, shapes and types checked against the manifest.

    The source has verified the chunk's bytes (verify_chunk). Their hash covers the header and all tensors, so that no
    tensor is hashed again. Raises AdapterCorrupt, or AdapterMismatch for a weight that is not finite.
    """
    where = f"adapter {manifest.digest}: chunk {chunk.name}"
    try:
        found = load_safetensors(data)
    except SafetensorError as error:
        raise AdapterCorrupt(f"{where}: {error}") from error
    expected = {f"{module.name}.{part.name}" for module in chunk.modules for part in module.kind.parts}
    if found.keys() != expected:
        raise AdapterCorrupt(f"{where}: tensors {sorted(found.keys() ^ expected)[:4]} are missing or too many")
    for module in chunk.modules:
        tensors = {}
        for part in module.kind.parts:
            name = f"{module.name}.{part.name}"
            tensor = tensors[part.name] = found[name]
            dtype, shape = TORCH_DTYPES[part.dtype or manifest.dtype], part.shape(module)
            if tensor.dtype != dtype or tensor.shape != shape:
                raise AdapterCorrupt(f"{where}: {name} is {tensor.dtype} {tuple(tensor.shape)}, want {dtype} {shape}")
            if not bool(torch.isfinite(tensor).all()):
                raise AdapterMismatch(f"{where}: {name} holds a value that is not finite")
        yield ModuleTensors(module, tensors)
