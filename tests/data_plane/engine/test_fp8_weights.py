"""Engines on FP8 weights, with the definition of their products: the tokens are those of transformers and PEFT on the
weights that the codes stand for, with inputs rounded in the same way. Adapters read the inputs as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from torch import nn

from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.errors import ConfigError
from data_plane.layers.fp8.weight import Fp8Weight
from data_plane.layers.gated_mlp import GatedMlp
from data_plane.layers.lora_linear import LoraLinear
from data_plane.layers.rms_norm import RmsNorm
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import QUERY_VALUE, worker_config
from tests.e2e.scheduled import ingested
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

NUM_TOKENS = 6
# A value that lies between two codes may be rounded either way, since sums have another order here and there.
LEAST_GAP = 0.02
BFLOAT16_GAP = 0.3


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes the definition of FP8 products, which no worker serves."""
    monkeypatch.setattr("data_plane.engine.build.check_device", lambda *_: None)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the FP8 codes of the rows of x [..., n] stand for."""
    scale = (x.abs().amax(dim=-1, keepdim=True) * (1 / 448)).clamp(min=2.0**-64)
    return (x * (1 / scale)).to(torch.float8_e4m3fn).float() * scale


def rounding(names: Collection[str], *, of_inputs: bool = True) -> Callable[[nn.Module], None]:
    """Gives the named linears of a transformers model rounded weights, and rounded inputs if `of_inputs`."""

    def prepare(model: nn.Module) -> None:
        for name in names:
            module = model.get_submodule(name)
            assert isinstance(module.weight, nn.Parameter)
            is_transposed = type(module).__name__ == "Conv1D"
            weight = module.weight.detach().T if is_transposed else module.weight.detach()
            module.weight.data = rounded(weight).T if is_transposed else rounded(weight)
            if of_inputs:
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0]), *args[1:]))

    return prepare


def in_fp8(engine: TorchEngine) -> list[str]:
    """The linears whose weights are in FP8."""
    return [
        name
        for module in engine.model.model.modules()
        if isinstance(module, LoraLinear) and isinstance(module.packed, Fp8Weight)
        for name in module.target_names
    ]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "phi3", "gpt2", "olmo2", "gpt_neox", "qwen2_moe"])
def test_tokens_are_those_of_rounded_weights_and_inputs(arch: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", arch)
    some = QUERY_VALUE.get(arch, ["q_proj", "v_proj"])
    everywhere = ["q_proj", "o_proj"] if arch == "qwen2_moe" else "all-linear"
    adapters = {
        "all": make_adapter(tmp_path / "all", checkpoint, rank=8, seed=1, targets=everywhere),
        "dora": make_adapter(tmp_path / "dora", checkpoint, rank=4, seed=2, targets=some, use_dora=True),
    }
    engine = build_engine(worker_config(checkpoint, quantization="fp8"))
    slots: dict[str | None, int | None] = {None: None}
    for number, (name, folder) in enumerate(adapters.items()):
        packed = ingested(folder, BaseModel.load(checkpoint))
        engine.slots.load(number, 1, packed.info.digest, packed)
        slots[name] = number
    oracle = Oracle(checkpoint, adapters, prepare=rounding(in_fp8(engine)))
    plain = Oracle(checkpoint, adapters)
    chooser = random.Random(7)
    prompts = [[chooser.randrange(2, 256) for _ in range(length)] for length in (1, 5, 17, 40)]
    jobs, expected, unquantised = [], [], []
    for prompt in prompts:
        for adapter, slot in slots.items():
            completion = oracle.greedy(prompt, NUM_TOKENS, adapter)
            if completion.min_gap < LEAST_GAP:
                continue
            jobs.append(Job(prompt, NUM_TOKENS, slot, 1))
            expected.append(completion.token_ids)
            unquantised.append(plain.greedy(prompt, NUM_TOKENS, adapter).token_ids)
    assert len(jobs) >= 6 and {job.slot for job in jobs} == set(slots.values())
    Planner(engine, chunk=7, max_running=9).run(jobs)
    assert [job.tokens for job in jobs] == expected
    assert expected != unquantised, "rounding changes nothing here"


def check_first_tokens(folder: Path, device: str) -> None:
    """An engine in bfloat16, which is less exact than the oracle: first tokens that are well ahead of all others."""
    checkpoint = make_checkpoint(folder / "model", "llama")
    adapter = make_adapter(folder / "adapter", checkpoint, rank=8, seed=1)
    settings = {"quantization": "fp8", "dtype": "bfloat16", "device": device}
    engine = build_engine(worker_config(checkpoint, **settings))
    packed = ingested(adapter, BaseModel.load(checkpoint, "bfloat16"))
    engine.slots.load(0, 1, packed.info.digest, packed)
    oracle = Oracle(checkpoint, {"adapter": adapter}, prepare=rounding(in_fp8(engine)))
    chooser, jobs, expected = random.Random(3), [], []
    for length in range(1, 25):
        prompt = [chooser.randrange(2, 256) for _ in range(length)]
        for slot, name in ((None, None), (0, "adapter")):
            completion = oracle.greedy(prompt, 1, name)
            if completion.min_gap >= BFLOAT16_GAP:
                jobs.append(Job(prompt, 1, slot, 1))
                expected.append(completion.token_ids)
    assert len(jobs) >= 16 and {job.slot for job in jobs} == {None, 0}
    Planner(engine, chunk=7, max_running=9).run(jobs)
    assert [job.tokens for job in jobs] == expected


@pytest.mark.usefixtures("any_device")
def test_first_tokens_in_bfloat16_are_those_of_rounded_weights(tmp_path: Path) -> None:
    check_first_tokens(tmp_path, "cpu")


def writers(engine: TorchEngine) -> list[str]:
    """The norms and gates that write FP8 inputs."""
    return [
        name
        for name, module in engine.model.model.named_modules()
        if isinstance(module, RmsNorm | GatedMlp) and module.fp8 is not None
    ]


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_norms_and_gates_write_the_inputs_of_the_linears_behind_them(arch: str, tmp_path: Path) -> None:
    """Also in layers that stay as transformers made them, as those of four norms."""
    engine = build_engine(worker_config(make_checkpoint(tmp_path, arch), quantization="fp8"))
    assert len(in_fp8(engine)) == 2 * 7 and "lm_head" not in in_fp8(engine)
    found = writers(engine)
    assert len(found) == 2 * 3, found
    assert not any(name.endswith("model.norm") for name in found), "the head is not in FP8"


@pytest.mark.usefixtures("any_device")
def test_what_stays_as_it_is_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Experts, a gate with one output, and linears whose sizes no GPU multiplies."""
    with caplog.at_level("INFO"):
        engine = build_engine(worker_config(make_checkpoint(tmp_path / "moe", "qwen2_moe"), quantization="fp8"))
    assert "experts: model.layers.*.mlp.experts" in caplog.text
    assert "model.layers.*.mlp.shared_expert_gate" in caplog.text
    assert {name.split(".")[-1] for name in in_fp8(engine)} >= {"q_proj", "o_proj", "gate_proj", "down_proj"}
    caplog.clear()
    odd = make_checkpoint(tmp_path / "odd", "llama", intermediate_size=100)
    with caplog.at_level("INFO"):
        engine = build_engine(worker_config(odd, quantization="fp8"))
    assert "200 outputs and 64 inputs, want multiples of 16: model.layers.*.mlp.gate_up" in caplog.text
    assert {name.split(".")[-1] for name in in_fp8(engine)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all("mlp" not in name and "post_attention" not in name for name in writers(engine))


@pytest.mark.usefixtures("any_device")
def test_a_model_without_a_linear_for_fp8_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", hidden_size=40, intermediate_size=100, head_dim=10)
    with pytest.raises(ConfigError, match=r"--quantization fp8: no linear can be in FP8 \(.*want multiples of 16"):
        build_engine(worker_config(checkpoint, quantization="fp8"))


def test_a_cpu_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    """The folder holds no model at all."""
    with pytest.raises(ConfigError, match=r"--quantization fp8: cpu multiplies no FP8 weights.*--quantization none"):
        build_engine(worker_config(tmp_path, quantization="fp8"))
