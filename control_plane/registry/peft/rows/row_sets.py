"""Compares the rows that an adapter brings with the base model's: those that differ are the adapter's.

Called by ingest.py. Both are compared as they would be served, a few MiB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from contract.packed_layout import RowsSize
from control_plane.registry.model.embedding_modules import CheckpointTensor, EmbeddingModule
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.chunks.tensor_codec import Float32Array, decode, encode
from control_plane.registry.peft.module_plans import ModulePlan
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.rows.row_tensors import ModuleTensors, RowTensors, embedding_or_head
from control_plane.registry.peft.safetensors_header import FIELD, ITEMSIZE, TensorEntry, refuse, shorten
from control_plane.registry.peft.target_modules import TargetModules

Int32Array = npt.NDArray[np.int32]
SLICE_VALUES = 1 << 20  # compared or converted at a time


@dataclass(frozen=True, slots=True)
class RowSet:
    """The rows of one embedding or head that an adapter replaces or adds."""

    name: str
    ids: Int32Array  # rising
    width: int
    has_bias: bool
    tensors: ModuleTensors
    own: EmbeddingModule  # the base model's
    lora: ModulePlan | None  # LoRA on the same module: its part is added to these rows

    @property
    def size(self) -> RowsSize:
        """What the rows' size in an arena depends on."""
        return RowsSize(len(self.ids), self.width, self.has_bias)


def find_row_sets(
    file: BinaryIO,
    tensors: RowTensors,
    plans: list[ModulePlan],
    targets: TargetModules,
    problems: Problems,
    check: Callable[[], None],
) -> list[RowSet]:
    """The rows that differ, of the embedding and of the head. Notes what cannot be served."""
    found = []
    by_name = {plan.name: plan for plan in plans}
    for kind, part in ((ModuleKind.EMBEDDING, tensors.embedding), (ModuleKind.HEAD, tensors.head)):
        name = embedding_or_head(targets, kind)
        if name is None or (part.weight is None and part.delta is None and not _is_resized(name, tensors, targets)):
            continue
        with problems.collected():
            row_set = _row_set(file, name, part, tensors.num_tokens, by_name.get(name), targets, check)
            if len(row_set.ids):
                found.append(row_set)
    return found


def _is_resized(name: str, tensors: RowTensors, targets: TargetModules) -> bool:
    return tensors.num_tokens not in (None, _vocab_size(name, targets))


def _vocab_size(name: str, targets: TargetModules) -> int:
    module = targets.served[name]
    return module.in_features if module.kind is ModuleKind.EMBEDDING else module.out_features


def _row_set(
    file: BinaryIO,
    name: str,
    part: ModuleTensors,
    num_tokens: int | None,
    lora: ModulePlan | None,
    targets: TargetModules,
    check: Callable[[], None],
) -> RowSet:
    own, field = targets.own(name), part.weight.name if part.weight is not None else name
    if own is None:
        raise refuse(
            shorten(field), "cannot be compared with the base model's own; save with save_embedding_layers=False"
        )
    vocab_size, width = own.weight.shape
    if num_tokens is not None and part.weight is None and num_tokens > vocab_size:
        raise refuse(
            name,
            f"has no rows of the {num_tokens - vocab_size} new tokens, and the adapter was trained with {num_tokens} "
            "tokens; save both embedding and head (modules_to_save)",
        )
    changed = [] if part.weight is None else [_changed_rows(file, part.weight, own.weight, targets, check)]
    if part.bias is not None:
        changed.append(_changed_biases(file, part.bias, own.bias, targets))
    if part.delta is not None:
        delta_ids = np.array(part.delta_ids, dtype=np.int64)
        if len(np.unique(delta_ids)) != len(delta_ids):
            raise refuse("trainable_token_indices", f"names a token of {name} twice")
        changed = [ids[~np.isin(ids, delta_ids)] for ids in changed]
        changed.append(_changed_tokens(file, part.delta, delta_ids, own.weight, targets))
    ids = np.unique(np.concatenate(changed)).astype(np.int32) if changed else np.zeros(0, dtype=np.int32)
    if len(ids) and lora is not None and lora.has_magnitude:
        raise refuse(name, "has changed rows and DoRA, which is not served; train LoRA without DoRA on it")
    has_bias = own.bias is not None or part.bias is not None or (lora is not None and lora.has_lora_bias)
    return RowSet(name, ids, width, has_bias and not own.is_input, part, own, lora)


def _changed_rows(
    file: BinaryIO, entry: TensorEntry, own: CheckpointTensor, targets: TargetModules, check: Callable[[], None]
) -> npt.NDArray[np.int64]:
    """Ids of the rows that differ from the base model's, new ones included."""
    num_shared, (num_rows, width) = min(entry.shape[0], own.shape[0]), entry.shape
    dtype, found = targets.base_model.dtype, [np.arange(num_shared, num_rows)]
    step = max(SLICE_VALUES // width, 1)
    with own.path.open("rb") as base:
        for begin in range(0, num_shared, step):
            check()
            count = min(step, num_shared - begin)
            ours = read_rows(file, entry, begin, count)
            theirs = read_rows(base, own, begin, count)
            if entry.dtype == own.dtype and ours == theirs:
                continue
            mine = served(ours, entry, (count, width), dtype)
            other = encode(decode(theirs, own.dtype, (count, width)), dtype)
            assert other is not None, "the base model is served in this type"
            pairs = (np.frombuffer(raw, dtype=np.uint8).reshape(count, -1) for raw in (mine, other))
            found.append(begin + np.flatnonzero(np.not_equal(*pairs).any(axis=1)))
    return np.concatenate(found)


def _changed_biases(
    file: BinaryIO, entry: TensorEntry, own: CheckpointTensor | None, targets: TargetModules
) -> npt.NDArray[np.int64]:
    if own is None:
        raise refuse(shorten(entry.name), "is in the file, but the base model has no such bias")
    mine = decode(read_rows(file, entry, 0, entry.shape[0]), entry.dtype, entry.shape)
    with own.path.open("rb") as base:
        theirs = decode(read_rows(base, own, 0, own.shape[0]), own.dtype, own.shape)
    num_shared = min(len(mine), len(theirs))
    dtype = targets.base_model.dtype
    pairs = []
    for values in (mine, theirs):
        raw = encode(values[:num_shared], dtype) if np.isfinite(values).all() else None
        if raw is None:
            raise refuse(shorten(entry.name), "holds values that cannot be served")
        pairs.append(np.frombuffer(raw, dtype=np.uint8).reshape(num_shared, -1))
    return np.flatnonzero(np.not_equal(*pairs).any(axis=1))


def _changed_tokens(
    file: BinaryIO, delta: TensorEntry, ids: npt.NDArray[np.int64], own: CheckpointTensor, targets: TargetModules
) -> npt.NDArray[np.int64]:
    """The trained tokens whose rows differ from the base model's."""
    width, dtype, changed = delta.shape[1], targets.base_model.dtype, []
    with own.path.open("rb") as base:
        for index, token_id in enumerate(ids.tolist()):
            mine = served(read_rows(file, delta, index, 1), delta, (1, width), dtype)
            if token_id >= own.shape[0] or mine != encode(
                decode(read_rows(base, own, token_id, 1), own.dtype, (1, width)), dtype
            ):
                changed.append(token_id)
    return np.array(changed, dtype=np.int64)


def served(raw: bytes, entry: TensorEntry, shape: tuple[int, ...], dtype: str) -> bytes:
    """Values of an adapter's tensor in the serving type. Raises InvalidAdapter for those that cannot be served."""
    return served_values(decode(raw, entry.dtype, shape), entry.name, dtype)


def served_values(values: Float32Array, name: str, dtype: str) -> bytes:
    """`served` for values that are decoded already."""
    if not np.isfinite(values).all():
        raise refuse(shorten(name), "holds NaN or infinite values; the training diverged")
    converted = encode(values, dtype)
    if converted is None:
        raise refuse(shorten(name), f"holds a value too large for {dtype}, the base model's type")
    return converted


def read_rows(file: BinaryIO, entry: TensorEntry | CheckpointTensor, begin: int, count: int) -> bytes:
    """The bytes of `count` rows from the `begin`th."""
    width = entry.shape[1] if len(entry.shape) == 2 else 1
    size = ITEMSIZE[entry.dtype] * width
    file.seek(entry.start + begin * size)
    raw = file.read(count * size)
    if len(raw) != count * size:
        raise refuse(FIELD, "became shorter while it was read; send it again")
    return raw


def runs(ids: Int32Array) -> Iterator[tuple[int, int]]:
    """First id and length of each run of ids that follow one another."""
    for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
        if len(run):
            yield int(run[0]), len(run)
