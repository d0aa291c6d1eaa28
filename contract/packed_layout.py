"""The packed layout of an adapter (docs/protocol.md): names and limits of its manifest, and its size in an arena.

The control plane writes the layout when an adapter is registered, the worker reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FORMAT = 1
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a value, by the manifest's dtype
REST = "rest"  # the chunk of the modules outside the decoder layers
RANKS_PER_PAGE = 8  # rows of A, or columns of B, that one page of an arena holds
_VECTOR_ITEMSIZE = 4  # biases and magnitudes are float32


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """What the size of an adapted module depends on."""

    rank: int
    in_features: int
    out_features: int
    tile_widths: Sequence[int]  # in_features and out_features, without the vocabulary of an embedding or a head
    has_vector: bool  # a bias or magnitudes, [out_features]


def chunk_name(layer: int | None) -> str:
    """The name of the chunk with a decoder layer's modules. None: the modules outside the layers."""
    return REST if layer is None else f"layers.{layer}"


def arena_bytes(modules: Sequence[ModuleSize], dtype: str) -> int:
    """Bytes that an adapter takes of a worker's arena. `dtype` is a key of ITEMSIZE.

    A page holds RANKS_PER_PAGE ranks of one tile. All tiles are as wide as the greatest common divisor of the widths.
    The vectors of all modules are stored together and rounded up to whole pages.
    """
    columns = math.gcd(*(width for module in modules for width in module.tile_widths))
    page_bytes = RANKS_PER_PAGE * columns * ITEMSIZE[dtype]
    num_pages = sum(
        -(-module.rank // RANKS_PER_PAGE)
        * sum(-(-width // columns) for width in (module.in_features, module.out_features))
        for module in modules
    )
    num_values = sum(module.out_features for module in modules if module.has_vector)
    return (num_pages + -(-_VECTOR_ITEMSIZE * num_values // page_bytes)) * page_bytes
