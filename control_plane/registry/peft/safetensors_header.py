"""A strict, bounded reader of safetensors headers for files that strangers upload.

The format's own library accepts duplicate names, leading blanks and headers of 100 MB; this one accepts what PEFT
writes and nothing else, and allocates nothing before sizes are checked. Never reads tensor data.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.peft.problems import Problems

ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}
BASE_HEADER_BYTES = 1 << 20
HEADER_BYTES_PER_TENSOR = 512
FIELD = "adapter_model.safetensors"
_MAGICS = (
    (b"PK\x03\x04", "a zip archive or a PyTorch pickle"),
    (b"\x80", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
)
_MAX_DIMENSION = 1 << 31
_LFS_POINTER = b"version https://git-lfs"
CHECK_BASE = "check that the adapter was trained on this base model"  # the next step where nothing fits


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    dtype: str  # "F32", "F16" or "BF16"
    shape: tuple[int, ...]  # one or two sizes
    start: int  # position in the file, bytes
    size_bytes: int


def refuse(field: str, description: str) -> InvalidAdapter:
    """The error for one bad field of an adapter."""
    return InvalidAdapter(FieldViolation(field, description))


def read_header(file: BinaryIO, file_size: int, *, max_tensors: int) -> dict[str, TensorEntry]:
    """All tensors of the file, by name. Raises InvalidAdapter with every tensor that cannot be read.

    Dimensions are two, the types floats, the data of all tensors fills the file without gap or overlap.
    """
    prefix = file.read(8)
    refuse_lfs_pointer(prefix, FIELD)
    for magic, what in _MAGICS:
        # A safetensors file that begins with such bytes would have a header far over any limit.
        if prefix.startswith(magic) and int.from_bytes(prefix, "little") > file_size:
            raise refuse(FIELD, f"this is {what}; only safetensors files are read: save with safe_serialization=True")
    if len(prefix) < 8:
        raise refuse(FIELD, f"{file_size} bytes are too short for a safetensors file; the upload was cut off")
    header_size = int.from_bytes(prefix, "little")
    limit = BASE_HEADER_BYTES + HEADER_BYTES_PER_TENSOR * max_tensors
    if header_size > limit:
        raise refuse(
            FIELD, f"header of {header_size} bytes, limit {limit}; this is not a safetensors file of an adapter"
        )
    if header_size > file_size - 8:
        raise refuse(FIELD, f"header of {header_size} bytes in a file of {file_size} bytes; the upload was cut off")
    header = _parse(file.read(header_size), header_size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse(FIELD, "__metadata__ is not a map of text to text")
    if not header:
        raise refuse(FIELD, "holds no tensor; the adapter would change nothing")
    if len(header) > max_tensors:
        raise refuse(FIELD, f"holds {len(header)} tensors, limit {max_tensors}; {CHECK_BASE}")
    data_start = 8 + header_size
    problems, entries = Problems(), list[TensorEntry]()
    for name, value in header.items():
        with problems.collected():
            entries.append(_entry(name, value, data_start, file_size - data_start))
    problems.raise_all()
    _check_tiling(entries, data_start, file_size)
    return {entry.name: entry for entry in entries}


def refuse_lfs_pointer(raw: bytes, field: str) -> None:
    """Raise InvalidAdapter if a file begins as the text that git-lfs keeps in the place of a large file."""
    if raw and raw.startswith(_LFS_POINTER[: len(raw)]):
        raise refuse(field, "is a git-lfs pointer, not the file itself; run `git lfs pull` where it was cloned")


def parse_json_object(raw: bytes, field: str) -> dict[str, Any]:
    """One JSON object without duplicate keys, whatever the nesting or the digits. Raises InvalidAdapter."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _Duplicate as error:
        raise refuse(field, f"the key {error.key!r} occurs twice") from error
    except _NotFinite as error:
        raise refuse(field, f"holds {error}, which is not valid JSON; write a finite number") from error
    except (ValueError, RecursionError) as error:
        if raw.startswith(codecs.BOM_UTF8):
            raise refuse(field, "begins with a byte order mark; save it as UTF-8 without one") from error
        raise refuse(field, "is not valid JSON in UTF-8; save the adapter again") from error
    if not isinstance(value, dict):
        raise refuse(field, "is not a JSON object")
    return value


class _Duplicate(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = shorten(key)


class _NotFinite(Exception):
    """NaN, Infinity or -Infinity, which Python's json writes."""


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Duplicate(key)
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise _NotFinite(name)


def shorten(name: str, limit: int = 120) -> str:
    """A name from outside, safe to put into a message."""
    clean = name[:limit]
    if not clean.isprintable():
        clean = "".join(character if character.isprintable() else "?" for character in clean)
    return clean if len(name) <= limit else clean + "..."


def _parse(raw: bytes, header_size: int) -> dict[str, Any]:
    if len(raw) != header_size or not raw.startswith(b"{"):
        raise refuse(FIELD, "the header does not begin with '{'; this is not a safetensors file")
    return parse_json_object(raw, FIELD)


def _entry(name: str, value: Any, data_start: int, data_size: int) -> TensorEntry:
    label = shorten(name)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise refuse(label, "the header entry must hold dtype, shape and data_offsets and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise refuse(
            label,
            f"dtype {shorten(str(dtype), 20)}; expected one of {', '.join(ITEMSIZE)}: convert the tensors",
        )
    if not _is_int_list(shape) or len(shape) not in (1, 2):
        raise refuse(label, f"shape {shorten(str(shape), 60)}; expected one or two dimensions")
    if not all(1 <= size < _MAX_DIMENSION for size in shape):
        raise refuse(label, f"shape {shorten(str(shape), 60)}; a dimension is from 1 to {_MAX_DIMENSION - 1}")
    if not _is_int_list(offsets) or len(offsets) != 2:
        raise refuse(label, "data_offsets must be two numbers")
    start, end = offsets
    if not 0 <= start <= end <= data_size:
        raise refuse(label, f"data_offsets lie outside the {data_size} bytes of data; the upload was cut off")
    expected = math.prod(shape) * ITEMSIZE[dtype]
    if end - start != expected:
        raise refuse(label, f"data_offsets span {end - start} bytes; shape and dtype need {expected}")
    return TensorEntry(name, dtype, tuple(shape), data_start + start, expected)


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_tiling(entries: list[TensorEntry], data_start: int, file_size: int) -> None:
    """Data must follow the header without gap or overlap and end with the file."""
    position = data_start
    for entry in sorted(entries, key=lambda entry: entry.start):
        if entry.start != position:
            raise refuse(shorten(entry.name), f"data begins at byte {entry.start}, expected {position}: gap or overlap")
        position += entry.size_bytes
    if position != file_size:
        raise refuse(FIELD, f"{file_size} bytes, the header accounts for {position}; cut off or trailing bytes")
