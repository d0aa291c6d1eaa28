"""A model that mixes the tokens of a batch, or looks at their places, is refused; one that does not is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from data_plane.errors import ConfigError, UnsupportedModel
from data_plane.models.model_probe import probe_model
from data_plane.models.packing import begin_request, thresholds_of
from tests.data_plane.models.models import MAX_STEP_TOKENS, changed, in_dtype, make_model

MAX_MODEL_LEN = 256
LONG_PLACES = 8192  # of a threshold that no probing pass has places for


def places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device)


def shift_tokens(x: torch.Tensor) -> torch.Tensor:
    """Half of each token comes from the one before, as in RWKV."""
    return torch.cat([torch.roll(x, 1, dims=1)[..., ::2], x[..., 1::2]], dim=-1)


def convolve(x: torch.Tensor) -> torch.Tensor:
    """A causal convolution over three tokens."""
    kernel = torch.full((x.shape[-1], 1, 3), 0.3, dtype=x.dtype)
    padded = nn.functional.pad(x.transpose(1, 2), (2, 0))
    return nn.functional.conv1d(padded, kernel, groups=x.shape[-1]).transpose(1, 2)


def decaying_sum(x: torch.Tensor) -> torch.Tensor:
    """A recurrent state beside the token itself."""
    state, states = torch.zeros_like(x[:, 0]), []
    for index in range(x.shape[1]):
        state = 0.5 * state + x[:, index]
        states.append(state)
    return x + torch.stack(states, dim=1)


def mean_of_batch(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(dim=1, keepdim=True)


def scale_by_place(x: torch.Tensor) -> torch.Tensor:
    """A temperature that changes every so many places, and is made from the place in the batch."""
    return x * (1 + torch.log1p(torch.floor((places(x).float() + 1) / LONG_PLACES)))[None, :, None]


def choose_by_place(x: torch.Tensor) -> torch.Tensor:
    return torch.where((places(x) < LONG_PLACES)[None, :, None], x, -x)


def decode_otherwise(x: torch.Tensor) -> torch.Tensor:
    """Another formula for one token at a time."""
    return x if x.shape[1] > 1 else 3 * x


def follow_the_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.shape[1] ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("module", "change", "says"),
    [
        ("model.layers.1.mlp", shift_tokens, "order of the tokens"),
        ("model.layers.0.self_attn.k_proj", convolve, "the key of model.layers.0 changes with the order of the tokens"),
        ("model.layers.1.mlp.down_proj", decaying_sum, "order of the tokens"),
        ("model.layers.0.self_attn.v_proj", decaying_sum, "the value of model.layers.0"),
        ("model.layers.1.self_attn.q_proj", scale_by_place, "the query of model.layers.1 is computed with the token's"),
        ("model.layers.0.mlp", choose_by_place, "the input of model.layers.1 is computed with the token's place"),
        ("model.layers.0.mlp", mean_of_batch, "the input of model.layers.1 changes with the other tokens"),
        (
            "model.layers.1.self_attn.q_proj",
            follow_the_number,
            "changes with the other tokens of the batch or their number",
        ),
        ("lm_head", decode_otherwise, "the vector of a token's logits changes where the token is alone"),
        (
            "model.layers.0.self_attn.o_proj",
            decode_otherwise,
            "the input of model.layers.1 changes where the token is alone",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_one_token_gets_must_not_follow_the_others(
    module: str, change: Callable[[torch.Tensor], torch.Tensor], says: str, dtype: torch.dtype
) -> None:
    model = in_dtype(changed(module, change, at_input=module.endswith(("down_proj", "mlp"))), dtype)
    with pytest.raises(UnsupportedModel, match=says):
        probe_model(model, MAX_MODEL_LEN, MAX_STEP_TOKENS)


def test_frequencies_that_follow_the_longest_position_are_refused() -> None:
    """Dynamic rope beyond the length that it was trained for; up to that length it is like any other."""
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    model = make_model(rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(UnsupportedModel, match=r"the query of model\.layers\.0 changes with the"):
        probe_model(model, 512, MAX_STEP_TOKENS)
    short = probe_model(make_model(rope_parameters=rope, max_position_embeddings=64), 64, MAX_STEP_TOKENS)
    assert len(short.attention_layers) == 2


def test_an_attention_scale_that_follows_the_batch_is_refused() -> None:
    model = make_model()
    attention = model.get_submodule("model.layers.1.self_attn")
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(module, "scaling", kwargs["hidden_states"].shape[1] ** -0.5),
        with_kwargs=True,
    )
    with pytest.raises(UnsupportedModel, match=r"the scaling of attention of model\.layers\.1 changes with the other"):
        probe_model(model, MAX_MODEL_LEN, MAX_STEP_TOKENS)


def test_positions_that_the_model_does_not_count_from_0_are_refused() -> None:
    """RoBERTa counts from behind its padding token, unless positions are given."""
    model = make_model("roberta", is_decoder=True, type_vocab_size=1)
    with pytest.raises(UnsupportedModel, match="does not number a request's tokens from 0 on"):
        probe_model(model, 128, MAX_STEP_TOKENS)


@pytest.mark.parametrize(
    ("model_type", "settings", "says"),
    [
        # State-space mixers beside attention in every layer.
        (
            "falcon_h1",
            {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16},
            "order of the tokens",
        ),
        # Convolutions over keys and queries, values of the token before.
        ("zaya", {"num_experts": 4, "num_experts_per_tok": 1, "head_dim": 16}, "the query of model.layers.0 changes"),
        # Layers without rotary positions scale their queries by the place in the batch, every floor_scale places.
        (
            "llama4_text",
            {"num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "floor_scale": LONG_PLACES},
            "the query of model.layers.1 is computed with the token's place",
        ),
        # Learned positions of the place in the batch.
        ("bart", {"decoder_layers": 2, "is_decoder": True, "is_encoder_decoder": False}, "order of the tokens"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "1 of 2 layers call"),
        ("mamba", {"state_size": 8}, "0 of 2 layers call"),
        ("rwkv", {"attention_hidden_size": 32}, "0 of 2 layers call"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "as many with ALiBi"),
        ("trocr", {"decoder_layers": 2, "d_model": 32, "decoder_attention_heads": 4}, "layers call"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else None,
)
@pytest.mark.filterwarnings("ignore:.*Please use the new API settings to control TF32")
def test_types_that_are_not_served(model_type: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        probe_model(make_model(model_type, **settings), 64, MAX_STEP_TOKENS)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        # Layers without any positions: causal order alone.
        (
            "granitemoehybrid",
            {
                "layer_types": ["full_attention"] * 2,
                "position_embedding_type": "nope",
                "mamba_n_heads": 4,
                "shared_intermediate_size": 48,
            },
        ),
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 1]}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_types_whose_tokens_are_independent_are_served(
    model_type: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    probe = probe_model(in_dtype(make_model(model_type, **settings), dtype), MAX_MODEL_LEN, MAX_STEP_TOKENS)
    assert len(probe.attention_layers) == 2


def test_a_context_shorter_than_the_probes_request_is_served() -> None:
    """Learned positions end where the context does."""
    model = make_model("opt", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=4)
    assert len(probe_model(model, 4, MAX_STEP_TOKENS).attention_layers) == 2


def test_logits_that_are_not_finite_are_reported_with_the_dtype() -> None:
    model = make_model()
    model.get_submodule("lm_head").weight.mul_(float("inf"))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"not finite in torch.float32; choose another --dtype"):
        probe_model(model, MAX_MODEL_LEN, MAX_STEP_TOKENS)


def test_thresholds_are_all_numbers_of_the_configuration_below_the_context() -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 77,
        },
    }
    model = make_model("gemma3_text", rope_parameters=rope, sliding_window=33, head_dim=8)
    found = thresholds_of(model.config, 100)
    assert {32, 33, 48, 64, 77} <= set(found)
    assert max(found) < 100
    assert 256 in thresholds_of(model.config, 1000)


def test_a_model_that_returns_all_logits_is_refused() -> None:
    model = make_model()
    plain = model.forward
    model.forward = lambda **kwargs: plain(**{**kwargs, "logits_to_keep": 0})
    assert len(begin_request(model, MAX_MODEL_LEN).logits) > 2
    with pytest.raises(UnsupportedModel, match=r"returned the logits of .* tokens where 2 were requested"):
        probe_model(model, MAX_MODEL_LEN, MAX_STEP_TOKENS)
