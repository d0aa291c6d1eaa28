"""The embedding and the head of a base checkpoint: their names in the module tree, shapes and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from control_plane.registry.safetensors_header import TensorEntry
from control_plane.registry.tensor_codec import decode, encode

_EMBEDDING = re.compile(r"^(?:[a-z_0-9]+\.)*(?P<name>embed_tokens|embed_in|word_embeddings|wte)\.weight$")
_HEAD = re.compile(r"^(?:[a-z_0-9]+\.)*(?:lm_head|embed_out)\.weight$")
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
    heads = [tensors[name] for name in tensors if _HEAD.match(name)]
    if len(embeddings) != 1 or len(heads) > 1 or len(embeddings[0][1].shape) != 2:
        return {}
    name, weight = embeddings[0]
    is_tied = config.get("tie_word_embeddings") is True or not heads
    return {
        f"{layers_path.rpartition('.')[0]}.{name}": OuterModule(True, weight),
        _HEAD_MODULE: OuterModule(False, weight if is_tied else heads[0]),
    }


def is_same_weight(file: BinaryIO, entry: TensorEntry, weight: CheckpointTensor, dtype: str) -> bool:
    """Whether a tensor of an adapter's file is the base model's own, both as they would be served in `dtype`."""
    if entry.shape != weight.shape or weight.dtype not in _ITEMSIZE:
        return False
    num_values = weight.shape[0] * weight.shape[1]
    with weight.path.open("rb") as base:
        for begin in range(0, num_values, _SLICE_VALUES):
            count = min(_SLICE_VALUES, num_values - begin)
            sides = []
            for source, start, source_dtype in ((file, entry.start, entry.dtype), (base, weight.start, weight.dtype)):
                itemsize = _ITEMSIZE[source_dtype]
                source.seek(start + begin * itemsize)
                raw = source.read(count * itemsize)
                if len(raw) != count * itemsize:
                    return False
                sides.append(encode(decode(raw, source_dtype, (count,)), dtype))
            if sides[0] is None or sides[0] != sides[1]:
                return False
    return True


_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}
