"""Writes a PEFT adapter from TensorRT-LLM's two arrays.

Of a directory that `peft-to-trtllm` wrote, the tensors are those that it read, with their names, types and bits. Of any
other, the names come from the base model, and the scaling is 1: the rows' B has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.adapters.files import CONFIG_FILE, EXACT_ARRAY, ROWS_ARRAY, WEIGHTS_ARRAY, WEIGHTS_FILE
from motet.errors import invalid_field
from motet.lora_module_ids import EXPERTS, GATE_UP, MODULES, expert_of, paths_of
from motet.trtllm.base_weights import BaseWeights
from motet.trtllm.peft_adapter import scaling_of
from motet.trtllm.scaled import unscaled
from motet.trtllm.tensors import Tensor, decode, read_rows, read_table, require_numpy, write_safetensors
from motet.trtllm.to_rows import TENSORS_FILE, Conversion

if TYPE_CHECKING:
    from motet.trtllm.tensors import Array

_KEY = "base_model.model.{}.{}"
_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def trtllm_to_peft(directory: Path, out: Path, *, base_model: Path | None = None) -> Conversion:
    """Write the adapter in `directory` to `out`. Raises InvalidArgument.

    `base_model`: the checkpoint, for a directory that peft-to-trtllm did not write.
    """
    require_numpy()
    table = read_table(directory / ROWS_ARRAY)
    if table.shape[1] not in (3, 4):
        raise invalid_field("directory", f"{ROWS_ARRAY} has {table.shape[1]} columns; 3 or 4 are expected")
    row, dtype, num_rows = read_rows(directory / WEIGHTS_ARRAY)
    if num_rows != len(table):
        raise invalid_field("directory", f"{ROWS_ARRAY} has {len(table)} rows, {WEIGHTS_ARRAY} has {num_rows}")
    entries = [(index, *map(int, values), 0) for index, values in enumerate(table)]
    out.mkdir(parents=True, exist_ok=True)
    if (directory / TENSORS_FILE).is_file():
        tensors, metadata = _exact_tensors(directory, entries, row)
        config = (directory / CONFIG_FILE).read_bytes()
    else:
        if base_model is None:
            raise invalid_field("--base-model", f"is missing; without {TENSORS_FILE} it gives the names")
        made = _Rows(BaseWeights(base_model), dtype)
        for index, module_id, layer, rank, is_dora, *_ in entries:
            made.add(index, row(index), module_id, layer, rank, is_dora=bool(is_dora))
        tensors, metadata, config = made.tensors, {"format": "pt"}, made.config()
    write_safetensors(out / WEIGHTS_FILE, tensors, metadata)
    (out / CONFIG_FILE).write_bytes(config)
    return Conversion((CONFIG_FILE, WEIGHTS_FILE), len(table), dtype, (directory / TENSORS_FILE).is_file())


def _exact_tensors(
    directory: Path, entries: list[tuple[int, ...]], row: Callable[[int], Array]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that `peft-to-trtllm` read, and the metadata of their file."""
    try:
        document: dict[str, Any] = json.loads((directory / TENSORS_FILE).read_text(encoding="utf-8"))
        metadata = {str(key): str(value) for key, value in document["metadata"].items()}
        config = json.loads((directory / CONFIG_FILE).read_bytes())
        if document["format"] != 1 or len(document["rows"]) != len(entries):
            raise ValueError("it belongs to other rows")
        exact = read_table(directory / EXACT_ARRAY) if (directory / EXACT_ARRAY).is_file() else None
        tensors: dict[str, Tensor] = {}
        for index, *_ in entries:
            described = document["rows"][index]
            modules = described if isinstance(described, list) else [described]  # of experts, all of the layer
            tensors |= _exact_row(modules, row(index), None if exact is None else exact[index], config)
        return tensors, metadata
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise invalid_field("directory", f"{TENSORS_FILE} cannot be used: {error}") from error


def _exact_row(
    modules: Sequence[Mapping[str, Any]], values: Array, exact: Array | None, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of one row. `modules` give for each part the name, the type and the shape."""
    tensors: dict[str, Tensor] = {}
    at, first = 0, sum(math.prod(described["a"][2]) for described in modules)
    begin, num_steps = first, sum(math.prod(described["b"][2]) for described in modules)
    for described in modules:
        (a_key, a_dtype, a_shape), (b_key, b_dtype, b_shape) = described["a"], described["b"]
        module = b_key.removeprefix("base_model.model.").removesuffix("." + _PARTS["b"])
        a_size, b_size = math.prod(a_shape), math.prod(b_shape)
        b = values[begin : begin + b_size].reshape(b_shape)
        steps = None if exact is None else exact[begin - first : begin - first + b_size].reshape(b_shape)
        b = unscaled(b, scaling_of(config, module, b_shape[1]), steps)
        tensors[a_key] = Tensor(values[at : at + a_size].reshape(a_shape), a_dtype)
        tensors[b_key] = Tensor(_ordered(module, b), b_dtype)
        at, begin = at + a_size, begin + b_size
        if "magnitude" in described:
            key, dtype, shape = described["magnitude"]
            if exact is None:
                raise ValueError(f"{EXACT_ARRAY}, which has DoRA's magnitudes, is missing")
            magnitude = decode(exact[num_steps : num_steps + 4 * math.prod(shape)].tobytes(), "float32")
            tensors[key] = Tensor(_ordered(module, magnitude.reshape(shape)), dtype)
    return tensors


class _Rows:
    """Makes a PEFT adapter of rows that another tool wrote."""

    def __init__(self, base: BaseWeights, dtype: str) -> None:
        self._base = base
        self._dtype = dtype
        self._layers = base.modules()
        self.tensors: dict[str, Tensor] = {}
        self._ranks: dict[str, int] = {}
        self._is_dora: set[bool] = set()

    def add(self, index: int, values: Array, module_id: int, layer: int, rank: int, *, is_dora: bool) -> None:
        """Add the modules of one row. Raises InvalidArgument."""
        field = f"{ROWS_ARRAY}[{index}]"
        if not values.any():
            return  # the tools write such rows for modules that the adapter does not change
        if not 0 <= module_id < len(MODULES) or rank < 1:
            raise invalid_field(field, f"module id {module_id} with rank {rank}; ids are 0 to 18, ranks begin at 1")
        names = self._names(module_id, layer)
        if not names:
            raise invalid_field(field, f"the base model has no module {MODULES[module_id]} in layer {layer}")
        has_own_a = module_id in EXPERTS
        if has_own_a and is_dora:
            raise invalid_field(field, f"DoRA flag 1 for module id {MODULES[module_id]}; there is no DoRA on experts")
        shapes = [self._base.shape(name) for name in names]
        outputs = [num_outputs for num_outputs, _ in shapes]
        num_inputs, num_outputs = shapes[0][1], sum(outputs)
        all_inputs = num_inputs * (len(names) if has_own_a else 1)
        width = rank * (all_inputs + num_outputs) + (num_outputs if is_dora else 0)
        if width > values.size or values[width:].any():
            raise invalid_field(field, f"the base model's sizes need {width} values, and the row has others")
        matrices = values[: rank * all_inputs].reshape(-1, rank, num_inputs)
        b = values[rank * all_inputs : rank * (all_inputs + num_outputs)].reshape(num_outputs, rank)
        scales = values[rank * (all_inputs + num_outputs) : width]
        first = 0
        for index, (name, count) in enumerate(zip(names, outputs, strict=True)):
            own = slice(first, first + count)
            first += count
            a = matrices[index if has_own_a else 0]
            self._add_module(name, a, _ordered(name, b[own]), _ordered(name, scales[own]) if is_dora else None)

    def _names(self, module_id: int, layer: int) -> list[str]:
        """The modules of a row in their order; empty: the base model has none."""
        known = self._layers.get(layer, {})
        if module_id in EXPERTS:
            experts = {place[1]: path for path in known if (place := expert_of(path)) and place[0] == module_id}
            return [known[experts[expert]] for expert in sorted(experts)]
        return [known[path] for path in paths_of(MODULES[module_id], known)]

    def _add_module(self, name: str, a: Array, b: Array, scale: Array | None) -> None:
        if name in self._ranks:
            raise invalid_field("directory", f"two rows change {name}")
        self._ranks[name] = len(a)
        self._is_dora.add(scale is not None)
        self.tensors[_KEY.format(name, _PARTS["a"])] = Tensor(a, self._dtype)
        self.tensors[_KEY.format(name, _PARTS["b"])] = Tensor(b, self._dtype)
        if scale is not None:
            magnitude = scale * self._base.norms(name, a, b, 1.0)
            self.tensors[_KEY.format(name, _PARTS["magnitude"])] = Tensor(magnitude, "float32")

    def config(self) -> bytes:
        """adapter_config.json: alpha is the rank everywhere, so that the scaling is 1. Raises InvalidArgument."""
        if not self._ranks:
            raise invalid_field("directory", "has no row that changes the model")
        if len(self._is_dora) > 1:
            raise invalid_field("directory", "some rows are DoRA and some are not, which PEFT does not have")
        most = max(self._ranks.values())
        others = {f"^{name}": rank for name, rank in sorted(self._ranks.items()) if rank != most}
        document = {
            "alpha_pattern": others,
            "bias": "none",
            "inference_mode": True,
            "lora_alpha": most,
            "peft_type": "LORA",
            "r": most,
            "rank_pattern": others,
            "target_modules": sorted(self._ranks),
            "task_type": "CAUSAL_LM",
            "use_dora": self._is_dora == {True},
        }
        return json.dumps(document, indent=2).encode()


def _ordered(module: str, values: Array) -> Array:
    """Outputs in transformers' order."""
    import numpy as np

    return np.roll(values, len(values) // 2, axis=0) if module.endswith(GATE_UP) else values
