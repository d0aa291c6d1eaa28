"""Compares tensors that PEFT saves of the base model with the base model's own.

Called by trained_biases.py. Reads a few MiB of both files at a time.
"""

from __future__ import annotations

import math
from typing import BinaryIO

from control_plane.registry.model.embedding_modules import CheckpointTensor
from control_plane.registry.peft.chunks.tensor_codec import decode, encode
from control_plane.registry.peft.safetensors_header import ITEMSIZE, TensorEntry

_SLICE_VALUES = 4 << 20  # compared at a time


def is_same_weight(file: BinaryIO, entry: TensorEntry, weight: CheckpointTensor, dtype: str) -> bool:
    """Whether a tensor of an adapter's file is the base model's own, both as they would be served in `dtype`.

    Equal bytes of one type are, whatever they hold; only where they differ are values looked at.
    """
    if entry.shape != weight.shape or weight.dtype not in ITEMSIZE:
        return False
    num_values = math.prod(weight.shape)
    with weight.path.open("rb") as own:
        for begin in range(0, num_values, _SLICE_VALUES):
            count = min(_SLICE_VALUES, num_values - begin)
            ours = _read_slice(file, entry.start, entry.dtype, begin, count)
            theirs = _read_slice(own, weight.start, weight.dtype, begin, count)
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
