"""`motet convert` from PEFT's files to TensorRT-LLM's arrays and back, on adapters that PEFT itself wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from motet.adapters.files import CONFIG_FILE, EXACT_ARRAY, ROWS_ARRAY, WEIGHTS_ARRAY, WEIGHTS_FILE
from motet.cli.main import main
from motet.errors import InvalidArgument
from motet.trtllm.to_peft import trtllm_to_peft
from motet.trtllm.to_rows import peft_to_trtllm
from motet.uploads import AdapterUpload
from safetensors.torch import load_file, save_file

from control_plane.errors import InvalidAdapter
from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from tests.control_plane.registry.rig import pack
from tests.data_plane.engine.expert_files import write_one_by_one
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import reported_by
from tests.makers import make_adapter, make_checkpoint

ARRAYS = (WEIGHTS_ARRAY, ROWS_ARRAY, EXACT_ARRAY)
FORMS: dict[str, dict[str, Any]] = {
    "power of two": {"rank": 8, "alpha": 16},
    "another scaling": {"rank": 8, "alpha": 10},
    "rslora": {"rank": 8, "alpha": 16, "rslora": True},
    "ranks": {"rank": 4, "rank_pattern": {"DOWN": 9}, "alpha_pattern": {"DOWN": 7}},
    "dora": {"rank": 4, "alpha": 6, "use_dora": True},
    "rsdora": {"rank": 3, "alpha": 5, "use_dora": True, "rslora": True},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        arch: make_checkpoint(tmp_path_factory.mktemp(arch), arch) for arch in ("llama", "phi3", "gpt2", "gpt_neox")
    }


def adapter(directory: Path, checkpoint: Path, dtype: str = "float32", **form: Any) -> Path:
    """An adapter whose tensors are of this type. DOWN in a pattern is the last linear of the MLP."""
    arch = json.loads((checkpoint / "config.json").read_text())["model_type"]
    down = {"gpt2": "c_proj", "gpt_neox": "dense_4h_to_h"}.get(arch, "down_proj")
    for name in form.keys() & {"rank_pattern", "alpha_pattern"}:
        form[name] = {down: form[name]["DOWN"]}
    make_adapter(directory, checkpoint, **form)
    if dtype != "float32":
        tensors = load_file(directory / WEIGHTS_FILE)
        kind = getattr(torch, dtype)
        save_file({name: t.to(kind) for name, t in tensors.items()}, directory / WEIGHTS_FILE, {"format": "pt"})
    return directory


def digest(directory: Path, base: BaseModel) -> str:
    """What the server makes of a directory."""
    names = (CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_ARRAY, ROWS_ARRAY, EXACT_ARRAY)
    return pack({name: directory / name for name in names if (directory / name).is_file()}, base)[0].digest


@pytest.mark.parametrize("arch", ["llama", "phi3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_way_back_gives_every_byte_and_the_digest_is_the_same(
    checkpoints: dict[str, Path], arch: str, form: str, dtype: str, tmp_path: Path
) -> None:
    base = checkpoints[arch]
    source = adapter(tmp_path / "peft", base, dtype, **FORMS[form])
    result = peft_to_trtllm(source, tmp_path / "rows", base_model=base)
    assert result.is_exact
    for served in ("float32", "bfloat16", "float16"):
        model = BaseModel.load(base, served)
        assert digest(tmp_path / "rows", model) == digest(source, model)
    trtllm_to_peft(tmp_path / "rows", tmp_path / "back")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    if form == "power of two":
        assert result.dtype == dtype and not (tmp_path / "rows" / EXACT_ARRAY).exists()
    if form == "another scaling" and dtype == "float32":
        steps = np.load(tmp_path / "rows" / EXACT_ARRAY)
        assert set(np.unique(steps)) == {-1, 0, 1}  # a division alone would not give every bit back


@pytest.mark.parametrize(
    ("arch", "form"),
    [
        ("mixtral", {"linears": ["q_proj", "gate"], "alpha": 5, "alpha_pattern": {"w2": 3, "gate": 7}}),
        ("mixtral", {"rank": 3, "use_rslora": True}),
        (
            "qwen2_moe",
            {"parts": [], "linears": ["gate", "shared_expert_gate", "v_proj"], "alpha_pattern": {"v_proj": 3}},
        ),
        ("qwen3_moe", {"parts": ["down_proj"], "linears": ["gate"]}),
    ],
)
def test_experts_and_routers_are_the_same_adapter_in_rows(arch: str, form: dict[str, Any], tmp_path: Path) -> None:
    """Experts one by one, whose rows hold all of a layer; the names are those of the model's own time."""
    base = make_checkpoint(tmp_path / "model", arch)
    source = write_one_by_one(tmp_path / "peft", base, **form)
    result = peft_to_trtllm(source, tmp_path / "rows", base_model=base)
    assert result.is_exact
    ids = np.load(tmp_path / "rows" / ROWS_ARRAY)[0, :, 0]
    of_name = {"gate_proj": 13, "down_proj": 14, "up_proj": 15, "gate": 16, "shared_expert_gate": 17}
    named = (*form.get("parts", ("gate_proj", "up_proj", "down_proj")), *form.get("linears", ()))
    assert {of_name[name] for name in named if name in of_name} <= set(ids.tolist())
    model, reported = BaseModel.load(base), reported_by(build_engine(worker_config(base)))
    files = [
        {name: at / name for name in (CONFIG_FILE, WEIGHTS_FILE, *ARRAYS) if (at / name).is_file()}
        for at in (source, tmp_path / "rows")
    ]
    digests = [pack(each, model, reported=reported)[0].digest for each in files]
    assert digests[0] == digests[1]
    trtllm_to_peft(tmp_path / "rows", tmp_path / "back")
    assert (tmp_path / "back" / CONFIG_FILE).read_bytes() == (source / CONFIG_FILE).read_bytes()
    before, after = (safetensors.numpy.load_file(at / WEIGHTS_FILE) for at in (source, tmp_path / "back"))
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)


def test_bare_rows_of_experts_get_their_names_from_the_base_model(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model", "mixtral")
    source = write_one_by_one(tmp_path / "peft", base, rank=4, alpha=8, linears=["q_proj"])
    peft_to_trtllm(source, tmp_path / "rows", base_model=base)
    for path in (tmp_path / "rows").iterdir():
        if path.name not in (WEIGHTS_ARRAY, ROWS_ARRAY):
            path.unlink()
    trtllm_to_peft(tmp_path / "rows", tmp_path / "back", base_model=base)
    before, after = (safetensors.numpy.load_file(at / WEIGHTS_FILE) for at in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(values * (2 if "lora_B" in key else 1), after[key]) for key, values in before.items())
    model, reported = BaseModel.load(base), reported_by(build_engine(worker_config(base)))
    bare = {name: tmp_path / "rows" / name for name in (WEIGHTS_ARRAY, ROWS_ARRAY)}
    back = {name: tmp_path / "back" / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
    assert len({pack(files, model, reported=reported)[0].digest for files in (bare, back)}) == 1


def test_a_scaling_of_zero_is_refused_with_the_way_on(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = adapter(tmp_path / "peft", checkpoints["llama"], rank=4, alpha=0)
    with pytest.raises(InvalidArgument, match=r"a scaling of 0, by which rows cannot .* register PEFT's files instead"):
        peft_to_trtllm(source, tmp_path / "rows", base_model=checkpoints["llama"])


def test_rows_of_experts_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model", "mixtral")
    some = write_one_by_one(tmp_path / "some", base, experts=[0, 1])
    for base_model, words in ((None, r"--base-model.*all experts of a layer"), (base, "LoRA on 2 experts.*all 4")):
        with pytest.raises(InvalidArgument, match=words):
            peft_to_trtllm(some, tmp_path / "rows", base_model=base_model)
    named = write_one_by_one(tmp_path / "named", base, target_modules=r".*\.w[123]", alpha_pattern={"w2": 3})
    peft_to_trtllm(named, tmp_path / "rows", base_model=base)
    files = {name: tmp_path / "rows" / name for name in (CONFIG_FILE, *ARRAYS) if (tmp_path / "rows" / name).is_file()}
    reported = reported_by(build_engine(worker_config(base)))
    with pytest.raises(InvalidAdapter, match=r"alpha_pattern: gives .*down_proj several scalings, under the names"):
        pack(files, BaseModel.load(base), reported=reported)
    dora = write_one_by_one(tmp_path / "dora", base, use_dora=True)
    with pytest.raises(InvalidArgument, match="has DoRA, which rows cannot say of experts"):
        peft_to_trtllm(dora, tmp_path / "rows", base_model=base)


def test_rows_are_what_tensorrt_llm_reads(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Its hf_lora_convert.py, in a few lines."""
    source = adapter(tmp_path / "peft", checkpoints["llama"], rank=8, alpha=12)
    peft_to_trtllm(source, tmp_path / "rows", storage_type="float16")
    weights, table = np.load(tmp_path / "rows" / WEIGHTS_ARRAY), np.load(tmp_path / "rows" / ROWS_ARRAY)
    assert weights.dtype == np.float16 and table.dtype == np.int32
    assert weights.shape == (1, 14, 8 * (64 + 128)) and table.shape == (1, 14, 3)
    ids = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
    tensors = safetensors.numpy.load_file(source / WEIGHTS_FILE)
    rows = {(int(module), int(layer)): row for (module, layer, _), row in zip(table[0], weights[0], strict=True)}
    assert len(rows) == 14
    for key, b in tensors.items():
        if not key.endswith("lora_B.weight"):
            continue
        parts = key.split(".")
        a = tensors[key.replace("lora_B", "lora_A")]
        expected = np.concatenate([a.ravel(), (b * np.float32(12 / 8)).ravel()]).astype(np.float16)
        row = rows[ids[parts[6]], int(parts[4])]
        assert np.array_equal(row[: expected.size], expected) and not row[expected.size :].any()


def test_bfloat16_rows_have_two_bytes_without_a_type(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As TensorRT-LLM's tools write it: numpy has no such type."""
    source = adapter(tmp_path / "peft", checkpoints["llama"], "bfloat16", rank=2)
    peft_to_trtllm(source, tmp_path / "rows")
    assert np.load(tmp_path / "rows" / WEIGHTS_ARRAY).dtype.str == "|V2"


def test_dora_scales_are_magnitudes_over_norms(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = adapter(tmp_path / "peft", checkpoints["llama"], rank=2, alpha=6, use_dora=True, targets=["q_proj"])
    peft_to_trtllm(source, tmp_path / "rows", base_model=checkpoints["llama"])
    tensors = safetensors.numpy.load_file(source / WEIGHTS_FILE)
    weight = safetensors.numpy.load_file(checkpoints["llama"] / "model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = tensors[key + "A.weight"], tensors[key + "B.weight"]
    changed = weight["model.layers.0.self_attn.q_proj.weight"] + 3 * b @ a
    expected = tensors[key + "magnitude_vector"] / np.linalg.norm(changed, axis=1)
    row = np.load(tmp_path / "rows" / WEIGHTS_ARRAY)[0, 0]
    assert np.allclose(row[2 * (64 + 64) :], expected, rtol=1e-6)
    assert np.load(tmp_path / "rows" / ROWS_ARRAY)[0].tolist() == [[1, 0, 2, 1], [1, 1, 2, 1]]


@pytest.mark.parametrize("arch", ["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("form", ["another scaling", "ranks", "dora"])
def test_rows_of_another_tool_become_the_same_adapter(
    checkpoints: dict[str, Path], arch: str, form: str, tmp_path: Path
) -> None:
    """Without the files beside the arrays: the base model gives the names, and the scaling stays in B."""
    base = checkpoints[arch]
    source = adapter(tmp_path / "peft", base, **FORMS[form])
    peft_to_trtllm(source, tmp_path / "rows", base_model=base)
    for path in (tmp_path / "rows").iterdir():
        if path.name not in (WEIGHTS_ARRAY, ROWS_ARRAY):
            path.unlink()
    trtllm_to_peft(tmp_path / "rows", tmp_path / "back", base_model=base)
    before, after = (safetensors.numpy.load_file(at / WEIGHTS_FILE) for at in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    config = json.loads((source / CONFIG_FILE).read_text())
    for key, values in before.items():
        scaling = 1.0
        if "lora_B" in key:
            alphas = [alpha for name, alpha in config["alpha_pattern"].items() if name in key]
            scaling = (alphas[0] if alphas else config["lora_alpha"]) / values.shape[1]
        assert np.allclose(values * scaling, after[key], rtol=1e-5, atol=1e-7), key
    model = BaseModel.load(base)
    if "magnitude" not in "".join(before):
        assert digest(tmp_path / "rows", model) == digest(tmp_path / "back", model)


@pytest.mark.filterwarnings(
    "ignore:.*save_embedding_layers", "ignore:.*merging LoRA weights won't be possible", "ignore:.*have invalid shape"
)
def test_what_has_no_place_in_rows_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base = checkpoints["llama"]
    head = adapter(tmp_path / "head", base, rank=2, targets=["q_proj", "lm_head"])
    with pytest.raises(InvalidArgument, match=r"no place in TensorRT-LLM's rows.*lm_head"):
        peft_to_trtllm(head, tmp_path / "rows")
    bias = adapter(tmp_path / "bias", base, rank=2, targets=["q_proj"], lora_bias=True)
    with pytest.raises(InvalidArgument, match=r"lora_B\.bias"):
        peft_to_trtllm(bias, tmp_path / "rows")
    plain = adapter(tmp_path / "plain", base, rank=2, targets=["q_proj"])
    config = json.loads((plain / "adapter_config.json").read_bytes()) | {"alora_invocation_tokens": [3, 4]}
    (plain / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="alora_invocation_tokens, which TensorRT-LLM's rows cannot say"):
        peft_to_trtllm(plain, tmp_path / "rows")
    dora = adapter(tmp_path / "dora", base, rank=2, targets=["q_proj"], use_dora=True)
    with pytest.raises(InvalidArgument, match=r"--base-model.*norms"):
        peft_to_trtllm(dora, tmp_path / "rows")
    with pytest.raises(InvalidArgument, match="has no weight of"):
        peft_to_trtllm(dora, tmp_path / "rows", base_model=checkpoints["gpt2"])
    (tmp_path / "quantised").mkdir()
    (tmp_path / "quantised" / "config.json").write_text(json.dumps({"quantization_config": {"load_in_4bit": True}}))
    with pytest.raises(InvalidArgument, match="is quantised; give the checkpoint that it was made of"):
        peft_to_trtllm(dora, tmp_path / "rows", base_model=tmp_path / "quantised")


def test_the_command_says_where_values_were_rounded(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, rows = adapter(tmp_path / "peft", checkpoints["llama"], rank=2), str(tmp_path / "rows")
    assert main(["convert", "peft-to-trtllm", str(source), rows]) == 0
    assert (tmp_path / "rows" / CONFIG_FILE).exists() and "14 rows of float32" in capsys.readouterr().out
    assert main(["convert", "peft-to-trtllm", str(source), rows, "--storage-type", "bfloat16", "--json"]) == 0
    shown = capsys.readouterr()
    assert "the way back is not exact" in shown.err and json.loads(shown.out)["is_exact"] is False
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == [ROWS_ARRAY, WEIGHTS_ARRAY]
    assert main(["convert", "trtllm-to-peft", rows, str(tmp_path / "back")]) == 3
    assert "--base-model: is missing" in capsys.readouterr().err


def test_a_directory_of_rows_is_uploaded_like_pefts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source, rows = adapter(tmp_path / "peft", checkpoints["llama"], rank=2, alpha=5), tmp_path / "rows"
    peft_to_trtllm(source, rows)
    sent = next(AdapterUpload("a", rows).messages()).header.files
    assert [file.name for file in sent] == [WEIGHTS_ARRAY, ROWS_ARRAY, CONFIG_FILE, EXACT_ARRAY]
    (rows / WEIGHTS_FILE).write_bytes(b"x")
    with pytest.raises(InvalidArgument, match="keep one of the two"):
        AdapterUpload("a", rows)
    (rows / WEIGHTS_FILE).unlink()
    (rows / ROWS_ARRAY).unlink()
    with pytest.raises(InvalidArgument, match=r"has no model\.lora_config\.npy"):
        AdapterUpload("a", rows)
