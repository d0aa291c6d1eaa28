"""What an adapter makes of one weight, one bias, and the rows of an embedding or a head. All merging uses these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

PARTS = frozenset({"a", "b", "magnitude", "dora_scale", "bias", "base_bias"})
BIASES = frozenset({"bias", "base_bias"})
_OUTPUT_VECTORS = ("magnitude", "dora_scale")


class CannotMerge(Exception):
    """The adapter has a part that cannot be merged. The message names no paths: clients see it."""


class ReplacedRows(NamedTuple):
    """Rows that take the place of an embedding's or a head's."""

    ids: torch.Tensor  # int32 [rows]
    rows: torch.Tensor  # [rows, width]
    bias: torch.Tensor | None  # float32 [rows]


def merge_matrix(weight: torch.Tensor, tensors: Mapping[str, torch.Tensor], scaling: float) -> None:
    """Put W + scaling * B A, with DoRA's norms, into a float32 weight [out, in] or a view of one.

    `tensors` are float32 by the names of a kind's parts; a is [rank, in] and b [rank, out].
    """
    if "a" in tensors:
        a, b = tensors["a"], tensors["b"]
        weight = weight[: b.shape[1], : a.shape[1]]  # a view: an adapter's vocabulary may be the smaller one
        weight += scaling * b.T @ a
    if "magnitude" in tensors:
        weight *= (tensors["magnitude"] / torch.linalg.vector_norm(weight, dim=1)).unsqueeze(1)
    if "dora_scale" in tensors:
        weight *= tensors["dora_scale"].unsqueeze(1)


def of_outputs(tensors: Mapping[str, torch.Tensor], outputs: slice) -> dict[str, torch.Tensor]:
    """What `merge_matrix` needs for some outputs of a weight."""
    found = {name: tensors[name][outputs] for name in _OUTPUT_VECTORS if name in tensors}
    if "a" in tensors:
        found |= {"a": tensors["a"], "b": tensors["b"][:, outputs]}
    return found


def merged_bias(own: torch.Tensor | None, tensors: Mapping[str, torch.Tensor], scaling: float) -> torch.Tensor:
    """The float32 bias [out] of a module. `own`: the base model's; None: it has none."""
    bias = tensors.get("base_bias", own)
    if "bias" in tensors:  # LoRA's: scaled with the product
        added = scaling * tensors["bias"]
        bias = added if bias is None else bias + added
    assert bias is not None, "the adapter has one of the two"
    return bias.clone()


def with_rows(weight: torch.Tensor, parts: Sequence[ReplacedRows], size: int) -> torch.Tensor:
    """A copy of the weight [vocabulary, width] of an embedding or a head with `size` rows, some of them replaced."""
    changed = weight.new_zeros(size, weight.shape[1])
    kept = min(size, len(weight))
    changed[:kept] = weight[:kept]
    for part in parts:
        changed[part.ids.long()] = part.rows.to(changed.dtype)
    return changed


def with_row_biases(bias: torch.Tensor, parts: Sequence[ReplacedRows], size: int) -> torch.Tensor:
    """A copy of the bias [vocabulary] likewise."""
    changed = bias.new_zeros(size)
    kept = min(size, len(bias))
    changed[:kept] = bias[:kept]
    for part in parts:
        if part.bias is not None:
            changed[part.ids.long()] = part.bias.to(changed.dtype)
    return changed
