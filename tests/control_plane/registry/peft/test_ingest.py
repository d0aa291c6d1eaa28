"""The packed layout, byte by byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from control_plane.registry.peft.adapter_config import read_adapter_config
from control_plane.registry.peft.chunks.tensor_codec import decode, encode
from control_plane.registry.peft.problems import Problems
from tests.control_plane.registry.rig import (
    CONFIG,
    MODULES,
    base_model,
    pack,
    safetensors_bytes,
    tensors,
    write_adapter,
)
from tests.paged_chunks import read_chunk


def test_the_packed_layout_has_the_pages_of_a_and_transposed_b(tmp_path: Path) -> None:
    info, chunks = pack(write_adapter(tmp_path))
    manifest = json.loads(info.manifest)
    assert json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode() == info.manifest
    assert hashlib.sha256(info.manifest).hexdigest() == info.digest
    assert [chunk["name"] for chunk in manifest["chunks"]] == ["layers.0", "layers.1"]
    source = tensors()
    for described, chunk in zip(manifest["chunks"], chunks, strict=True):
        assert (hashlib.sha256(chunk).hexdigest(), len(chunk)) == (described["sha256"], described["size_bytes"])
        content = read_chunk(info.manifest, manifest["chunks"].index(described), chunk)
        for module in described["modules"]:
            key = f"base_model.model.{module['name']}.lora_"
            a, b = content[module["name"] + ".a"], content[module["name"] + ".b"]
            assert np.array_equal(a, source[key + "A.weight"])
            assert np.array_equal(b, source[key + "B.weight"].T)
            assert module["parts"] == ["a", "b"]
            assert (module["rank"], module["scaling"]) == (4, 2.0)
    assert info.size_bytes == len(info.manifest) + sum(map(len, chunks))
    assert (manifest["format"], manifest["page_columns"]) == (2, 8)
    assert info.arena_bytes == 2 * 8 * ((16 + 16) + (16 + 8)) * 4  # rank 4 takes a page of 8


@pytest.mark.parametrize(
    ("kind", "field", "tensor"),
    [("bias", "lora_bias", "lora_B.bias"), ("magnitude", "use_dora", "lora_magnitude_vector")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_packed_as_float32_and_count_as_bytes(
    tmp_path: Path, kind: str, field: str, tensor: str, dtype: str
) -> None:
    source = tensors(vectors=kind)
    info, chunks = pack(write_adapter(tmp_path, weights=safetensors_bytes(source), **{field: True}), base_model(dtype))
    manifest = json.loads(info.manifest)
    assert info.kind == manifest["kind"] == ("dora" if kind == "magnitude" else "lora")
    for described, chunk in zip(manifest["chunks"], chunks, strict=True):
        header = json.loads(chunk[8 : 8 + int.from_bytes(chunk[:8], "little")])
        for module in described["modules"]:
            entry = header[f"{module['name']}.{kind}"]
            begin, end = (8 + int.from_bytes(chunk[:8], "little") + at for at in entry["data_offsets"])
            vector = source[f"base_model.model.{module['name']}.{tensor}"]
            assert (entry["dtype"], entry["shape"]) == ("F32", [len(vector)])
            assert chunk[begin:end] == vector.tobytes()
            assert module["parts"] == ["a", "b", kind]
    itemsize = 4 if dtype == "float32" else 2
    plain, page = 2 * 8 * ((16 + 16) + (16 + 8)) * itemsize, 8 * 8 * itemsize
    vectors = 4 * 2 * (16 + 8)
    assert info.arena_bytes == plain + -(-vectors // page) * page


def test_the_digest_depends_on_the_bytes_alone(tmp_path: Path) -> None:
    first = pack(write_adapter(tmp_path / "1"))
    backwards = dict(reversed(tensors().items()))
    second = pack(write_adapter(tmp_path / "2", weights=safetensors_bytes(backwards), lora_dropout=0.1))
    assert first == second
    assert pack(write_adapter(tmp_path / "3", weights=safetensors_bytes(tensors(1))))[0].digest != first[0].digest
    assert pack(write_adapter(tmp_path / "4", lora_alpha=9))[0].digest != first[0].digest


def test_float16_adapters_are_read(tmp_path: Path) -> None:
    half = {name: values.astype("<f2") for name, values in tensors().items()}
    info, chunks = pack(write_adapter(tmp_path, weights=safetensors_bytes(half)))
    content = read_chunk(info.manifest, 0, chunks[0])
    assert np.array_equal(content[MODULES[0] + ".a"], half[f"base_model.model.{MODULES[0]}.lora_A.weight"].astype("f4"))


@pytest.mark.parametrize("is_rslora", [False, True])
def test_ranks_and_scalings_are_pefts(is_rslora: bool) -> None:
    from peft.utils.other import get_pattern_key

    ranks = {"0.self_attn.q_proj": 2, "q_proj": 8, "^model.layers.1.self_attn.v_proj": 16}
    alphas = {"v_proj": 5.0, "model.layers.0.self_attn.q_proj": 3}
    raw = json.dumps(CONFIG | {"rank_pattern": ranks, "alpha_pattern": alphas, "use_rslora": is_rslora}).encode()
    config = read_adapter_config(raw, Problems())
    assert config is not None
    for module in MODULES:
        rank = ranks.get(get_pattern_key(list(ranks), module), 4)
        alpha = alphas.get(get_pattern_key(list(alphas), module), 8)
        assert config.rank_of(module, num_rows=99) == rank
        assert config.scaling_of(module, rank) == (alpha / rank**0.5 if is_rslora else alpha / rank)
    assert config.manifest_kind == ("rslora" if is_rslora else "lora")


def test_excluded_modules_are_not_targeted(tmp_path: Path) -> None:
    only_q = safetensors_bytes(tensors(modules=[MODULES[0], MODULES[2]]))
    info, _ = pack(write_adapter(tmp_path, weights=only_q, target_modules="all-linear", exclude_modules=["v_proj"]))
    assert info.target_modules == (MODULES[0], MODULES[2])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_rounding_is_torchs(values: list[float]) -> None:
    import torch

    source = np.array(values, dtype=np.float32)
    for dtype, torch_dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        expected = torch.from_numpy(source).to(torch_dtype)
        raw = encode(source, dtype)
        if torch.isinf(expected).any():
            assert raw is None
            continue
        assert raw == expected.view(torch.int16).numpy().tobytes()
        back = decode(raw, "BF16" if dtype == "bfloat16" else "F16", (1, len(values)))
        assert np.array_equal(back[0], expected.float().numpy())
