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
SCORE_HEAD = "score_head"  # the chunk of the score head, which has no modules, and the manifest's key for its sizes
SCORE_WEIGHT, SCORE_BIAS = "score.weight", "score.bias"  # its tensors
RANKS_PER_PAGE = 8  # rows of A, or columns of B, that one page of an arena holds
_VECTOR_ITEMSIZE = 4  # biases and magnitudes are float32
# An output that is at most this part of its input, such as a router's, does not narrow the pages of all other modules.
_NARROW_OUT = 1 / 16


@dataclass(frozen=True, slots=True)
class ScoreHeadSize:
    """What the size of a score head depends on."""

    num_labels: int
    in_features: int
    has_bias: bool

    @property
    def num_values(self) -> int:
        """float32 values: the weight [num_labels, in_features], then the bias [num_labels]."""
        return self.num_labels * (self.in_features + self.has_bias)


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """What the size of an adapted module depends on."""

    rank: int
    in_features: int
    out_features: int
    is_embedding: bool  # leads from the vocabulary
    is_head: bool  # leads to the vocabulary
    num_vectors: int  # float32 [out_features]: biases and magnitudes

    @property
    def page_widths(self) -> tuple[int, ...]:
        """The widths that whole pages are made for."""
        return page_widths(self.in_features, self.out_features, is_embedding=self.is_embedding, is_head=self.is_head)


@dataclass(frozen=True, slots=True)
class RowsSize:
    """What the size of rows that replace those of an embedding or a head depends on."""

    num_rows: int
    width: int  # the hidden size
    has_bias: bool  # of a head's rows

    @property
    def num_values(self) -> int:
        """Values of 4 bytes beside the rows: the token ids, and the biases."""
        return self.num_rows * (2 if self.has_bias else 1)


def page_widths(in_features: int, out_features: int, *, is_embedding: bool, is_head: bool) -> tuple[int, ...]:
    """The widths of a module that whole pages are made for. Of another width the last page has unused columns.

    That is the vocabulary, and an output that is narrow beside its input.
    """
    if is_embedding:
        return (out_features,)
    if is_head or out_features <= in_features * _NARROW_OUT:
        return (in_features,)
    return (in_features, out_features)


def chunk_name(layer: int | None) -> str:
    """The name of the chunk with a decoder layer's modules. None: the modules outside the layers."""
    return REST if layer is None else f"layers.{layer}"


def arena_bytes(
    modules: Sequence[ModuleSize], dtype: str, rows: Sequence[RowsSize] = (), head: ScoreHeadSize | None = None
) -> int:
    """Bytes that an adapter takes of a worker's arena. `dtype` is a key of ITEMSIZE.

    A page holds RANKS_PER_PAGE ranks of one tile. All tiles are as wide as the greatest common divisor of page_widths.
    The vectors of all modules, and then the score head, are stored together and rounded up to whole pages. Rows of an
    embedding or a head lie as ranks do, and their ids and biases as vectors do.
    """
    columns = math.gcd(*(width for module in modules for width in module.page_widths), *(part.width for part in rows))
    page_bytes = RANKS_PER_PAGE * columns * ITEMSIZE[dtype]
    num_pages = sum(
        -(-module.rank // RANKS_PER_PAGE)
        * sum(-(-width // columns) for width in (module.in_features, module.out_features))
        for module in modules
    )
    num_pages += sum(-(-part.num_rows // RANKS_PER_PAGE) * -(-part.width // columns) for part in rows)
    num_values = sum(module.out_features * module.num_vectors for module in modules)
    num_values += sum(part.num_values for part in rows)
    num_values += 0 if head is None else head.num_values
    return (num_pages + -(-_VECTOR_ITEMSIZE * num_values // page_bytes)) * page_bytes
