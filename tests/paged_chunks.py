"""Pages of packed adapters for tests, written from docs/protocol.md and not with the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def to_pages(matrix: torch.Tensor, columns: int) -> list[torch.Tensor]:
    """The pages [8, columns] of a matrix [rank, width], one by one."""
    pages = []
    for row in range(0, matrix.shape[0], 8):
        for column in range(0, matrix.shape[1], columns):
            page = torch.zeros(8, columns, dtype=matrix.dtype)
            part = matrix[row : row + 8, column : column + columns]
            page[: part.shape[0], : part.shape[1]] = part
            pages.append(page)
    return pages


def from_pages(pages: Sequence[torch.Tensor], rank: int, width: int) -> torch.Tensor:
    """The matrix of such pages."""
    columns = pages[0].shape[1]
    matrix = torch.zeros(-(-rank // 8) * 8, -(-width // columns) * columns, dtype=pages[0].dtype)
    places = [(row, column) for row in range(0, rank, 8) for column in range(0, width, columns)]
    for (row, column), page in zip(places, pages, strict=True):
        matrix[row : row + 8, column : column + columns] = page
    assert not matrix[rank:].any() and not matrix[:, width:].any(), "a page has values beyond its matrix"
    return matrix[:rank, :width]


def write_chunk(pages: Sequence[torch.Tensor], vectors: Mapping[str, torch.Tensor]) -> bytes:
    """A chunk: safetensors with the pages first, then the vectors in their order."""
    tensors = {"pages": torch.stack(list(pages)), **vectors}
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        shape = list(tensor.shape)
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def read_chunk(manifest: bytes, index: int, chunk: bytes) -> dict[str, torch.Tensor]:
    """The tensors of the chunk of this index by name, with "<module>.a" and "<module>.b" in the place of the pages."""
    described = json.loads(manifest)
    tensors = safetensors.torch.load(chunk)
    pages = list(tensors.pop("pages"))
    assert all(page.shape == (8, described["page_columns"]) for page in pages)
    for module in described["chunks"][index]["modules"]:
        for name, width in (("a", module["in_features"]), ("b", module["out_features"])):
            count = -(-module["rank"] // 8) * -(-width // described["page_columns"])
            matrix = from_pages(pages[:count], module["rank"], width)
            pages = pages[count:]
            if name in module["parts"]:
                tensors[f"{module['name']}.{name}"] = matrix
            else:
                assert not matrix.any(), "a module without matrices has zeros"
    assert not pages
    return tensors


def read_arrays(manifest: bytes, chunks: Sequence[bytes]) -> dict[str, Any]:
    """Those of all chunks as numpy arrays."""
    found: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        found.update({name: tensor.numpy() for name, tensor in read_chunk(manifest, index, chunk).items()})
    return found
