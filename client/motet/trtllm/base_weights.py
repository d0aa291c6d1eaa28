"""What a conversion needs of a base checkpoint: the modules of its layers, and the norms that DoRA divides by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from motet.errors import invalid_field
from motet.trtllm.tensors import TensorFile

if TYPE_CHECKING:
    from motet.trtllm.tensors import Array

_TRANSPOSED_TYPES = ("gpt2",)  # these keep the weights of their linears as [inputs, outputs]
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # of a layer, in config.json
_SLICE_ROWS = 1024  # of a weight that are float64 at a time


class BaseWeights:
    """A checkpoint directory with safetensors files. Raises InvalidArgument."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            self._is_transposed = config.get("model_type") in _TRANSPOSED_TYPES
            self._num_experts = next((config[key] for key in _EXPERT_COUNTS if config.get(key)), 0)
        except (OSError, ValueError, AttributeError) as error:
            raise invalid_field("--base-model", f"{directory}/config.json cannot be read: {error}") from error
        if config.get("quantization_config"):
            raise invalid_field("--base-model", f"{directory} is quantised; give the checkpoint that it was made of")
        files = [TensorFile(path) for path in sorted(directory.glob("*.safetensors"))]
        self._files = {name: file for file in files for name in file.names if name.endswith(".weight")}

    def modules(self) -> dict[int, dict[str, str]]:
        """Names of the modules in the checkpoint, by layer and by the path after the layer's index."""
        found: dict[int, dict[str, str]] = {}
        for tensor in self._files:
            name = tensor.removesuffix(".weight")
            if (place := split(name)) is not None:
                found.setdefault(place[0], {})[place[1]] = name
        return found

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 for a model without experts."""
        return int(self._num_experts)

    def shape(self, module: str) -> tuple[int, int]:
        """(outputs, inputs) of a module, by the name that `modules` gives it. Raises InvalidArgument."""
        _, shape = self._files[f"{module}.weight"].described(f"{module}.weight")
        if len(shape) != 2:
            raise invalid_field("--base-model", f"{module}.weight has the shape {shape}; a matrix is expected")
        return (shape[1], shape[0]) if self._is_transposed else (shape[0], shape[1])

    def norms(self, module: str, a: Array, b: Array, scaling: float) -> Array:
        """float32: the norm of each row of weight + scaling * B @ A. Raises InvalidArgument."""
        import numpy as np

        known = [name for name in self._files if _is_same(name.removesuffix(".weight"), module)]
        if len(known) != 1:
            raise invalid_field("--base-model", f"{self._directory} has no weight of {module}")
        weight = self._files[known[0]].read(known[0]).values
        weight = weight.T if self._is_transposed else weight
        if weight.shape != (b.shape[0], a.shape[1]):
            raise invalid_field(
                "--base-model",
                f"{known[0]} has the shape {list(weight.shape)}, and the adapter is for "
                f"{[b.shape[0], a.shape[1]]}; give the model that the adapter was trained on",
            )
        norms = np.empty(len(weight), np.float32)
        for begin in range(0, len(weight), _SLICE_ROWS):
            rows = slice(begin, begin + _SLICE_ROWS)
            changed = weight[rows].astype(np.float64) + scaling * (b[rows].astype(np.float64) @ a)
            norms[rows] = np.linalg.norm(changed, axis=1)
        if not norms.all():
            raise invalid_field("directory", f"{module} has an output of norm 0, which DoRA cannot scale")
        return norms


def split(module: str) -> tuple[int, str] | None:
    """The layer of a module and its path after the layer's index; None for a module outside of the layers."""
    parts = module.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else (int(parts[at]), ".".join(parts[at + 1 :]))


def _is_same(name: str, module: str) -> bool:
    """Whether two paths are one module's. A checkpoint may leave out the beginning of a path, or have more of it."""
    return name == module or name.endswith("." + module) or module.endswith("." + name)
