"""The packed layout of an adapter (docs/protocol.md): names and limits of its manifest, and its size in an arena.

The control plane writes the layout when an adapter is registered, the worker reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FORMAT = 2  # what is written
# What is read. In format 1 a chunk has each module's matrices as they are, and the manifest a hash of every tensor.
READ_FORMATS = (1, 2)
PAGES = "pages"  # the tensor of a chunk that has the matrices of all its modules
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

    def num_pages(self, columns: int) -> int:
        """Pages of so many columns that A and B take."""
        return sum(num_pages_of(self.rank, width, columns) for width in (self.in_features, self.out_features))


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
    if is_head or is_narrow(in_features, out_features):
        return (in_features,)
    return (in_features, out_features)


def is_narrow(in_features: int, out_features: int) -> bool:
    """Whether a module's output is narrow beside its input, such as a router's."""
    return out_features <= in_features * _NARROW_OUT


def chunk_name(layer: int | None) -> str:
    """The name of the chunk with a decoder layer's modules. None: the modules outside the layers."""
    return REST if layer is None else f"layers.{layer}"


def arena_bytes(
    modules: Sequence[ModuleSize], dtype: str, rows: Sequence[RowsSize] = (), head: ScoreHeadSize | None = None
) -> int:
    """Bytes that an adapter takes of a worker's arena. `dtype` is a key of ITEMSIZE.

    A page holds RANKS_PER_PAGE ranks of `page_columns` columns. The vectors of all modules, and then the score head,
    are stored together and rounded up to whole pages. Rows of an embedding or a head lie as ranks do, and their ids
    and biases as vectors do.
    """
    columns = page_columns(modules, rows)
    page_bytes = RANKS_PER_PAGE * columns * ITEMSIZE[dtype]
    num_pages = sum(module.num_pages(columns) for module in modules)
    num_pages += sum(num_pages_of(part.num_rows, part.width, columns) for part in rows)
    num_values = sum(module.out_features * module.num_vectors for module in modules)
    num_values += sum(part.num_values for part in rows)
    num_values += 0 if head is None else head.num_values
    return (num_pages + -(-_VECTOR_ITEMSIZE * num_values // page_bytes)) * page_bytes


def page_columns(modules: Sequence[ModuleSize], rows: Sequence[RowsSize] = ()) -> int:
    """The columns of an adapter's pages: the greatest common divisor of the widths that whole pages are made for.

    An arena's pages may be narrower, for the sake of other modules of the model; their width divides this one.
    """
    return math.gcd(*(width for module in modules for width in module.page_widths), *(part.width for part in rows))


def num_pages_of(rank: int, width: int, columns: int) -> int:
    """Pages of so many columns that a matrix [rank, width] takes: for each RANKS_PER_PAGE ranks a row of pages."""
    return -(-rank // RANKS_PER_PAGE) * -(-width // columns)
