"""Rows that fit are packed as PEFT's files are; everything else is refused with the row's index."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from motet.lora_module_ids import MODULES

from control_plane.errors import InvalidAdapter
from control_plane.registry.adapter_files import CONFIG_FILE, EXACT_ARRAY, ROWS_ARRAY, WEIGHTS_ARRAY
from control_plane.registry.model.served_modules import ModuleKind, ServedModule
from tests.control_plane.registry.rig import CONFIG, HIDDEN, pack, safetensors_bytes, tensors, write_adapter
from tests.paged_chunks import read_arrays

GOOD = [[1, 0, 4], [3, 0, 4], [1, 1, 4], [3, 1, 4]]
WIDTH = 4 * (HIDDEN + HIDDEN)


def good_rows() -> np.ndarray[Any, Any]:
    """The rows of the rig's adapter, scaled by 2."""
    source, rows = tensors(), np.zeros((4, WIDTH), "<f4")
    for index, (module_id, layer, _) in enumerate(GOOD):
        key = f"base_model.model.model.layers.{layer}.self_attn.{'q' if module_id == 1 else 'v'}_proj.lora_"
        row = np.concatenate([source[key + "A.weight"].ravel(), 2 * source[key + "B.weight"].ravel()])
        rows[index, : row.size] = row
    return rows


def write(directory: Path, table: Any = GOOD, rows: Any = None, **others: Any) -> dict[str, Path]:
    """The files of an adapter; by default a good one."""
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / WEIGHTS_ARRAY, good_rows() if rows is None else rows)
    np.save(directory / ROWS_ARRAY, np.asarray(table, "<i4") if isinstance(table, list) else table)
    for name, content in others.items():
        path = directory / {"config": CONFIG_FILE, "exact": EXACT_ARRAY, "weights": WEIGHTS_ARRAY}[name]
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
    names = (WEIGHTS_ARRAY, ROWS_ARRAY, CONFIG_FILE, EXACT_ARRAY)
    return {name: directory / name for name in names if (directory / name).exists()}


def refusal(files: dict[str, Path], **reported: Any) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        pack(files, **reported)
    return "\n".join(f"{violation.field}: {violation.description}" for violation in caught.value.violations)


def test_rows_alone_are_the_adapter_whose_alpha_is_its_rank(tmp_path: Path) -> None:
    source = tensors()
    scaled = {key: 2 * values if "lora_B" in key else values for key, values in source.items()}
    peft = write_adapter(tmp_path / "peft", weights=safetensors_bytes(scaled), lora_alpha=4)
    assert pack(write(tmp_path / "rows")) == pack(peft)
    batch = write(tmp_path / "batch", np.asarray([GOOD], "<i8"), good_rows()[None])  # [1, rows, columns]
    assert pack(batch) == pack(peft)


def test_with_the_configuration_the_adapter_is_the_trained_one(tmp_path: Path) -> None:
    files = write(tmp_path / "rows", config=json.dumps(CONFIG).encode())
    assert pack(files) == pack(write_adapter(tmp_path / "peft"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alora_invocation_tokens", [3, 4]),
        ("context_length", 4096),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_a_configuration_that_says_more_than_rows_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    files = write(tmp_path / "rows", config=json.dumps(CONFIG | {field: value}).encode())
    assert f"{field}: is not served with TensorRT-LLM's rows" in refusal(files)


def test_rows_that_only_fill_up_change_nothing(tmp_path: Path) -> None:
    """Zeros at the end, and the zeros that TensorRT-LLM writes for query, key and value without an adapter."""
    filled = np.zeros((6, WIDTH + 9), "<f4")
    filled[:4, :WIDTH] = good_rows()
    files = write(tmp_path / "filled", [*GOOD, [2, 0, 4], [0, 0, 0]], filled)
    assert pack(files) == pack(write(tmp_path / "rows"))


def test_dora_scales_are_packed_as_they_are(tmp_path: Path) -> None:
    rows = np.zeros((4, WIDTH + HIDDEN), "<f4")
    rows[:, :WIDTH] = good_rows()
    rows[0, WIDTH:] = np.arange(HIDDEN) + 1
    info, _ = pack(write(tmp_path, [[*row, int(index == 0)] for index, row in enumerate(GOOD)], rows))
    modules = [module for chunk in json.loads(info.manifest)["chunks"] for module in chunk["modules"]]
    assert info.kind == "dora" and ["dora_scale" in module["parts"] for module in modules] == [
        True,
        False,
        False,
        False,
    ]


BAD_ROWS: list[tuple[list[int], str]] = [
    ([19, 0, 4], r"npy\[0\]: module id 19; the ids are 0 to 18"),
    ([-1, 0, 4], r"npy\[0\]: module id -1"),
    ([1, 2, 4], r"npy\[0\]: layer 2; the base model's layers are 0 to 1"),
    ([1, -1, 4], r"npy\[0\]: layer -1"),
    ([1, 0, 0], r"npy\[0\]: rank 0 for module id 1 \(attn_q\)"),
    ([1, 0, -4], r"npy\[0\]: rank -4"),
    ([1, 0, 5], r"npy\[0\]: rank 5 of module id 1 \(attn_q\) with 16 inputs and 16 outputs takes 160 values.*have 128"),
    ([1, 0, 2147483647], r"npy\[0\]: rank 2147483647"),
    ([1, 0, 3], r"npy\[0\]: rank 3 .* takes 96 values, and the row has more that are not 0"),
    ([2, 0, 4], r"npy\[0\]: module id 2 \(attn_k\): the base model has no such module in layer 0"),
    ([0, 0, 4], r"npy\[0\]: module id 0 \(attn_qkv\): .* neither as one linear nor as attn_q, attn_k, attn_v"),
    ([0, 0, 0], r"npy\[0\]: rank 0 for module id 0"),  # zeros in the table, and weights
    *[([index, 0, 4], rf"npy\[0\]: module id {index} \(cross_attn.*no cross attention") for index in range(8, 13)],
    *[
        ([index, 0, 4], rf"npy\[0\]: module id {index} \(moe_.*has no experts that take adapters")
        for index in (13, 14, 15)
    ],
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_a_row_that_does_not_fit_is_refused_with_its_index(row: list[int], words: str, tmp_path: Path) -> None:
    assert re.search(words, refusal(write(tmp_path, [row, *GOOD[1:]])))


def test_two_rows_for_one_module_are_refused(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, [GOOD[0], GOOD[0], *GOOD[2:]], good_rows()[[0, 0, 2, 3]]))
    assert "npy[1]: changes model.layers.0.self_attn.q_proj, as row 0 does" in text


def test_every_id_has_a_meaning() -> None:
    assert len(MODULES) == 19


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    text = refusal(write(tmp_path, [[19, 0, 4], [1, 7, 4], [1, 0, 0], [9, 0, 4]]))
    for words in ("module id 19", "layer 7", "rank 0", "cross_attn_q"):
        assert words in text


def test_a_problem_is_reported_once_and_without_what_follows_from_it(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "id", [[19, 0, 4]] * 4)) == (
        f"{ROWS_ARRAY}[0]: module id 19; the ids are 0 to 18 (and 3 more like it)"
    )
    assert refusal(write(tmp_path / "zeros", GOOD, np.zeros((4, WIDTH), "<f4"))) == (
        f"{ROWS_ARRAY}: has no row that changes the model; the adapter would do nothing"
    )


def test_a_router_that_takes_no_adapters_is_refused_with_the_workers_reason(tmp_path: Path) -> None:
    reported = {
        "model.layers.0.self_attn.q_proj": ServedModule(ModuleKind.LINEAR, HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate": ServedModule(ModuleKind.LINEAR, HIDDEN, 4, "a router"),
    }
    files = write(tmp_path, [[1, 0, 4], [16, 0, 4]], good_rows()[:2])
    assert "takes no adapters: a router" in refusal(files, reported=reported)


def test_rows_of_experts_hold_all_experts_of_a_layer(tmp_path: Path) -> None:
    """A [experts, rank, inputs], then B [experts, outputs, rank]."""
    base, inner, rank = "model.layers.0.mlp.experts.*.", 8, 2
    reported = {
        f"{base}{part}": ServedModule(ModuleKind.EXPERT, *sizes, num_experts=3)
        for part, sizes in (
            ("gate_proj", (HIDDEN, inner)),
            ("up_proj", (HIDDEN, inner)),
            ("down_proj", (inner, HIDDEN)),
        )
    }
    generator, rows, expected = np.random.default_rng(0), [], {}
    for part, (inputs, outputs) in (("gate_proj", (16, 8)), ("down_proj", (8, 16)), ("up_proj", (16, 8))):
        a = generator.standard_normal((3, rank, inputs)).astype("<f4")
        b = generator.standard_normal((3, outputs, rank)).astype("<f4")
        rows.append(np.concatenate([a.ravel(), b.ravel()]))
        for expert in range(3):
            name = f"model.layers.0.mlp.experts.{expert}.{part}"
            expected[name + ".a"], expected[name + ".b"] = a[expert], b[expert].T
    files = write(tmp_path, [[13, 0, rank], [14, 0, rank], [15, 0, rank]], np.stack(rows))
    info, chunks = pack(files, reported=reported)
    packed = read_arrays(info.manifest, chunks)
    assert packed.keys() == expected.keys()
    assert all(np.array_equal(packed[name], values) for name, values in expected.items())


FLOATS = good_rows()
BAD_FILES: list[tuple[str, dict[str, Any], str]] = [
    ("not an array", {"weights": b"PK\x03\x04" + bytes(60)}, "is not a .npy file"),
    ("empty", {"weights": b""}, "is not a .npy file"),
    ("objects", {"rows": np.array([[{}]], object)}, "values of type|plain array"),
    ("doubles", {"rows": FLOATS.astype("<f8")}, "values of type '<f8'"),
    ("big-endian", {"rows": FLOATS.astype(">f4")}, "values of type '>f4'"),
    ("columns first", {"rows": np.asfortranarray(FLOATS)}, "Fortran order"),
    ("four dimensions", {"rows": FLOATS[None, None]}, r"has the shape \[1, 1, 4, 128\]"),
    ("two batches", {"rows": np.stack([FLOATS, FLOATS])}, r"has the shape \[2, 4, 128\]"),
    ("fewer rows", {"rows": FLOATS[:3]}, "has 4 rows, .* has 3"),
    ("two columns", {"table": np.ones((4, 2), "<i4")}, "has 2 columns"),
    ("floats as ids", {"table": np.ones((4, 3), "<f4")}, "values of type '<f4'"),
    ("a flag of 2", {"table": [[1, 0, 4, 2], *[[*row, 0] for row in GOOD[1:]]]}, "DoRA flag 2"),
    ("too many rows", {"table": np.ones((900, 3), "<i4")}, "has 900 rows, limit 80"),
    ("not finite", {"rows": np.where(np.arange(WIDTH) == 3, np.nan, FLOATS).astype("<f4")}, "NaN or infinite"),
    ("exact alone", {"exact": np.zeros((4, 64), "i1")}, "comes without adapter_config.json"),
    (
        "a correction of 2",
        {"exact": np.full((4, 64), 2, "i1"), "config": json.dumps(CONFIG).encode()},
        "a correction that is not -1, 0 or 1",
    ),
    (
        "corrections cut off",
        {"exact": np.zeros((4, 9), "i1"), "config": json.dumps(CONFIG).encode()},
        "needs 64 bytes, the rows have 9",
    ),
    ("another rank", {"config": json.dumps(CONFIG | {"r": 5}).encode()}, "rank 4, but adapter_config.json gives"),
    ("a bias", {"config": json.dumps(CONFIG | {"lora_bias": True}).encode()}, "rows have no such part"),
    ("DoRA", {"config": json.dumps(CONFIG | {"use_dora": True}).encode()}, "DoRA flag 0, but adapter_config.json"),
    (
        "a module without rows",
        {"config": json.dumps(CONFIG).encode(), "table": GOOD[:3], "rows": FLOATS[:3]},
        "is missing, target_modules names the module",
    ),
    ("nothing", {"rows": np.zeros((4, WIDTH), "<f4")}, "has no row that changes the model"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_a_bad_file_is_refused(name: str, content: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert re.search(words, refusal(write(tmp_path, **content)))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 99999999999), }", "its shape .* needs"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 9999999999999999), }", "plain array"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 128), }", "plain array"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 128), }", "has the shape"),
        (b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4, 128), }", "plain array"),
        (b"__import__('os').abort()", "plain array"),
        (b"(" * 4000, "plain array"),
        (b" " * 5000, "a header of version 1 and 5000 bytes"),
    ],
)
def test_a_header_is_read_and_never_run(header: bytes, words: str, tmp_path: Path) -> None:
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + FLOATS.tobytes()
    assert re.search(words, refusal(write(tmp_path, weights=raw)))


def test_more_bytes_than_allowed_are_refused_before_they_are_read(tmp_path: Path) -> None:
    assert "limit 1000; raise --max-adapter-bytes" in refusal(write(tmp_path), max_adapter_bytes=1000)


def test_half_of_the_files_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert "model.lora_config.npy: is missing" in refusal({WEIGHTS_ARRAY: files[WEIGHTS_ARRAY]})
