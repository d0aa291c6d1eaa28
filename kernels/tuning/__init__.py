"""Launch parameters that were measured on a device, for ops that work without them.

An op calls `tuned` with its safe defaults, a frozen dataclass, and the sizes of the call. Tables are JSON
files, one per device and op, that `python -m benchmarks.kernels.tune` writes; a device without any runs with the
defaults, and the log says so once. Parameters that can change a bit of a result may depend on sizes of the model
only: a request's tokens must not depend on its batch.
"""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kernels.tuning.table import TABLES, Size, Table, bucket_name, device_folder, read_tables, round_up, write_table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Launch = TypeVar("Launch", bound=DataclassInstance)
else:
    Launch = TypeVar("Launch")

__all__ = ["TABLES", "Size", "Table", "apply", "bucket_name", "device_folder", "read_tables", "tuned", "write_table"]

logger = logging.getLogger(__name__)


def tuned(op: str, defaults: Launch, device_name: str | None, **sizes: Size) -> Launch:
    """The defaults with what was measured for this op, device and bucket of sizes.

    defaults: a frozen dataclass of launch parameters; it refuses values that the op cannot run with when it is built.
    device_name: of a GPU (kernels.devices.device_name), None for anything that has no launch parameters.
    sizes: whole numbers, rounded up to powers of two, and words such as a dtype. Reads files only at the first
    call for a device. Raises ValueError for a table that is malformed or does not fit the op.
    """
    if device_name is None:
        return defaults
    rounded = tuple([(name, round_up(size)) for name, size in sizes.items()])
    hashable: Any = defaults  # since it is frozen
    launch: Launch = _tuned(op, hashable, device_name, rounded, TABLES)
    return launch


@cache
def _tuned(op: str, defaults: Any, device_name: str, sizes: tuple[tuple[str, Size], ...], folder: Path) -> Any:
    table = _tables(device_name, folder).get(op)
    if table is None:
        return defaults
    return apply(table, bucket_name(**dict(sizes)), defaults)


def apply(table: Table, bucket: str, defaults: Any) -> Any:
    """The defaults with a table's entry for the bucket. Raises ValueError for parameters that the op does not take."""
    entry = table.buckets.get(bucket, {})
    known = {field.name for field in fields(defaults)}
    where = f"{table.path}: {table.op}, bucket {bucket!r}"
    if not entry.keys() <= known:
        raise ValueError(
            f"{where} names {sorted(entry.keys() - known)}, the op takes {sorted(known)}; delete or rewrite the table"
        )
    try:
        return replace(defaults, **entry)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; delete or rewrite the table") from error


@cache
def _tables(device_name: str, folder: Path) -> dict[str, Table]:
    tables = read_tables(device_name, folder)
    if not tables:
        logger.warning(
            "no tuned launch parameters, using the defaults device=%r; "
            "to measure them: python -m benchmarks.kernels.tune",
            device_name,
        )
    return tables
