"""Every op that has launch parameters, and a device's tables checked against them as a whole.

An engine checks when it is built: a value that an op refuses is found then, not in the first step of its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kernels.linear import rows_launch as linear
from kernels.lora import launch as lora
from kernels.paged_attention import launch as attention
from kernels.sampling import launch as sampling
from kernels.tuning import TABLES, Size, Table, apply, bucket_name, read_tables


@dataclass(frozen=True, slots=True)
class Op:
    """How an op's launches are chosen."""

    sizes: type[Any]  # a dataclass whose fields name the op's buckets
    default: Callable[[Any], Any]  # of such sizes


OPS: Mapping[str, Op] = {
    "linear_rows": Op(linear.Sizes, linear.RowsLaunch.default),
    "lora_expand": Op(lora.Sizes, lambda sizes: lora.ExpandLaunch.default(sizes.page)),
    "lora_shrink": Op(lora.Sizes, lambda sizes: lora.ShrinkLaunch.default(sizes.rank, sizes.page, sizes.dtype)),
    "paged_attention_decode": Op(attention.Sizes, attention.DecodeLaunch.default),
    "paged_attention_prefill": Op(attention.Sizes, attention.PrefillLaunch.default),
    "sample": Op(sampling.Sizes, lambda _: sampling.SampleLaunch()),
}


def check_tables(device_name: str, folder: Path = TABLES) -> None:
    """Raise ValueError for the first entry of the device's tables that its op cannot run with or never uses."""
    for name, table in read_tables(device_name, folder).items():
        if name not in OPS:
            raise ValueError(f"{table.path}: no op is called {name}, want one of {sorted(OPS)}; delete the table")
        for bucket in table.buckets:
            apply(table, bucket, OPS[name].default(_sizes(OPS[name], table, bucket)))


def _sizes(op: Op, table: Table, bucket: str) -> Any:
    """The sizes that a bucket names."""
    kinds = {field.name: field.type for field in fields(op.sizes)}
    words = dict(word.partition("=")[::2] for word in bucket.split(" "))
    sizes: dict[str, Size] = {name: int(word) if word.isdecimal() else word for name, word in words.items()}
    is_known = sizes.keys() == kinds.keys() and all(
        isinstance(size, int) == (kinds[name] == "int") for name, size in sizes.items()
    )
    if not is_known or bucket_name(**sizes) != bucket:
        example = " ".join(f"{name}={'64' if kinds[name] == 'int' else 'bfloat16'}" for name in sorted(kinds))
        raise ValueError(
            f"{table.path}: no call of {table.op} is in bucket {bucket!r}, want such as {example!r}, numbers as powers "
            "of two; delete or rewrite the table"
        )
    return op.sizes(**sizes)
