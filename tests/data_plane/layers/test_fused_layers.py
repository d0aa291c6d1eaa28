"""The fused layers' own rules; that they compute what transformers computes is shown in models/test_fusion.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.rms_norm import RmsNorm


def make_norm(width: int = 6) -> RmsNorm:
    return RmsNorm(nn.Parameter(torch.linspace(0.5, 2, width), requires_grad=False), 1e-6, 0.0)


class Attention(nn.Module):
    """Returns its input plus what it is passed, as transformers' attentions do in a pair."""

    def forward(self, hidden_states: torch.Tensor, shift: float) -> tuple[torch.Tensor, None]:
        return hidden_states + shift, None


def test_a_prepared_norm_serves_that_stream_and_only_once() -> None:
    norm = make_norm()
    stream, x = torch.randn(1, 3, 6), torch.randn(1, 3, 6)
    expected = stream + x
    norm.prepare(stream, stream.view(3, 6), x)
    torch.testing.assert_close(stream, expected)
    prepared = norm.of_stream(stream)
    torch.testing.assert_close(prepared.view(1, 3, 6), norm(expected.clone()))
    assert norm.of_stream(stream) is not prepared, "a result was kept past its use"


def test_a_norm_that_meets_another_tensor_computes_afresh() -> None:
    norm = make_norm()
    norm.prepare(torch.randn(1, 3, 6), torch.randn(3, 6), torch.randn(3, 6))
    other = torch.randn(1, 2, 6)
    torch.testing.assert_close(norm(other), make_norm()(other))


def test_layers_hand_their_stream_on_with_the_next_norm_computed() -> None:
    """Against the same layers written out."""
    torch.manual_seed(0)
    layers = [DecoderLayer(Attention(), nn.Linear(6, 6), make_norm(), make_norm()) for _ in range(2)]
    last = make_norm()
    layers[0].precede(layers[1].input_layernorm)
    layers[1].precede(last)
    stream = torch.randn(1, 3, 6)
    expected = stream.clone()
    computed: list[Any] = []
    layers[1].input_layernorm.of_rows = lambda rows: computed.append(rows)  # type: ignore[method-assign, assignment, return-value]
    with torch.inference_mode():
        for layer in layers:
            attended = make_norm()(expected) + 0.5
            expected = expected + attended
            expected = expected + layer.mlp(make_norm()(expected))
        hidden = stream
        for layer in layers:
            hidden = layer(hidden, shift=0.5)
    assert hidden is stream
    assert computed == [], "the second layer's norm was computed twice"
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(last(hidden), make_norm()(expected))


def test_parts_of_another_layer_are_not_its_own() -> None:
    """The next layer's norm is computed here and owned there: it appears once among a model's modules."""
    layers = [DecoderLayer(Attention(), nn.Linear(6, 6), make_norm(), make_norm()) for _ in range(2)]
    layers[0].precede(layers[1].input_layernorm)
    names = [name for name, module in nn.ModuleList(layers).named_modules() if isinstance(module, RmsNorm)]
    assert names == [f"{i}.{name}_layernorm" for i in range(2) for name in ("input", "post_attention")]


def test_hooks_of_a_quick_module_run_and_exchanged_parts_are_called() -> None:
    layer, calls = DecoderLayer(Attention(), nn.Linear(6, 6), make_norm(), make_norm()), list[str]()
    layer.mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    layer.post_attention_layernorm.register_forward_pre_hook(lambda *_: calls.append("norm"))
    layer.post_attention_layernorm(torch.zeros(1, 2, 6))
    layer.mlp = nn.Identity()
    layer.mlp.register_forward_hook(lambda *_: calls.append("other"))
    layer(torch.zeros(1, 2, 6), shift=1.0)
    assert calls == ["norm", "other"]
    assert dict(layer.named_children())["mlp"] is layer.mlp
    setattr(layer, "mlp", None)  # noqa: B010 - the type of `layer.mlp` has no None
    assert layer.mlp is None and "mlp" not in dict(layer.named_children())
