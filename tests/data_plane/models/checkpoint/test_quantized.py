"""Quantised checkpoints give the logits of transformers and PEFT on the same files, and adapters act on their weights.

`fixtures` has what bitsandbytes and compressed-tensors wrote, and the logits beside it: see write_fixtures.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.checkpoints.quantization import read_quantization
from contract.fingerprint import FP8_WEIGHTS
from control_plane.registry.model.base_model import BaseModel, BaseModelError
from data_plane.engine.build import build_engine
from data_plane.errors import ConfigError
from data_plane.models.checkpoint.dequantize import from_4_bits, from_float8
from data_plane.models.checkpoint.quantized import dequantized_tensors
from data_plane.models.loader import load_model
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.data_plane.models.checkpoint.write_fixtures import EXPECTED, FIXTURES, PROMPT
from tests.e2e.scheduled import ingested
from tests.makers import make_adapter, make_checkpoint

FORMS = ["nf4", "nf4_double", "fp4", "int8", "compressed"]
NUM_TOKENS = 6
LOGIT_ERROR = 2e-4  # of logits up to about 10: float32 sums in another order
CPU = torch.device("cpu")


def dequantized(directory: Path) -> dict[str, torch.Tensor]:
    how = read_quantization(json.loads((directory / "config.json").read_text()))
    assert how is not None
    return dequantized_tensors(directory, how, torch.float32)


def plain_copy(directory: Path, quantized: Path) -> Path:
    """A checkpoint that is not quantised, with the weights of one that is."""
    directory.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    config["dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dequantized(quantized), directory / "model.safetensors", {"format": "pt"})
    return directory


def logits_of(directory: Path, adapter: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, str(adapter))
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_that_transformers_and_peft_compute_with(form: str, tmp_path: Path) -> None:
    expected = load_file(FIXTURES / form / EXPECTED)
    plain = plain_copy(tmp_path / "plain", FIXTURES / form)
    assert logits_of(plain) == pytest.approx(expected["base"], abs=LOGIT_ERROR)
    assert logits_of(plain, FIXTURES / form / "adapter") == pytest.approx(expected["adapter"], abs=LOGIT_ERROR)
    assert expected["base"] != pytest.approx(expected["adapter"], abs=100 * LOGIT_ERROR)


@pytest.mark.parametrize("form", FORMS)
def test_motet_serves_base_and_adapter_of_a_quantised_checkpoint(form: str, tmp_path: Path) -> None:
    """The first token of each prompt, beside transformers; the later ones beside a plain copy of the weights."""
    checkpoint, expected = FIXTURES / form, load_file(FIXTURES / form / EXPECTED)
    base_model = BaseModel.load(checkpoint, "float32")
    adapter = ingested(checkpoint / "adapter", base_model)
    engine = build_engine(worker_config(checkpoint, dtype="float32"))
    assert engine.capacities.model_fingerprint == base_model.fingerprint
    engine.slots.load(0, 1, adapter.info.digest, adapter)
    jobs = [
        Job(PROMPT[:length], NUM_TOKENS, slot, 1 if slot is not None else 0)
        for length in (3, 5, 8)
        for slot in (None, 0)
    ]
    Planner(engine, chunk=4).run(jobs)
    for job in jobs:
        name = "base" if job.slot is None else "adapter"
        top = expected[name][len(job.prompt) - 1].topk(2)
        assert job.tokens[0] == int(top.indices[0]) or float(top.values[0] - top.values[1]) < 1e-3, (name, job.prompt)
    copied = plain_copy(tmp_path / "plain", checkpoint)
    plain, same = (
        build_engine(worker_config(copied)),
        ingested(checkpoint / "adapter", BaseModel.load(copied, "float32")),
    )
    plain.slots.load(0, 1, same.info.digest, same)
    again = [Job(job.prompt, NUM_TOKENS, job.slot, job.generation) for job in jobs]
    Planner(plain, chunk=4).run(again)
    assert [job.tokens for job in again] == [job.tokens for job in jobs]


@pytest.mark.parametrize("form", FORMS)
def test_the_control_plane_knows_the_shapes_before_a_worker_attaches(form: str, tmp_path: Path) -> None:
    plain = BaseModel.load(plain_copy(tmp_path / "plain", FIXTURES / form), "float32")
    found = BaseModel.load(FIXTURES / form, "float32")
    assert found.linear_shapes == plain.linear_shapes and len(found.linear_shapes) == 7
    assert found.embedding_modules.keys() == plain.embedding_modules.keys()
    assert found.fingerprint != plain.fingerprint


def quantize_to_blocks(directory: Path, base: Path, block: tuple[int, int], config: dict[str, Any]) -> Path:
    """FP8 with a scale for each block, as transformers' fp8 and compressed-tensors store it."""
    shutil.copytree(base, directory)
    tensors = load_file(directory / "model.safetensors")
    end = "_scale_inv" if config["quant_method"] == "fp8" else "_scale"
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        rows, columns = (-(-size // one) for size, one in zip(weight.shape, block, strict=True))
        scales = torch.empty(rows, columns)
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                part = (
                    slice(row * block[0], (row + 1) * block[0]),
                    slice(column * block[1], (column + 1) * block[1]),
                )
                scales[row, column] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
        tensors[name], tensors[name + end] = codes, scales
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    written = json.loads((directory / "config.json").read_text()) | {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(written))
    return directory


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_fp8_blocks_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    config = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    base = make_checkpoint(tmp_path / "base", arch)
    checkpoint = quantize_to_blocks(tmp_path / "fp8", base, (32, 32), config)
    truth: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
        dtype=torch.float32,
    )
    loaded = load_model(checkpoint, "float32", CPU, max_step_tokens=64)
    weights = loaded.base_weights()
    names = [target.name for target in loaded.targets() if target.name.endswith("_proj")]
    assert len(names) >= 8
    for name in names:
        found = weights.weight(name)
        assert isinstance(found, torch.Tensor)
        path, _, last = name.rpartition(".")
        if ".experts." in name:
            experts, _, index = path.rpartition(".")
            stacked = truth.get_submodule(experts)
            own = stacked.down_proj[int(index)]
            if last != "down_proj":
                own = stacked.gate_up_proj[int(index)].chunk(2)[int(last == "up_proj")]
        else:
            own = truth.get_submodule(name).weight
        assert torch.equal(found, own.detach()), name


def test_an_adapter_is_served_over_fp8_blocks(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [48, 32], "activation_scheme": "dynamic"}
    base = make_checkpoint(tmp_path / "base")  # sizes that are not a multiple of 48
    checkpoint = quantize_to_blocks(tmp_path / "fp8", base, (48, 32), config)
    adapter = make_adapter(tmp_path / "adapter", base, use_dora=True)
    plain = plain_copy(tmp_path / "plain", checkpoint)
    found = ingested(adapter, BaseModel.load(checkpoint))
    engine = build_engine(worker_config(checkpoint))
    engine.slots.load(0, 1, found.info.digest, found)
    job = Job([*PROMPT], NUM_TOKENS, 0, 1)
    Planner(engine, chunk=64).run([job])
    logits = logits_of(plain, adapter)[-1].topk(2)
    assert float(logits.values[0] - logits.values[1]) > 1e-3 and job.tokens[0] == int(logits.indices[0])


def test_one_scale_for_a_tensor_a_row_and_a_block() -> None:
    codes = (torch.arange(24).reshape(4, 6) - 12).to(torch.float8_e4m3fn)
    values = codes.float()
    assert torch.equal(from_float8("w", codes, torch.tensor(0.5), None), values / 2)
    rows = torch.tensor([1.0, 2.0, 4.0, 8.0])
    for scale in (rows, rows[:, None]):
        assert torch.equal(from_float8("w", codes, scale.bfloat16(), None), values * rows[:, None])
    blocks = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    spread = torch.tensor([[1, 1, 1, 1, 2, 2]] * 3 + [[3, 3, 3, 3, 4, 4]])
    assert torch.equal(from_float8("w", codes, blocks, (3, 4)), values * spread)
    with pytest.raises(ConfigError, match=r"w: scales of the shape \[2, 2\] do not fit \[4, 6\]"):
        from_float8("w", codes, blocks, (2, 2))


def damaged(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(FIXTURES / "nf4_double", directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_a_damaged_weight_is_refused_by_name(tmp_path: Path) -> None:
    weight = "model.layers.0.self_attn.q_proj.weight"

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[weight] = tensors[weight][:-3]

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{weight}.quant_map"]

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{weight}.quant_state.bitsandbytes__nf4"] = torch.tensor([123, 34], dtype=torch.uint8)

    for change, words in (
        (cut, "bytes and 64 factors do not fit its shape"),
        (lose, "quant_map is missing"),
        (spoil, "quant_state cannot be read"),
    ):
        directory = damaged(tmp_path / change.__name__, change)
        with pytest.raises(ConfigError, match=f"{weight}.*{words}"):
            load_model(directory, "float32", CPU, max_step_tokens=64)


def test_values_are_looked_up_in_the_files_own_map() -> None:
    state = torch.tensor(list(b'{"shape": [2, 3], "dtype": "float32", "blocksize": 4}'), dtype=torch.uint8)
    packed = torch.tensor([[0x01], [0x2F], [0x3E]], dtype=torch.uint8)
    beside = {"absmax": torch.tensor([2.0, 10.0]), "quant_map": torch.arange(16.0)}
    found = from_4_bits("w", packed, beside, state)
    assert found.tolist() == [[0.0, 2.0, 4.0], [30.0, 30.0, 140.0]]
    packed_as_floats = packed.repeat(4, 1)[:12].flatten().view(torch.bfloat16)  # bnb_4bit_quant_storage of FSDP
    whole = from_4_bits("w", packed_as_floats[:2], {**beside, "absmax": torch.ones(2)}, _state([2, 4]))
    assert whole.tolist() == [[0.0, 1.0, 2.0, 15.0], [3.0, 14.0, 0.0, 1.0]]


def _state(shape: list[int]) -> torch.Tensor:
    return torch.tensor(
        list(json.dumps({"shape": shape, "dtype": "float32", "blocksize": 4}).encode()), dtype=torch.uint8
    )


def test_weights_are_never_rounded_twice() -> None:
    for load in (
        lambda: BaseModel.load(FIXTURES / "nf4", quantization=FP8_WEIGHTS),
        lambda: load_model(FIXTURES / "nf4", "float32", CPU, max_step_tokens=64, quantization=FP8_WEIGHTS),
    ):
        with pytest.raises(
            (BaseModelError, ConfigError), match="--quantization fp8: the checkpoint is quantised already"
        ):
            load()


def test_a_quantised_head_is_refused_by_name(tmp_path: Path) -> None:
    directory = tmp_path / "head"
    shutil.copytree(FIXTURES / "compressed", directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(BaseModelError, match=r"lm_head\.weight is quantised, and only linears of the decoder layers"):
        BaseModel.load(directory)
