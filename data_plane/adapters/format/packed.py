"""Reads the chunks of packed adapters (docs/protocol.md). Does not trust its input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from contract.packed_layout import SCORE_BIAS, SCORE_WEIGHT
from data_plane.adapters.format.manifest import ChunkEntry, Manifest, ModuleEntry, RowsEntry
from data_plane.adapters.format.paged import MatrixPages, PagedChunk, PagedModule, read_paged
from data_plane.errors import AdapterCorrupt, AdapterMismatch
from data_plane.plan import ChunkBytes

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS = {4: torch.int32, 2: torch.int16}  # how the bits of a value are looked at, by its bytes
# By dtype, the bits of infinity: those of the exponent. Values of larger bits, without the sign, are NaN.
_INFINITY = {
    dtype: int(torch.tensor(float("inf"), dtype=dtype).view(_BITS[dtype.itemsize]).item())
    for dtype in TORCH_DTYPES.values()
}


class ModuleTensors(NamedTuple):
    """One module of a chunk."""

    module: ModuleEntry
    tensors: Mapping[str, torch.Tensor]  # by the names of the kind's parts


class RowTensors(NamedTuple):
    """Rows of a chunk, in rising order of their token ids."""

    entry: RowsEntry
    ids: torch.Tensor  # int32 [num_rows]
    rows: torch.Tensor  # [num_rows, width] in the adapter's dtype
    bias: torch.Tensor | None  # float32 [num_rows]


def read_rows(manifest: Manifest, chunk: ChunkEntry, data: ChunkBytes) -> Iterator[RowTensors]:
    """The rows of a chunk; checked as read_chunk checks modules. The ids are not compared with the model."""
    where = f"adapter {manifest.digest}: chunk {chunk.name}"
    found = _load(data, where)
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for entry in chunk.rows:
        dtype, count = TORCH_DTYPES[manifest.dtype], entry.num_rows
        wanted[f"{entry.name}.row_ids"] = (torch.int32, (count,))
        wanted[f"{entry.name}.rows"] = (dtype, (count, entry.width))
        if entry.has_bias:
            wanted[f"{entry.name}.row_bias"] = (torch.float32, (count,))
    _check_names(found, wanted, where)
    for name, (dtype, shape) in wanted.items():
        _check_tensor(found[name], name, dtype, shape, where)
    for entry in chunk.rows:
        name = entry.name
        yield RowTensors(entry, found[f"{name}.row_ids"], found[f"{name}.rows"], found.get(f"{name}.row_bias"))


def read_chunk(manifest: Manifest, chunk: ChunkEntry, data: ChunkBytes) -> Iterator[ModuleTensors]:
    """Each module of a chunk, its tensors' names, shapes and types checked against the manifest.

    The source has verified the chunk's bytes (verify_chunk). Their hash covers the header and all tensors, so that no
    tensor is hashed again. Raises AdapterCorrupt, or AdapterMismatch for a weight that is not finite.
    """
    where = f"adapter {manifest.digest}: chunk {chunk.name}"
    if manifest.page_columns is not None:
        paged = read_paged(manifest, chunk, data)
        for entry in paged.modules:
            read = module_tensors(paged, entry, TORCH_DTYPES[manifest.dtype])
            for name in sorted({"a", "b"} & read.tensors.keys()):
                if not is_finite(read.tensors[name]):
                    raise AdapterMismatch(f"{where}: {entry.entry.name}.{name} holds a value that is not finite")
            yield read
        return
    found = _load(data, where)
    _check_names(found, {f"{module.name}.{part.name}" for module in chunk.modules for part in module.kind.parts}, where)
    for module in chunk.modules:
        tensors = {}
        for part in module.kind.parts:
            name = f"{module.name}.{part.name}"
            tensor = tensors[part.name] = found[name]
            _check_tensor(tensor, name, TORCH_DTYPES[part.dtype or manifest.dtype], part.shape(module), where)
        yield ModuleTensors(module, tensors)


def module_tensors(chunk: PagedChunk, module: PagedModule, dtype: torch.dtype) -> ModuleTensors:
    """Copies of the tensors of one module in pages."""

    def matrix(part: MatrixPages) -> torch.Tensor:
        return torch.from_numpy(chunk.matrix(part)).view(dtype)

    tensors = {}
    for part in module.entry.kind.parts:
        if part.is_vector:
            tensors[part.name] = torch.from_numpy(chunk.vectors[f"{module.entry.name}.{part.name}"].copy())
        else:
            tensors[part.name] = matrix(module.a if part.name == "a" else module.b)
    return ModuleTensors(module.entry, tensors)


def read_score_head(manifest: Manifest, chunk: ChunkEntry, data: ChunkBytes) -> torch.Tensor:
    """The values of the score head's chunk, float32 [num_values]: the weight, then the bias. Raises as read_chunk."""
    head = manifest.head
    assert head is not None, "a chunk without modules and rows belongs to a score head"
    where = f"adapter {manifest.digest}: chunk {chunk.name}"
    shapes: dict[str, tuple[int, ...]] = {SCORE_WEIGHT: (head.num_labels, head.in_features)}
    if head.has_bias:
        shapes[SCORE_BIAS] = (head.num_labels,)
    found = _load(data, where)
    _check_names(found, shapes.keys(), where)
    for name, shape in shapes.items():
        _check_tensor(found[name], name, torch.float32, shape, where)
    return torch.cat([found[name].reshape(-1) for name in shapes])


def _load(data: ChunkBytes, where: str) -> dict[str, torch.Tensor]:
    try:
        return load_safetensors(bytes(data))
    except SafetensorError as error:
        raise AdapterCorrupt(f"{where}: {error}") from error


def _check_names(found: Mapping[str, torch.Tensor], expected: Collection[str], where: str) -> None:
    if wrong := sorted(found.keys() ^ set(expected)):
        raise AdapterCorrupt(f"{where}: tensors {wrong[:4]} are missing or too many")


def _check_tensor(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise AdapterCorrupt(f"{where}: {name} is {tensor.dtype} {tuple(tensor.shape)}, want {dtype} {shape}")
    if not is_finite(tensor):
        raise AdapterMismatch(f"{where}: {name} holds a value that is not finite")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value of a tensor on the host is: of none of them all bits of the exponent are set.

    By numpy, in this thread alone: torch's threads wait by spinning, which takes cores from the steps beside a load.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    bits = tensor.contiguous().view(_BITS[tensor.itemsize]).numpy()
    # With the sign as a sign positive values are the largest ones, with the sign as a bit negative values are.
    unsigned, infinity = bits.view(f"u{tensor.itemsize}"), _INFINITY[tensor.dtype]
    return int(bits.max()) < infinity and int(unsigned.max()) < infinity | 1 << 8 * tensor.itemsize - 1
