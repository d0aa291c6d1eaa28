"""Which parts of a model are fused, and that a part of another formula never is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, rotate_half

from data_plane.engine.kv_cache import KVCache, KVFormat
from data_plane.layers.attention import PagedAttention
from data_plane.layers.context import StepContext
from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.gated_mlp import GatedMlp
from data_plane.layers.rms_norm import RmsNorm
from data_plane.layers.rotary_attention import RotaryAttention
from data_plane.models.fused_parts import fused_mlp, fused_norm
from data_plane.models.fusion import fuse_model
from data_plane.models.loader import load_model
from data_plane.models.model_probe import probe_model
from kernels.paged_attention import AttentionBatch
from tests.data_plane.models.models import MAX_STEP_TOKENS, in_dtype, make_model
from tests.makers import make_checkpoint


def counts(model: nn.Module) -> tuple[int, int, int]:
    """Attentions, MLPs and layers that are ours."""
    found = Counter(type(module) for module in model.modules())
    return found[RotaryAttention], found[GatedMlp], found[DecoderLayer]


def fuse(model: PreTrainedModel) -> list[str]:
    """The linears that are left."""
    return fuse_model(model, probe_model(model, 256, MAX_STEP_TOKENS), StepContext(), 256).linear_names


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("llama", (2, 2, 2)),
        ("qwen3", (2, 2, 2)),
        ("phi3", (2, 2, 2)),
        ("gemma3", (2, 2, 0)),  # four norms to a layer
        ("olmo2", (2, 2, 0)),  # norms behind
        ("granite", (2, 2, 0)),  # residuals are multiplied
        ("qwen3_moe", (2, 0, 2)),
        ("starcoder2", (2, 0, 0)),  # LayerNorm, no gate
        ("gpt_neox", (0, 0, 0)),
    ],
)
def test_what_is_fused_of_an_architecture(arch: str, expected: tuple[int, int, int], tmp_path: Path) -> None:
    """That all of them compute as transformers does is shown by the engine's oracle."""
    loaded = load_model(make_checkpoint(tmp_path, arch), "auto", torch.device("cpu"), max_step_tokens=MAX_STEP_TOKENS)
    assert counts(loaded.model) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_model_is_fused_all_the_same(dtype: torch.dtype) -> None:
    model = in_dtype(make_model(), dtype)
    assert fuse(model) == [
        f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    assert counts(model) == (2, 2, 2)
    assert all(parameter.dtype == dtype for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ["cohere", "glm4"])
def test_a_rotation_of_neighbouring_pairs_is_not_ours(model_type: str) -> None:
    model = make_model(model_type, head_dim=8)
    fuse(model)
    assert counts(model)[0] == 0


def test_an_attention_that_clips_its_projections_is_not_ours() -> None:
    """OLMo's clip_qkv does nothing to values of ordinary size."""
    model = make_model("olmo", clip_qkv=20.0)
    fuse(model)
    assert counts(model)[0] == 0
    unclipped = make_model("olmo")
    fuse(unclipped)
    assert counts(unclipped)[0] == 2


def test_an_attention_whose_queries_grow_with_the_position_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond position 100 only, as in models that temper long contexts."""
    model = make_model()
    plain = LlamaAttention.forward

    def tempered(self: Any, hidden_states: Any, *args: Any, position_ids: Any, **kwargs: Any) -> Any:
        hidden_states = hidden_states * torch.where(position_ids > 100, 1.1, 1.0)[..., None]
        return plain(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", tempered)
    fuse(model)
    assert counts(model)[0] == 0


@pytest.mark.parametrize("settings", [{"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}, {"mlp_bias": True}])
def test_other_activations_and_biases_are_ours(settings: dict[str, Any]) -> None:
    model = make_model(**settings)
    x = torch.randn(1, 3, 32)
    expected = model.model.layers[0].mlp(x)
    fuse(model)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, GatedMlp)
    torch.testing.assert_close(mlp(x), expected)


class ScaledMlp(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.001


class ClampedMlp(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-30, 30)


@pytest.mark.parametrize("mlp_class", [LlamaMLP, ScaledMlp, ClampedMlp])
def test_an_mlp_of_another_formula_is_not_ours(mlp_class: type[LlamaMLP]) -> None:
    mlp = mlp_class(make_model().config)
    free = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    fused = fused_mlp(mlp.requires_grad_(False), "mlp", free, StepContext())
    assert (fused is not None) == (mlp_class is LlamaMLP)
    assert fused_mlp(mlp, "mlp", free - {"mlp.up_proj"}, StepContext()) is None


def test_a_norm_of_another_formula_is_not_ours() -> None:
    class ThriceRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(hidden_states)

    assert isinstance(fused_norm(LlamaRMSNorm(8).requires_grad_(False)), RmsNorm)
    assert fused_norm(ThriceRMSNorm(8).requires_grad_(False)) is None
    assert fused_norm(nn.LayerNorm(8)) is None
    assert fused_norm(None) is None


def test_a_part_that_cannot_run_alone_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss's MLP returns a pair; an attention may need what only its layer has."""
    model = make_model()
    plain = LlamaAttention.forward

    def guarded(self: Any, *, hidden_states: Any, **kwargs: Any) -> Any:
        if float(hidden_states.abs().max()) > 50:
            raise RuntimeError("out of range")
        return plain(self, hidden_states=hidden_states, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", guarded)
    fuse(model)
    assert counts(model) == (0, 2, 2)


def test_a_model_that_uses_its_embeddings_again_keeps_its_layers() -> None:
    """Layers of ours would have changed them."""
    model = make_model()
    kept: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: kept.append(output))

    def use_again(_: nn.Module, __: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + kept.pop()
        return output

    model.model.register_forward_hook(use_again)
    fuse(model)
    assert counts(model) == (2, 2, 0)


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("cohere", {}, (0, 2, 0)),  # attention and MLP side by side
        ("smollm3", {"no_rope_layers": [1, 0]}, (1, 2, 2)),  # the second layer has no rotation
        ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}, (1, 2, 0)),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8}, (0, 0, 0)),  # sinks
        ("ministral3", {"head_dim": 8}, (2, 2, 2)),
        (
            "qwen2_moe",
            {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
            (2, 2, 2),
        ),
    ],
)
def test_a_model_in_part_fused_computes_as_transformers_does(
    model_type: str, settings: dict[str, Any], expected: tuple[int, int, int], tmp_path: Path
) -> None:
    """A prompt through the paged cache, every logit against eager attention."""
    if model_type == "gpt_oss":
        settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    make_model(model_type, **settings).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32", torch.device("cpu"), max_step_tokens=MAX_STEP_TOKENS)
    assert counts(loaded.model) == expected
    layers = loaded.probe.attention_layers
    cache = KVCache(layers, num_blocks=5, block_size=8, kv_format=KVFormat(torch.float32), device=torch.device("cpu"))
    for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
        PagedAttention(loaded.context, keys, values).attach(layer.module)
    tokens, count = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(1)), torch.arange(40)
    batch = AttentionBatch.build(torch.arange(5, dtype=torch.int32)[None], [0, 40], [40])
    loaded.context.begin(batch, count, None)
    actual = loaded.logits(tokens, count, count)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        torch.testing.assert_close(actual, plain(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_rotation_is_that_of_halves() -> None:
    """What the probe's positions leave open: the fused rotation far from the start."""
    model = make_model()
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, LlamaAttention)
    x = torch.randn(1, 5, 32)
    cos, sin = model.model.rotary_emb(x, torch.tensor([[0, 100, 7, 255, 31]]))
    query = attention.q_proj(x).view(1, 5, 4, 8).transpose(1, 2)
    expected = (query * cos[:, None] + rotate_half(query) * sin[:, None])[0].transpose(0, 1)
    fuse(model)
    fused = model.model.layers[0].self_attn
    recorded = fused.motet_attention
    recorded.calls.clear()
    fused(x, position_embeddings=(cos, sin))
    torch.testing.assert_close(recorded.calls[0][0], expected)
