"""Lookup of launch parameters, and the tables that it refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernels import tuning
from kernels.tuning import bucket_name, device_folder, read_tables, tuned, write_table

DEVICE = "NVIDIA H200"


@dataclass(frozen=True)
class Launch:
    num_warps: int = 4
    columns: int = 64

    def __post_init__(self) -> None:
        if self.columns & (self.columns - 1):
            raise ValueError(f"columns is {self.columns}, want a power of two")


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of tables."""
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    return tmp_path


def write(tables: Path, entry: dict[str, int]) -> Path:
    name = bucket_name(dtype="bfloat16", tokens=64)
    return write_table("op", DEVICE, {"torch": "2"}, {name: entry}, tables)


def test_what_was_measured_replaces_the_defaults_in_its_bucket_only(tables: Path) -> None:
    write(tables, {"num_warps": 8})
    for tokens, num_warps in ((64, 8), (33, 8), (32, 4), (65, 4)):
        assert tuned("op", Launch(), DEVICE, tokens=tokens, dtype="bfloat16") == Launch(num_warps)
    assert tuned("op", Launch(), DEVICE, tokens=64, dtype="float32") == Launch()
    assert tuned("other", Launch(), DEVICE, tokens=64, dtype="bfloat16") == Launch()
    assert tuned("op", Launch(columns=32), DEVICE, tokens=64, dtype="bfloat16") == Launch(8, 32)


def test_an_unknown_device_works_untuned_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for op in ("op", "other", "op"):
            for tokens in (1, 100):
                assert tuned(op, Launch(), "Unheard of GPU", tokens=tokens) == Launch()
    assert [record.message for record in caplog.records] == [
        "no tuned launch parameters, using the defaults device='Unheard of GPU'; "
        "to measure them: python -m benchmarks.kernels.tune"
    ]


def test_no_device_has_the_defaults_and_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert tuned("op", Launch(), None, tokens=1) == Launch()
    assert not caplog.records


def test_files_are_read_once_per_device(tables: Path) -> None:
    path = write(tables, {"num_warps": 8})
    assert tuned("op", Launch(), DEVICE, tokens=64, dtype="bfloat16") == Launch(8)
    path.write_text("not JSON")
    assert tuned("op", Launch(columns=128), DEVICE, tokens=64, dtype="bfloat16") == Launch(8, 128)
    assert tuned("another", Launch(), DEVICE, tokens=1) == Launch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2, want 1"),
        ({"op": "another"}, "op is 'another', want 'op'"),
        ({"device": "NVIDIA-H200"}, "device is 'NVIDIA-H200', want 'NVIDIA H200'"),
        ({"extra": 1}, "want an object of"),
        ({"made_with": {"torch": 2}}, "made_with is"),
        ({"buckets": []}, r"buckets is \[\], want an object"),
        ({"buckets": {"tokens=64": {"num_warps": 0}}}, r"bucket 'tokens=64' is \{'num_warps': 0\}"),
        ({"buckets": {"tokens=64": {"num_warps": True}}}, "positive whole numbers"),
        ({"buckets": {"tokens=64": {"num_warps": "8"}}}, "positive whole numbers"),
        ({"buckets": {"tokens=64": {"warps": 8}}}, r"names \['warps'\], the op takes \['columns', 'num_warps'\]"),
        ({"buckets": {"tokens=64": {"columns": 24}}}, "columns is 24, want a power of two"),
    ],
    ids=str,
)
def test_a_malformed_table_is_refused(tables: Path, change: dict[str, Any], message: str) -> None:
    path = write(tables, {"num_warps": 8})
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message) as refusal:
        tuned("op", Launch(), DEVICE, tokens=64)
    assert str(path) in str(refusal.value)
    assert "delete or rewrite the table" in str(refusal.value)


def test_a_table_that_is_not_json_is_refused(tables: Path) -> None:
    write(tables, {}).write_text("{")
    with pytest.raises(ValueError, match="delete or rewrite the table"):
        tuned("op", Launch(), DEVICE, tokens=64)


def test_a_table_is_written_as_it_is_read(tables: Path) -> None:
    buckets = {"tokens=64": {"num_warps": 8, "columns": 32}, "tokens=1": {}}
    path = write_table("op", DEVICE, {"torch": "2"}, buckets, tables)
    assert path == tables / "nvidia-h200" / "op.json"
    (table,) = read_tables(DEVICE, tables).values()
    assert (table.op, table.device_name, table.made_with, table.buckets) == ("op", DEVICE, {"torch": "2"}, buckets)
    assert [found.name for found in path.parent.iterdir()] == ["op.json"]
    with pytest.raises(ValueError, match="positive whole numbers"):
        write_table("op", DEVICE, {}, {"tokens=1": {"columns": -1}}, tables)


def test_names_of_buckets_and_folders() -> None:
    assert bucket_name(tokens=33, dtype="float16", rank=0) == "dtype=float16 rank=0 tokens=64"
    assert bucket_name(tokens=1) == "tokens=1"
    assert device_folder("NVIDIA RTX (TM) 6000 Ada") == "nvidia-rtx-tm-6000-ada"
    with pytest.raises(ValueError, match="size is -1"):
        bucket_name(tokens=-1)
