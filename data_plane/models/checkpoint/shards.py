"""The safetensors files of a checkpoint, read and written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from data_plane.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
_ITEMSIZE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


class StoredTensor(NamedTuple):
    """A tensor of a file, without its values."""

    name: str
    dtype: str  # of safetensors
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * _ITEMSIZE.get(self.dtype, 1)


class Shard:
    """One file of a checkpoint. Raises ConfigError for a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            self._file = _opened(path)
            self.metadata: dict[str, str] = dict(self._file.metadata() or {})
            slices = ((name, self._file.get_slice(name)) for name in self._file.keys())  # noqa: SIM118 - no mapping
            self.tensors = [StoredTensor(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices]
        except Exception as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor: it may be changed."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.clone()


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


def shards_of(model_dir: Path) -> Iterator[Shard]:
    """The files that count: those of the index, or all where there is none."""
    names = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if (model_dir / INDEX_FILE).is_file():
        names = sorted(set(read_json(model_dir / INDEX_FILE).get("weight_map", {}).values()))
    if not names or any(Path(name).name != name for name in names):
        raise ConfigError(f"{model_dir} holds no *.safetensors, or its index names files outside of it")
    for name in names:
        yield Shard(model_dir / name)


def write_shard(
    path: Path,
    tensors: Sequence[StoredTensor],
    metadata: dict[str, str],
    read: Callable[[StoredTensor], torch.Tensor],
) -> None:
    """Write a file with the values that `read` gives, one tensor in memory at a time."""
    # The library's order: larger elements first, so that every tensor is aligned.
    ordered = sorted(tensors, key=lambda tensor: (-_ITEMSIZE.get(tensor.dtype, 1), tensor.name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for tensor in ordered:
        end = position + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in ordered:
            values = read(tensor).contiguous().reshape(-1).view(torch.uint8)
            assert values.numel() == tensor.size_bytes, f"{tensor.name} has another size than its header says"
            file.write(values.numpy().data)


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises ConfigError."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; an object is expected")
    return value
