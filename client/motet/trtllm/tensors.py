"""Reads and writes safetensors files and .npy arrays with numpy alone.

numpy has no bfloat16: such values are float32 here, and are written with their upper 16 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.errors import InvalidArgument, invalid_field

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES = {name: code for code, name in _SAFETENSORS.items()}
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_NPY = {"<f4": "float32", "<f2": "float16", "|V2": "bfloat16"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def require_numpy() -> None:
    """Raises InvalidArgument where numpy is not installed."""
    try:
        import numpy  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise InvalidArgument("this needs numpy, which is not installed: pip install numpy") from error


@dataclass(frozen=True)
class Tensor:
    """Values as float32, and the type that they are of."""

    values: Array
    dtype: str  # one of DTYPES; every value is one of this type


class TensorFile:
    """A safetensors file: its tensors are read one by one. Raises InvalidArgument for what is not one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > min(_MAX_HEADER_BYTES, path.stat().st_size):
                    raise ValueError("its header does not fit the file")
                header: dict[str, Any] = json.loads(file.read(size))
            self._start = 8 + size
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._entries = {
                name: (str(entry["dtype"]), tuple(map(int, entry["shape"])), int(entry["data_offsets"][0]))
                for name, entry in header.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise invalid_field("directory", f"{path} cannot be read as safetensors: {error}") from error

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order of the file."""
        return list(self._entries)

    def described(self, name: str) -> tuple[str, list[int]]:
        """Type and shape of a tensor that can be read."""
        code, shape, _ = self._entries[name]
        return _SAFETENSORS[code], list(shape)

    def read(self, name: str) -> Tensor:
        """One tensor. Raises InvalidArgument."""
        code, shape, offset = self._entries[name]
        if code not in _SAFETENSORS:
            raise invalid_field("directory", f"{self._path.name}: {name} is of type {code}; convert it to float32")
        dtype = _SAFETENSORS[code]
        with self._path.open("rb") as file:
            file.seek(self._start + offset)
            raw = file.read(math.prod(shape) * _ITEMSIZE[dtype])
        if len(raw) != math.prod(shape) * _ITEMSIZE[dtype]:
            raise invalid_field("directory", f"{self._path.name}: {name} is cut off")
        return Tensor(decode(raw, dtype).reshape(shape), dtype)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The file as the safetensors library writes it: larger types first, then by name."""
    ordered = sorted(tensors.items(), key=lambda item: (-_ITEMSIZE[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in ordered:
        end = position + tensor.values.size * _ITEMSIZE[tensor.dtype]
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.values.shape),
            "data_offsets": [position, end],
        }
        position = end
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in ordered:
            file.write(encode(tensor.values, tensor.dtype))


def decode(raw: bytes, dtype: str) -> Array:
    """float32 values of the bytes; exact."""
    import numpy as np

    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, "<f4" if dtype == "float32" else "<f2").astype(np.float32)


def encode(values: Array, dtype: str) -> bytes:
    """Bytes of the values, rounded to the nearest of the type, ties to even."""
    import numpy as np

    values = np.ascontiguousarray(values, "<f4")
    if dtype == "float32":
        return values.tobytes()
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def rounded(values: Array, dtype: str) -> Array:
    """The values as the type has them."""
    return decode(encode(values, dtype), dtype).reshape(values.shape)


def write_rows(path: Path, rows: list[Array], dtype: str) -> None:
    """[1, rows, longest row] as TensorRT-LLM's tools write it: shorter rows are filled with zeros.

    `dtype` is one of DTYPES, or "int32" or "int8". bfloat16 is written as two bytes without a type, as they do.
    """
    import numpy as np

    width = max(row.size for row in rows)
    kinds = {"float32": "<f4", "float16": "<f2", "bfloat16": "V2", "int32": "<i4", "int8": "|i1"}
    shape = (1, len(rows), width)
    written = np.lib.format.open_memmap(path, mode="w+", dtype=kinds[dtype], shape=shape)
    for index, row in enumerate(rows):
        if dtype in DTYPES:
            written[0, index, : row.size] = np.frombuffer(encode(row, dtype), kinds[dtype])
        else:
            written[0, index, : row.size] = row
    written.flush()


def read_rows(path: Path) -> tuple[Callable[[int], Array], str, int]:
    """A function that gives one row as float32, the type, and the number of rows. Raises InvalidArgument."""
    array = _load(path)
    dtype = _NPY.get(array.dtype.str)
    if dtype is None:
        raise invalid_field("directory", f"{path.name} holds values of type {array.dtype.str}; floats are expected")

    def row(index: int) -> Array:
        return decode(array[index].tobytes(), dtype)

    return row, dtype, len(array)


def read_table(path: Path) -> Array:
    """[rows, columns] of whole numbers. Raises InvalidArgument."""
    array = _load(path)
    if array.dtype.kind != "i":
        raise invalid_field("directory", f"{path.name} holds values of type {array.dtype.str}; integers are expected")
    return array


def _load(path: Path) -> Array:
    import numpy as np

    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise invalid_field("directory", f"{path} cannot be read: {error}") from error
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2:
        raise invalid_field("directory", f"{path.name} has the shape {list(array.shape)}; [rows, columns] is expected")
    return array
