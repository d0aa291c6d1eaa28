"""Writes a PEFT adapter as TensorRT-LLM's two arrays, and beside them what makes the way back exact.

| file | holds |
|---|---|
| model.lora_weights.npy, model.lora_config.npy | what TensorRT-LLM reads |
| adapter_config.json | PEFT's own: the scaling that is in B |
| model.lora_exact.npy | corrections of B, and DoRA's magnitudes, where the rows alone do not give them back |
| peft_tensors.json | names, types and shapes of the tensors, for `trtllm-to-peft` |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from motet.adapters.files import CONFIG_FILE, EXACT_ARRAY, ROWS_ARRAY, WEIGHTS_ARRAY
from motet.errors import invalid_field
from motet.lora_module_ids import GATE_UP
from motet.trtllm.base_weights import BaseWeights
from motet.trtllm.peft_adapter import PeftAdapter, PeftModule, read_peft
from motet.trtllm.scaled import corrections_of, is_lossless, scaled
from motet.trtllm.tensors import DTYPES, encode, require_numpy, write_rows

if TYPE_CHECKING:
    from motet.trtllm.tensors import Array

TENSORS_FILE = "peft_tensors.json"


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    files: tuple[str, ...]
    num_rows: int
    dtype: str  # of the rows
    is_exact: bool  # the directory gives the PEFT adapter back, and registers as the same version


def peft_to_trtllm(
    directory: Path, out: Path, *, storage_type: str | None = None, base_model: Path | None = None
) -> Conversion:
    """Write the adapter in `directory` to `out`. Raises InvalidArgument.

    `storage_type`: the type of the rows, one of DTYPES; None: the adapter's own, or float32 where that would lose a
    bit. `base_model`: the checkpoint, which DoRA and experts need, and a model whose MLP has no gate.
    """
    require_numpy()
    if storage_type is not None and storage_type not in DTYPES:
        raise invalid_field("--storage-type", f"is {storage_type!r}; use one of {', '.join(DTYPES)}")
    base = None if base_model is None else BaseWeights(base_model)
    is_gated = base is None or any("mlp.gate_proj" in layer for layer in base.modules().values())
    adapter = read_peft(directory, is_gated=is_gated, num_experts=None if base is None else base.num_experts)
    if adapter.is_dora and base is None:
        raise invalid_field(
            "--base-model", "is missing; DoRA's scales are divided by norms of the base weights: give the checkpoint"
        )
    dtype, is_exact = _storage(adapter, storage_type)
    out.mkdir(parents=True, exist_ok=True)
    for name in (EXACT_ARRAY, CONFIG_FILE, TENSORS_FILE):  # of an earlier conversion
        (out / name).unlink(missing_ok=True)
    writer = _Writer(adapter, base, out, dtype)
    files = writer.write(is_exact=is_exact)
    if is_exact:
        files += writer.write_companions()
    return Conversion(tuple(files), len(adapter.rows), dtype, is_exact)


def _storage(adapter: PeftAdapter, storage_type: str | None) -> tuple[str, bool]:
    """The type of the rows, and whether nothing is lost in it. Raises InvalidArgument."""
    dtype = storage_type or _own_dtype(adapter)
    if _is_lossless(adapter, dtype):
        return dtype, True
    if storage_type is not None and (storage_type != "float32" or not _can_correct(adapter)):
        return storage_type, False
    if not _can_correct(adapter):
        raise invalid_field(
            "directory",
            "has values too small or too large to be multiplied by the scaling without loss; give --storage-type to "
            "round them",
        )
    return "float32", True


def _can_correct(adapter: PeftAdapter) -> bool:
    return all(
        corrections_of(adapter.file.read(module.keys["b"]).values, module.scaling) is not None
        for module in adapter.modules
    )


def _own_dtype(adapter: PeftAdapter) -> str:
    """The type that all matrices have; float32 where they differ."""
    dtypes = {adapter.file.read(module.keys[part]).dtype for module in adapter.modules for part in ("a", "b")}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def _is_lossless(adapter: PeftAdapter, dtype: str) -> bool:
    """Whether rows of this type give A as it is, and B by a division."""
    for module in adapter.modules:
        a, b = adapter.file.read(module.keys["a"]).values, adapter.file.read(module.keys["b"]).values
        if not is_lossless(a, 1.0, dtype) or not is_lossless(b, module.scaling, dtype):
            return False
    return True


class _Writer:
    """Writes the files of one conversion."""

    def __init__(self, adapter: PeftAdapter, base: BaseWeights | None, out: Path, dtype: str) -> None:
        self._adapter = adapter
        self._base = base
        self._out = out
        self._dtype = dtype

    def write(self, *, is_exact: bool) -> list[str]:
        """The arrays: the two of TensorRT-LLM, and the one of exact values where one is needed."""
        import numpy as np

        rows: list[Array] = []
        table: list[Array] = []
        exact: list[Array] = []
        for row in self._adapter.rows:
            parts: tuple[list[Array], ...] = ([], [], [])  # the As, the Bs and the scale of a row, in this order
            kept: tuple[list[Array], ...] = ([], [])
            for module in row.modules:
                read = self._adapter.file.read
                a, b = read(module.keys["a"]).values, read(module.keys["b"]).values
                parts[0].append(a.ravel())
                parts[1].append(_ordered(module, scaled(b, module.scaling, self._dtype)).ravel())
                corrections = corrections_of(b, module.scaling) if self._dtype == "float32" else None
                steps = np.zeros(b.shape, np.int8) if corrections is None else corrections
                kept[0].append(_ordered(module, steps).ravel())
                if "magnitude" in module.keys:
                    assert self._base is not None, "DoRA was refused without the base model"
                    magnitude = read(module.keys["magnitude"]).values.ravel()
                    norms = self._base.norms(module.name, a, b, module.scaling)
                    parts[2].append(_ordered(module, magnitude / norms))
                    kept[1].append(np.frombuffer(encode(_ordered(module, magnitude), "float32"), np.int8))
            columns = [row.module_id, row.layer, len(parts[0][0]) // a.shape[1]]
            if self._adapter.is_dora:
                columns.append(int(bool(parts[2])))
            rows.append(np.concatenate([each for part in parts for each in part]))
            exact.append(np.concatenate([each for part in kept for each in part]))
            table.append(np.array(columns, np.int32))
        write_rows(self._out / WEIGHTS_ARRAY, rows, self._dtype)
        write_rows(self._out / ROWS_ARRAY, table, "int32")
        if not is_exact or not (self._adapter.is_dora or any(values.any() for values in exact)):
            return [WEIGHTS_ARRAY, ROWS_ARRAY]
        write_rows(self._out / EXACT_ARRAY, exact, "int8")
        return [WEIGHTS_ARRAY, ROWS_ARRAY, EXACT_ARRAY]

    def write_companions(self) -> list[str]:
        """What the way back needs beside the arrays."""
        (self._out / CONFIG_FILE).write_bytes(self._adapter.config)
        tensors = [
            [
                {part: [key, *self._adapter.file.described(key)] for part, key in module.keys.items()}
                for module in row.modules
            ]
            for row in self._adapter.rows
        ]
        document = {
            "format": 1,
            "metadata": self._adapter.file.metadata,
            "rows": [each[0] if len(each) == 1 else each for each in tensors],
        }
        (self._out / TENSORS_FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")
        return [CONFIG_FILE, TENSORS_FILE]


def _ordered(module: PeftModule, values: Array) -> Array:
    """Outputs in the order of a row."""
    import numpy as np

    return np.roll(values, len(values) // 2, axis=0) if module.path == GATE_UP else values
