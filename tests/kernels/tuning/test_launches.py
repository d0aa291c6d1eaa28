"""Tables are checked as a whole: an entry that an op would refuse, or never ask for, is found before any step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kernels.tune import PROBLEMS
from kernels import tuning
from kernels.launches import OPS, check_tables
from kernels.tuning import write_table

DEVICE = "A GPU"
MODEL = "cache=bfloat16 dim=128 dtype=bfloat16 group=4"
LORA = "dtype=bfloat16 features=4096 modules=4 page=1024 planes=8 rank=16 tokens=64"


def test_every_op_that_is_tuned_is_checked() -> None:
    assert OPS.keys() == PROBLEMS.keys()


def test_entries_that_ops_take_pass(tmp_path: Path) -> None:
    write_table("paged_attention_decode", DEVICE, {}, {MODEL: {"split_keys": 1024, "block_n": 128}}, tmp_path)
    write_table("lora_expand", DEVICE, {}, {LORA: {"out_columns": 64}, LORA.replace("=16", "=0"): {}}, tmp_path)
    write_table("sample", DEVICE, {}, {"dtype=float32 rows=1 vocab=32768": {"part": 1024}}, tmp_path)
    check_tables(DEVICE, tmp_path)
    check_tables("Another GPU", tmp_path)


@pytest.mark.parametrize(
    ("op", "bucket", "entry", "says"),
    [
        ("paged_attention_decode", MODEL, {"block_m": 64}, "block_m is 64, want a power of two from 16 to 32"),
        # Refused beside the default of the bucket's own sizes: 64 keys a tile.
        ("paged_attention_decode", MODEL, {"split_keys": 96}, "split_keys is 96, want a multiple of block_n, 64"),
        ("paged_attention_prefill", MODEL, {"max_splits": 2}, r"names \['max_splits'\], the op takes \['block_m'"),
        ("lora_shrink", LORA, {"num_warps": 3}, "num_warps is 3, want a power of two from 1 to 16"),
        ("lora_expand", LORA, {"out_columns": 1024}, "out_columns is 1024, want a power of two from 16 to 512"),
        ("sample", "dtype=bfloat16 rows=64 vocab=131072", {"tile": 8192}, "tile is 8192"),
    ],
)
def test_a_value_that_an_op_refuses_is_named_with_its_file_and_bucket(
    op: str, bucket: str, entry: dict[str, int], says: str, tmp_path: Path
) -> None:
    path = write_table(op, DEVICE, {}, {bucket: entry}, tmp_path)
    with pytest.raises(ValueError, match=rf"{path}: {op}, bucket '{bucket}'.*{says}.*; delete or rewrite the table"):
        check_tables(DEVICE, tmp_path)


@pytest.mark.parametrize(
    "bucket",
    [
        "cache=bfloat16 dim=100 dtype=bfloat16 group=4",
        "dim=128 cache=bfloat16 dtype=bfloat16 group=4",
        "cache=bfloat16 dim=128 dtype=bfloat16",
        "cache=bfloat16 dim=wide dtype=bfloat16 group=4",
        "cache=16 dim=128 dtype=bfloat16 group=4",
        "",
    ],
)
def test_a_bucket_that_no_call_is_in_is_refused(bucket: str, tmp_path: Path) -> None:
    write_table("paged_attention_decode", DEVICE, {}, {bucket: {}}, tmp_path)
    with pytest.raises(
        ValueError, match=rf"no call of paged_attention_decode is in bucket '{bucket}', want such as 'c"
    ):
        check_tables(DEVICE, tmp_path)


def test_a_table_of_no_op_is_refused(tmp_path: Path) -> None:
    write_table("lora_shrunk", DEVICE, {}, {}, tmp_path)
    with pytest.raises(ValueError, match=r"no op is called lora_shrunk, want one of \['linear_rows', 'lora_expand'"):
        check_tables(DEVICE, tmp_path)


def test_tables_of_the_repository_pass() -> None:
    for path in (Path(tuning.__file__).parent / "tables").glob("*/*.json"):
        check_tables(json.loads(path.read_text())["device"], path.parents[1])
