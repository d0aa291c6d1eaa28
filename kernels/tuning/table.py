"""The files of launch parameters: how a bucket and a folder are named, reading with every check, writing.

tables/nvidia-h200/lora_shrink.json
{"format": 1, "op": "lora_shrink", "device": "NVIDIA H200", "made_with": {"torch": "2.11.0", ...},
 "buckets": {"dtype=bfloat16 in_features=4096 tokens=64": {"num_warps": 8}}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import buckets

TABLES = Path(__file__).parent / "tables"
FORMAT = 1
Size = int | str

_KEYS = {"format", "op", "device", "made_with", "buckets"}


@dataclass(frozen=True, slots=True)
class Table:
    """One op's parameters on one device."""

    path: Path
    op: str
    device_name: str
    made_with: Mapping[str, str]  # versions of what measured it, and the day
    buckets: Mapping[str, Mapping[str, int]]  # bucket name -> parameters that differ from the defaults


def round_up(size: Size) -> Size:
    """A number as the next power of two, zero as zero; a word as it is."""
    return size if isinstance(size, str) else buckets.round_up(size)


def bucket_name(**sizes: Size) -> str:
    """Such as "dtype=bfloat16 in_features=4096 tokens=64", in the order of the names."""
    return " ".join(f"{name}={round_up(sizes[name])}" for name in sorted(sizes))


def device_folder(device_name: str) -> str:
    """ "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def read_tables(device_name: str, folder: Path = TABLES) -> dict[str, Table]:
    """The device's tables by op; empty for a device without measurements. Raises ValueError for a malformed one."""
    paths = sorted((folder / device_folder(device_name)).glob("*.json"))
    return {path.stem: _read(path, device_name) for path in paths}


def write_table(
    op: str,
    device_name: str,
    made_with: Mapping[str, str],
    buckets: Mapping[str, Mapping[str, int]],
    folder: Path = TABLES,
) -> Path:
    """Write a table where `read_tables` finds it; the path. Replaces the op's earlier one."""
    path = folder / device_folder(device_name) / f"{op}.json"
    raw = {"format": FORMAT, "op": op, "device": device_name, "made_with": dict(made_with)}
    raw["buckets"] = {name: dict(sorted(buckets[name].items())) for name in sorted(buckets)}
    _check(raw, path, device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(raw, indent=1) + "\n")
    temporary.replace(path)
    return path


def _read(path: Path, device_name: str) -> Table:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; delete or rewrite the table") from error
    _check(raw, path, device_name)
    return Table(path, raw["op"], device_name, raw["made_with"], raw["buckets"])


def _check(raw: Any, path: Path, device_name: str) -> None:
    """Raise ValueError with what is wrong, and what to do about it."""
    fault = _fault(raw, path, device_name)
    if fault is not None:
        raise ValueError(f"{path}: {fault}; delete or rewrite the table")


def _fault(raw: Any, path: Path, device_name: str) -> str | None:
    if not isinstance(raw, dict) or raw.keys() != _KEYS:
        return f"want an object of {sorted(_KEYS)}"
    for key, expected in (("format", FORMAT), ("op", path.stem), ("device", device_name)):
        if raw[key] != expected:
            return f"{key} is {raw[key]!r}, want {expected!r}"
    made_with, entries = raw["made_with"], raw["buckets"]
    if not isinstance(made_with, dict) or not all(isinstance(value, str) for value in made_with.values()):
        return f"made_with is {made_with!r}, want an object of texts"
    if not isinstance(entries, dict):
        return f"buckets is {entries!r}, want an object"
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not all(_is_count(value) for value in entry.values()):
            return f"bucket {name!r} is {entry!r}, want an object of positive whole numbers"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
