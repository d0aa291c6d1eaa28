"""The reference of verifications over FP8 weights has the linears and the weights that a worker has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_plane.engine.build import build_engine
from data_plane.models.fp8.rounded_model import round_weights, rounding_inputs
from kernels.fp8 import Fp8Rows
from tests.data_plane.engine.test_fp8_weights import in_fp8
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_checkpoint

ARCHS = ["llama", "qwen2", "gemma2", "phi3", "gpt2", "olmo2", "gpt_neox", "starcoder2", "mixtral", "qwen2_moe"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_it_has_the_weights_of_the_worker(
    arch: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint in float32, which the worker reads in its dtype."""
    monkeypatch.setattr("data_plane.engine.build.check_device", lambda *_: None)
    checkpoint = make_checkpoint(tmp_path, arch)
    engine = build_engine(worker_config(checkpoint, quantization="fp8", dtype=dtype))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    linears = round_weights(model, getattr(torch, dtype))
    assert sorted(linears) == sorted(in_fp8(engine))
    weights = engine.model.base_weights()
    for name, linear in linears.items():
        served = weights.weight(name)
        assert isinstance(served, Fp8Rows)
        own = linear.weight
        assert isinstance(own, torch.Tensor)
        assert torch.equal(own.T if arch == "gpt2" else own, served.float()), name


def test_a_joint_linear_decides_by_its_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key head beside 16 of the query: alone its projection would be as narrow as a router."""
    monkeypatch.setattr("data_plane.engine.build.check_device", lambda *_: None)
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 16}
    checkpoint = make_checkpoint(tmp_path, "llama", **sizes)
    engine = build_engine(worker_config(checkpoint, quantization="fp8"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    linears = round_weights(model, torch.float32)
    assert sorted(linears) == sorted(in_fp8(engine)) and "model.layers.0.self_attn.k_proj" in linears


def test_inputs_are_rounded_within_the_block_alone() -> None:
    linear = torch.nn.Linear(32, 16, bias=False).requires_grad_(False)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    exact = linear(x)
    with rounding_inputs([linear]):
        assert not torch.equal(linear(x), exact)
    assert torch.equal(linear(x), exact)
