"""Shapes of the quantised weights of a checkpoint's file, from its header and what lies beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.checkpoints.quantization import MAX_STATE_BYTES, STATE_ENDS

_CODES = {"I8", "F8_E4M3"}  # one for each value, so that their shape is the weight's


def quantized_shapes(path: Path, header: Mapping[str, Any], data_start: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the quantised weights by name. An unreadable state of bitsandbytes has none: workers refuse it."""
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in header.items():
        if name.endswith(".weight") and entry.get("dtype") in _CODES:
            found[name] = tuple(int(size) for size in entry["shape"])
        end = next((end for end in STATE_ENDS if name.endswith(end)), None)
        if end is not None and (shape := _stated_shape(path, entry, data_start)) is not None:
            found[name.removesuffix(end)] = shape
    return found


def _stated_shape(path: Path, entry: Mapping[str, Any], data_start: int) -> tuple[int, ...] | None:
    begin, end = entry["data_offsets"]
    with path.open("rb") as file:
        file.seek(data_start + int(begin))
        raw = file.read(min(int(end) - int(begin), MAX_STATE_BYTES))
    try:
        return tuple(int(size) for size in json.loads(raw)["shape"])
    except (ValueError, KeyError, TypeError):
        return None
