"""Writes a checkpoint whose weights are a base checkpoint's with one adapter merged in; for `motet convert merge`.

The files are the base's, with the same names and tensors, in the base's dtypes. One tensor is in memory at a time, and
slices of it in float32: a value is rounded once. Tensors that the adapter does not change keep every bit. Where the
base ties embedding and head and the adapter changes one of them, the result has a weight for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch

from data_plane.merging.module_tree import BIAS, STACKED_PARTS, WEIGHT, ModuleTree, Place
from data_plane.merging.packed_files import PackedFiles
from data_plane.merging.weights import (
    BIASES,
    PARTS,
    CannotMerge,
    merge_matrix,
    merged_bias,
    of_outputs,
    with_row_biases,
    with_rows,
)
from data_plane.models.checkpoint.shards import Shard, StoredTensor, shards_of, write_shard

_SLICE_VALUES = 16 << 20  # of a weight that are float32 at a time
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written."""

    num_changed: int  # tensors
    size_bytes: int  # of all tensors
    vocab_size: int | None  # None: the base's
    is_untied: bool  # embedding and head had one weight in the base, and have two
    weight_map: dict[str, str]  # the file of each tensor


def merge_checkpoint(model_dir: Path, packed_dir: Path, out: Path, tree: ModuleTree) -> Merged:
    """Write the safetensors files into `out`. Raises CannotMerge, or ConfigError for a base that cannot be read."""
    packed = PackedFiles(packed_dir)
    _check_kind(packed)
    merge = _Merge(packed, tree)
    shards = list(shards_of(model_dir))
    weight_map: dict[str, str] = {}
    size_bytes = 0
    for shard, planned in zip(shards, merge.plan(shards), strict=True):
        by_tensor = {written.tensor: written for written in planned}
        read = partial(_read, merge, shard, by_tensor)
        write_shard(out / shard.name, list(by_tensor), shard.metadata, read)
        weight_map |= {tensor.name: shard.name for tensor in by_tensor}
        size_bytes += sum(tensor.size_bytes for tensor in by_tensor)
    return Merged(merge.num_changed, size_bytes, packed.manifest.num_tokens, merge.is_untied, weight_map)


def _read(merge: _Merge, shard: Shard, by_tensor: dict[StoredTensor, _Written], tensor: StoredTensor) -> torch.Tensor:
    return merge.read(shard, by_tensor[tensor])


def _check_kind(packed: PackedFiles) -> None:
    manifest = packed.manifest
    if manifest.alora_invocation_tokens:
        raise CannotMerge(
            "alora_invocation_tokens: an activated LoRA acts from these tokens on, and merged weights act on all "
            "tokens; serve it as an adapter"
        )
    if manifest.rope is not None:
        raise CannotMerge(
            "rope_scaling: the adapter has its own rotary embedding, which is not a weight; serve it as an adapter, "
            "or merge it without the field and put it into config.json of the result"
        )
    if manifest.head is not None:
        raise CannotMerge("score: a causal language model has no place for a score head; serve it as an adapter")
    for name in packed.modules:
        if unknown := sorted({part.name for part in packed.module(name).module.kind.parts} - PARTS):
            raise CannotMerge(f"{name} has {', '.join(unknown)}, which cannot be merged; serve it as an adapter")


class _Written(NamedTuple):
    """A tensor of the result."""

    tensor: StoredTensor
    source: str  # the base's tensor
    place: Place | None  # None: it is copied


class _Merge:
    """One base checkpoint and one adapter."""

    def __init__(self, packed: PackedFiles, tree: ModuleTree) -> None:
        self._packed = packed
        self._tree = tree
        self._vocab_size = packed.manifest.num_tokens
        changed = packed.modules.keys() | packed.rows.keys()
        # Embedding and head; only these may get another number of rows.
        self._of_tokens = {name for name in (tree.head_name, tree.embedding_name) if name is not None}
        is_affected = bool(self._of_tokens & changed) or self._vocab_size is not None
        self._is_tied = tree.are_tied and is_affected
        self.is_untied = self._is_tied and not self._has_equal_rows()
        self.num_changed = 0

    def plan(self, shards: Sequence[Shard]) -> list[list[_Written]]:
        """The tensors of each file. Raises CannotMerge for a part of the adapter that no tensor takes."""
        planned = [[written for tensor in shard.tensors for written in self._written(tensor)] for shard in shards]
        taken = {part for file in planned for written in file for part in self._parts_at(written)}
        if self._is_tied and not self.is_untied:
            taken.add(Place(str(self._tree.head_name), WEIGHT))
        for name, part in sorted(self._changed - taken):
            if part == BIAS:
                raise CannotMerge(
                    f"{name} has a bias, and the base model has none there, so that its checkpoint has no place for "
                    "it; serve it as an adapter"
                )
            raise CannotMerge(
                f"{name}: no tensor of the checkpoint is its weight alone; merge with PEFT's merge_and_unload"
            )
        return planned

    def read(self, shard: Shard, written: _Written) -> torch.Tensor:
        """The values of one tensor of the result."""
        tensor, place = shard.read(written.source), written.place
        names = self._modules_at(written)
        if place is None or not (names or self._parts_at(written) or written.tensor.shape != tensor.shape):
            return tensor
        self.num_changed += 1
        if place.part == BIAS:
            changed = self._merged_bias(place.module, tensor)
        else:
            views = self._tree.expert_views(place, tensor)
            if not views:
                views = {place.module: tensor.T if self._tree.is_transposed(place.module) else tensor}
            for name in names:
                self._merge_weight(name, views[name])
            changed = self._with_rows(place.module, tensor)
        if not torch.isfinite(changed).all():
            raise CannotMerge(
                f"{written.tensor.name}: a merged value is not finite in the base's type {written.tensor.dtype}; "
                "convert the base to bfloat16 or float32 first, or serve it as an adapter"
            )
        return changed

    def _written(self, tensor: StoredTensor) -> Iterator[_Written]:
        place = self._tree.place_of(tensor.name)
        if self._is_tied and place == Place(str(self._tree.head_name), WEIGHT):
            return  # a second copy of the weight that both share
        written = self._sized(tensor, tensor.name, place)
        if self._parts_at(written) and tensor.dtype not in _FLOATS:
            raise CannotMerge(
                f"{tensor.name} is quantised ({tensor.dtype}), and a merged value has no place in its codes; serve the "
                "adapter over this base, or merge it into the checkpoint that the base was made of"
            )
        yield written
        if self.is_untied and place == Place(str(self._tree.embedding_name), WEIGHT):
            head = Place(str(self._tree.head_name), WEIGHT)
            yield self._sized(tensor._replace(name=f"{head.module}.{head.part}"), tensor.name, head)

    def _sized(self, tensor: StoredTensor, source: str, place: Place | None) -> _Written:
        if self._vocab_size is not None and place is not None and place.module in self._of_tokens:
            tensor = tensor._replace(shape=(self._vocab_size, *tensor.shape[1:]))
        return _Written(tensor, source, place)

    @cached_property
    def _changed(self) -> set[Place]:
        """What the adapter changes."""
        found: set[Place] = set()
        for chunk in self._packed.manifest.chunks:
            for entry in chunk.modules:
                names = {part.name for part in entry.kind.parts}
                found |= {Place(entry.name, BIAS)} if names & BIASES else set()
                found |= {Place(entry.name, WEIGHT)} if names - BIASES else set()
            for rows in chunk.rows:
                found |= {Place(rows.name, WEIGHT)} | ({Place(rows.name, BIAS)} if rows.has_bias else set())
        return found

    def _modules_at(self, written: _Written) -> list[str]:
        """The modules with a product in a tensor: of stacked experts, many."""
        parts = self._parts_at(written)
        return [part.module for part in parts if part.part == WEIGHT and part.module in self._packed.modules]

    def _parts_at(self, written: _Written) -> list[Place]:
        """What the adapter changes in a tensor."""
        place = written.place
        if place is None:
            return []
        if place.part not in STACKED_PARTS:
            return [place] if place in self._changed else []
        num_experts, projections = written.tensor.shape[0], STACKED_PARTS[place.part]
        names = [f"{place.module}.{index}.{one}" for index in range(num_experts) for one in projections]
        return [found for name in names if (found := Place(name, WEIGHT)) in self._changed]

    def _merge_weight(self, name: str, weight: torch.Tensor) -> None:
        """Change a view [out, in] of a tensor, some outputs at a time."""
        part = self._packed.module(name)
        tensors = {key: value.float() for key, value in part.tensors.items()}
        num_outputs = min(len(weight), tensors["b"].shape[1]) if "b" in tensors else len(weight)
        count = max(_SLICE_VALUES // weight.shape[1], 1)
        for begin in range(0, num_outputs, count):
            outputs = slice(begin, min(begin + count, num_outputs))
            values = weight[outputs].float()
            merge_matrix(values, of_outputs(tensors, outputs), part.module.scaling)
            weight[outputs] = values.to(weight.dtype)

    def _merged_bias(self, name: str, bias: torch.Tensor) -> torch.Tensor:
        dtype, size = bias.dtype, self._vocab_size if name in self._of_tokens else None
        if name in self._packed.modules:
            part = self._packed.module(name)
            tensors = {key: value.float() for key, value in part.tensors.items() if key in BIASES}
            bias = merged_bias(bias.float(), tensors, part.module.scaling) if tensors else bias
        return with_row_biases(bias, self._packed.read_rows(name), size or len(bias)).to(dtype)

    def _with_rows(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name not in self._of_tokens:
            return weight
        return with_rows(weight, self._packed.read_rows(name), self._vocab_size or len(weight))

    def _has_equal_rows(self) -> bool:
        """Whether embedding and head get the same rows and nothing else, so that they may share them."""
        if self._of_tokens & self._packed.modules.keys() or self._of_tokens & {
            p.module for p in self._changed if p.part == BIAS
        }:
            return False
        first, second = (self._packed.read_rows(name) for name in sorted(self._of_tokens))
        return len(first) == len(second) and all(
            torch.equal(one.ids, other.ids) and torch.equal(one.rows, other.rows)
            for one, other in zip(first, second, strict=True)
        )
