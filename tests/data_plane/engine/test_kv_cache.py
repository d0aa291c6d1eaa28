"""How keys and values are kept: formats and their bytes, and what an FP8 cache does to a model's tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from data_plane.engine.build import build_engine
from data_plane.engine.host_blocks import HostBlocks
from data_plane.engine.kv_cache import KVCache, KVFormat
from data_plane.errors import ConfigError
from kernels.fp8 import FP8, FP8_MAX
from tests.data_plane.engine.planner import Job, Planner, array
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_checkpoint

CPU = torch.device("cpu")
LAYERS: Any = [
    SimpleNamespace(num_kv_heads=2, key_dim=8, value_dim=4),
    SimpleNamespace(num_kv_heads=1, key_dim=8, value_dim=8),
]
PROMPTS = ([5, 9, 200, 31, 77, 12, 8], [8, 12, 77, 31, 200, 9, 5] * 4)


def quantized(x: torch.Tensor, *, has_token_scales: bool) -> torch.Tensor:
    """[1, heads, tokens, size] as an FP8 cache gives it back."""
    scale = x.abs().amax(dim=-1, keepdim=True) / FP8_MAX if has_token_scales else torch.ones(())
    return (x / scale).to(FP8).float() * scale


def attention_with(*, has_token_scales: bool) -> Any:
    """transformers' attention over quantised keys and values."""

    def forward(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any) -> Any:
        key, value = (quantized(x, has_token_scales=has_token_scales) for x in (key, value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2), None

    return forward


@torch.no_grad()
def generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("name", "arch"), [("fp8_per_token_head", "llama"), ("fp8", "gpt_neox")])
def test_completions_are_those_of_quantised_keys_and_values(name: str, arch: str, tmp_path: Path) -> None:
    """One model runs our fused layers, the other transformers' own. In chunks, so that prompts read the cache too."""
    checkpoint = make_checkpoint(tmp_path, arch)
    AttentionInterface.register("quantised", attention_with(has_token_scales=name == "fp8_per_token_head"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="quantised")
    engine = build_engine(worker_config(checkpoint, num_blocks=64, kv_cache_dtype=name))
    assert engine.kv_cache.keys[0].dtype == FP8
    jobs = [Job(prompt, 8) for prompt in PROMPTS]
    Planner(engine, chunk=5).run(jobs)
    assert [job.tokens for job in jobs] == [generate(model, prompt, 8) for prompt in PROMPTS]


def make_cache(kv_format: KVFormat) -> KVCache:
    return KVCache(LAYERS, num_blocks=3, block_size=16, kv_format=kv_format, device=CPU)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("auto", 16 * (2 * 12 + 16) * 2), ("fp8", 16 * (2 * 12 + 16)), ("fp8_per_token_head", 16 * (2 * 20 + 24))],
)
def test_a_block_s_bytes_are_counted_with_its_scales(name: str, expected: int) -> None:
    kv_format = KVFormat.of(name, torch.bfloat16, CPU)
    assert kv_format.block_bytes(LAYERS, 16) == expected
    assert sum(tensor[0].nbytes for tensor in make_cache(kv_format).tensors) == expected


def test_blocks_are_copied_with_their_scales() -> None:
    cache = make_cache(KVFormat.of("fp8_per_token_head", torch.float32, CPU))
    for tensor in cache.tensors:
        tensor[0] = 2.0
    cache.copy_blocks(array([(0, 2)], 2))
    assert all((tensor[2].float() == 2).all() and (tensor[1].float() == 0).all() for tensor in cache.tensors)


def test_blocks_are_swapped_out_and_in_with_their_scales() -> None:
    cache = make_cache(KVFormat.of("fp8_per_token_head", torch.float32, CPU))
    host = HostBlocks(cache.tensors, 2)
    for tensor in cache.tensors:
        tensor[1] = 2.0
    host.move(array([(1, 0)], 2), array([], 2))
    host.move(array([], 2), array([(0, 2)], 2))
    assert all((tensor[2].float() == 2).all() and (tensor[0].float() == 0).all() for tensor in cache.tensors)


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_per_token_head"])
def test_what_is_not_finite_becomes_zero_in_the_named_blocks_alone(name: str) -> None:
    cache = make_cache(KVFormat.of(name, torch.float32, CPU))
    for tensor in cache.tensors:
        tensor[:, 3:5] = float("nan")
        tensor[:, 5] = -3.0
    cache.make_finite(array([1]))
    for tensor in (tensor.float() for tensor in cache.tensors):
        assert tensor[1].isfinite().all() and (tensor[1, 5] == -3).all()
        assert tensor[[0, 2], 3:5].isnan().all()


def test_fp8_on_a_gpu_that_cannot_read_it_is_refused_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_plane.engine.kv_cache.fp8_refusal", lambda device: "A100 has compute capability 8.0")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8: A100 .*; use auto"):
        KVFormat.of("fp8", torch.bfloat16, torch.device("cuda"))
    assert KVFormat.of("auto", torch.bfloat16, torch.device("cuda")) == KVFormat(torch.bfloat16)
