"""The embedding and the head of a base checkpoint: their names in the module tree, shapes and values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from control_plane.registry.model.served_modules import ModuleKind, ServedModule
from control_plane.registry.peft.safetensors_header import ITEMSIZE, TensorEntry
from control_plane.registry.peft.tensor_codec import decode, encode

_EMBEDDING = re.compile(r"^(?:[a-z_0-9]+\.)*(?P<name>embed_tokens|embed_in|word_embeddings|wte)\.weight\Z")
_HEAD = re.compile(r"^(?:[a-z_0-9]+\.)*(?:lm_head|embed_out)\.(?P<part>weight|bias)\Z")
_HEAD_MODULE = "lm_head"  # in transformers' tree, whatever the checkpoint calls it
_SLICE_VALUES = 4 << 20  # compared at a time


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Where a tensor's bytes lie."""

    path: Path
    dtype: str  # of safetensors
    shape: tuple[int, ...]
    start: int  # bytes into the file


@dataclass(frozen=True, slots=True)
class OuterModule:
    """The embedding or the head."""

    is_embedding: bool
    weight: CheckpointTensor  # [vocabulary, hidden]; the embedding's where the head is tied to it
    bias: CheckpointTensor | None = None  # [vocabulary]; of some heads

    @property
    def linear_shape(self) -> tuple[int, int]:
        """(out_features, in_features) as an adapter has them: an embedding leads from the vocabulary."""
        vocab_size, hidden = self.weight.shape
        return (hidden, vocab_size) if self.is_embedding else (vocab_size, hidden)


def find_outer_modules(
    config: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor], layers_path: str
) -> dict[str, OuterModule]:
    """Both by module path, or only what is known for certain."""
    embeddings = [(match["name"], tensors[name]) for name in tensors if (match := _EMBEDDING.match(name))]
    found = [(match["part"], tensors[name]) for name in tensors if (match := _HEAD.match(name))]
    heads, biases = ([tensor for part, tensor in found if part == wanted] for wanted in ("weight", "bias"))
    if len(embeddings) != 1 or len(heads) > 1 or len(biases) > 1 or len(embeddings[0][1].shape) != 2:
        return {}
    name, weight = embeddings[0]
    is_tied = config.get("tie_word_embeddings") is True or not heads
    return {
        f"{layers_path.rpartition('.')[0]}.{name}": OuterModule(True, weight),
        _HEAD_MODULE: OuterModule(False, weight if is_tied else heads[0], biases[0] if biases else None),
    }


def find_own(tensors: Mapping[str, CheckpointTensor], name: str, module: ServedModule) -> OuterModule | None:
    """The tensors of a head or an embedding of that path; None unless there is exactly one weight that they can be.

    A checkpoint may leave out the beginning of a path, or have more of it. A head without a weight is tied to the
    embedding, whose path is another one: it is not found.
    """
    is_embedding = module.kind is ModuleKind.EMBEDDING
    rows, columns = module.in_features, module.out_features
    shape = (rows, columns) if is_embedding else (columns, rows)
    weights = [t for tensor, t in tensors.items() if t.shape == shape and _is_of(tensor, name, "weight")]
    biases = [t for tensor, t in tensors.items() if t.shape == shape[:1] and _is_of(tensor, name, "bias")]
    if len(weights) != 1 or len(biases) > 1:
        return None
    return OuterModule(is_embedding, weights[0], biases[0] if biases and not is_embedding else None)


def _is_of(tensor: str, module: str, part: str) -> bool:
    path = tensor.removesuffix(f".{part}")
    return path != tensor and (path == module or path.endswith(f".{module}") or module.endswith(f".{path}"))


def is_same_weight(file: BinaryIO, entry: TensorEntry, weight: CheckpointTensor, dtype: str) -> bool:
    """Whether a tensor of an adapter's file is the base model's own, both as they would be served in `dtype`.

    Equal bytes of one type are, whatever they hold; only where they differ are values looked at.
    """
    if entry.shape != weight.shape or weight.dtype not in ITEMSIZE:
        return False
    num_values = math.prod(weight.shape)
    with weight.path.open("rb") as base:
        for begin in range(0, num_values, _SLICE_VALUES):
            count = min(_SLICE_VALUES, num_values - begin)
            ours = _read_slice(file, entry.start, entry.dtype, begin, count)
            theirs = _read_slice(base, weight.start, weight.dtype, begin, count)
            if ours is None or theirs is None:
                return False
            if entry.dtype == weight.dtype and ours == theirs:
                continue
            served = encode(decode(ours, entry.dtype, (count,)), dtype)
            if served is None or served != encode(decode(theirs, weight.dtype, (count,)), dtype):
                return False
    return True


def _read_slice(file: BinaryIO, start: int, dtype: str, begin: int, count: int) -> bytes | None:
    """The bytes of `count` values from the `begin`th, or None if the file ends before."""
    file.seek(start + begin * ITEMSIZE[dtype])
    raw = file.read(count * ITEMSIZE[dtype])
    return raw if len(raw) == count * ITEMSIZE[dtype] else None
