"""Fused forms of a decoder's norms, attentions and MLPs, each proven against transformers' own module.

Both run on random input in float32 copies, so that rounding hides no other formula. Called by fusion.py, which puts
the parts in place.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from data_plane.layers.attention import AttentionSettings, Rotation, attach
from data_plane.layers.context import StepContext
from data_plane.layers.gated_mlp import GatedMlp
from data_plane.layers.lora_linear import LoraLinear
from data_plane.layers.rms_norm import RmsNorm
from data_plane.layers.rotary_attention import RotaryAttention
from data_plane.models.probe import NUM_TOKENS, Call, Recorder, own_values, register_probe
from kernels.gated_activation import ACTIVATIONS, gated_activation
from kernels.rope import apply_rope

# Largest relative error of a token. Sums in another order differ by about 1e-6; the closest other formula, GELU's
# approximation, by 3e-4.
PART_ERROR = 2e-5

# Linears that read one input, in the order of the columns that they become.
QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))


def fused_attention(
    module: nn.Module, name: str, call: Call, kwargs: Mapping[str, Any], free: Collection[str], context: StepContext
) -> RotaryAttention | None:
    """The module's fused form, or None if it is not proven to compute the same."""
    tables = kwargs.get("position_embeddings")
    linears = _joint_linears(module, name, QKV, free)
    if linears is None or not isinstance(tables, tuple) or len(tables) != 2 or not hasattr(module, "o_proj"):
        return None
    heads = (call.query.shape[1], call.key.shape[1], call.value.shape[1])
    if tables[0].shape[:2] != (1, NUM_TOKENS) or tables[0].shape[2] > call.key.shape[3]:
        return None
    if call.kwargs.get("s_aux") is not None:
        return None
    scale = call.kwargs.get("scaling")
    settings = AttentionSettings(
        call.query.shape[-1] ** -0.5 if scale is None else scale,
        call.kwargs.get("sliding_window"),
        call.kwargs.get("softcap"),
    )

    def build(source: Any) -> RotaryAttention | None:
        norms = None
        if hasattr(source, "q_norm") or hasattr(source, "k_norm"):
            norms = _fused_pair(getattr(source, "q_norm", None), getattr(source, "k_norm", None))
            if norms is None:
                return None
        joint = LoraLinear([getattr(source, part) for part in linears], [f"{name}.{part}" for part in linears], context)
        return RotaryAttention(joint, source.o_proj, heads=heads, norms=norms, settings=settings)

    copied = copy.deepcopy(module).float()
    fused = build(copied)
    if fused is None:
        return None
    x = random_rows(fused.qkv.in_features, call.query.device)
    inputs = _to_float32(kwargs)
    recorder, attention = Recorder(), _OwnValues()
    attach(fused, attention)
    register_probe(recorder)
    try:
        expected = copied(hidden_states=x, **inputs)[0]
        actual = fused(hidden_states=x, **inputs)[0]
    finally:
        register_probe(Recorder())
    theirs = recorder.calls[0]
    pairs = [(actual, expected)]
    for ours, other in zip(attention.calls[0], (theirs.query, theirs.key, theirs.value), strict=True):
        pairs.append((ours, other[0].transpose(0, 1)))
    if any(relative_error(ours, other) > PART_ERROR for ours, other in pairs):
        return None
    result = build(module)
    assert result is not None, f"{name} was built before"
    result.qkv.pack_weight()
    attach(result, _OwnValues())  # until the engine attaches its cache
    return result


def fused_mlp(module: nn.Module, name: str, free: Collection[str], context: StepContext) -> GatedMlp | None:
    """The module's fused form, or None if it is not proven to compute the same."""
    linears = _joint_linears(module, name, GATE_UP, free)
    activation = _activation(module)
    if linears is None or activation is None or not hasattr(module, "down_proj"):
        return None

    def build(source: Any) -> GatedMlp:
        joint = LoraLinear([getattr(source, part) for part in linears], [f"{name}.{part}" for part in linears], context)
        return GatedMlp(joint, source.down_proj, activation)

    copied = copy.deepcopy(module).float()
    fused = build(copied)
    x = random_rows(fused.gate_up.in_features, fused.gate_up.weight.device)
    if relative_error(fused(x), copied(x)) > PART_ERROR:
        return None
    result = build(module)
    result.gate_up.pack_weight()
    return result


def _activation(module: nn.Module) -> str | None:
    """The name of the module's activation among ours."""
    own = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if own is None:
        return None
    gate = torch.linspace(-8, 8, 257)
    expected = own(gate)
    both = torch.stack([gate, torch.ones_like(gate)], dim=1)
    for activation in ACTIVATIONS:
        if torch.allclose(gated_activation(both, activation)[:, 0], expected, atol=1e-6):
            return activation
    return None


def fused_norm(module: nn.Module | None) -> RmsNorm | None:
    """Our form of an RMS norm, with Gemma's offset of the weight where that fits; None for any other norm."""
    if module is None or not type(module).__name__.endswith("RMSNorm"):
        return None
    weight: Any = getattr(module, "weight", None)
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None:
        return None
    copied: Any = copy.deepcopy(module).float()
    x = random_rows(len(weight), weight.device)
    for offset in (0.0, 1.0):
        if relative_error(RmsNorm(copied.weight, eps, offset)(x), copied(x)) <= PART_ERROR:
            return RmsNorm(weight, eps, offset)
    return None


def _fused_pair(q_norm: nn.Module | None, k_norm: nn.Module | None) -> tuple[RmsNorm, RmsNorm] | None:
    query, key = fused_norm(q_norm), fused_norm(k_norm)
    if query is None or key is None or (query.eps, query.weight_offset) != (key.eps, key.weight_offset):
        return None
    return query, key


class _OwnValues:
    """The probe's attention for rotated tensors: records the call and returns each token's own values."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attend_rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        settings: AttentionSettings,  # noqa: ARG002  # handed through as the plain module gave them
    ) -> torch.Tensor:
        apply_rope(query, key, None, rotation.cos, rotation.sin, norm=rotation.norm)
        self.calls.append((query, key, value))
        return own_values(query, value)


def _joint_linears(
    module: nn.Module, name: str, choices: tuple[tuple[str, ...], ...], free: Collection[str]
) -> tuple[str, ...] | None:
    """The first choice whose children are all linears that every token passes once and that no fused part uses yet."""
    for choice in choices:
        if all(f"{name}.{part}" in free and isinstance(getattr(module, part, None), nn.Linear) for part in choice):
            return choice
    return None


def random_rows(width: int, device: torch.device) -> torch.Tensor:
    """float32 [1, NUM_TOKENS, width], the same in every call. Values of all magnitudes: a clamp or an eps must show."""
    rows = torch.randn(1, NUM_TOKENS, width, generator=torch.Generator().manual_seed(0))
    return (rows * torch.logspace(-2, 2, NUM_TOKENS)[:, None]).to(device)


def _to_float32(value: Any) -> Any:
    """`value` with every float tensor in it in float32."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, tuple | list):
        return type(value)(_to_float32(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _to_float32(item) for key, item in value.items()}
    return value


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a token; infinite if a value is not finite or the shapes differ.

    Tokens are the first dimension, or the second after one of size 1.
    """
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = (tensor.float().reshape(NUM_TOKENS, -1) for tensor in (actual, expected))
    errors = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    return float(errors.max()) if bool(errors.isfinite().all()) else float("inf")
