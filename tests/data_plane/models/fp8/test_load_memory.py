"""How much of a checkpoint's weights is in memory at once while a model is loaded into FP8."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from data_plane.layers.fp8.activations import Fp8Activations
from data_plane.layers.lora_linear import LoraLinear
from data_plane.models.fused_parts import fused_attention
from data_plane.models.loader import load_model
from data_plane.models.probe import PROBE_NAME, Recorder, register_probe
from tests.makers import make_checkpoint

NUM_LAYERS = 4
HIDDEN = 64  # of the checkpoint's layers
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Watched:
    """The weights of a checkpoint's linears by name, while they live."""

    def __init__(self) -> None:
        self._weights: dict[str, weakref.ref[torch.Tensor]] = {}

    def read(self, directory: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """See ReadWeights."""
        register_probe(Recorder())
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=PROBE_NAME
        )
        self._weights = {
            name: weakref.ref(weight) for name, weight in model.named_parameters() if name.endswith("_proj.weight")
        }
        return model

    def live(self, *ends: str) -> int:
        """How many weights of these linears are in memory."""
        return sum(name.split(".")[-2] in ends and weight() is not None for name, weight in self._weights.items())

    def live_bytes(self) -> int:
        weights = [weight() for weight in self._weights.values()]
        return sum(weight.nbytes for weight in weights if weight is not None and not weight.is_meta)


def test_weights_are_freed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of attention when they are joined, and the others when they are rounded."""
    checkpoint = make_checkpoint(tmp_path, "llama", num_hidden_layers=NUM_LAYERS)
    watched, joined, rounded = Watched(), list[int](), list[int]()
    quantize = LoraLinear.quantize_weight

    def noted(*arguments: Any) -> Any:
        joined.append(watched.live("q_proj", "k_proj", "v_proj"))
        return fused_attention(*arguments)

    def noted_weight(linear: LoraLinear, activations: Fp8Activations) -> None:
        rounded.append(watched.live_bytes())
        quantize(linear, activations)

    monkeypatch.setattr("data_plane.models.fusion.fused_attention", noted)
    monkeypatch.setattr(LoraLinear, "quantize_weight", noted_weight)
    # As on a GPU, weights are not packed.
    monkeypatch.setattr("data_plane.layers.lora_linear.pack", lambda _: None)
    cpu = torch.device("cpu")
    load_model(checkpoint, "bfloat16", cpu, max_step_tokens=64, quantization="fp8", read_weights=watched.read)
    assert joined == [3 * (NUM_LAYERS - layer) for layer in range(NUM_LAYERS)]
    assert len(rounded) == 4 * NUM_LAYERS
    # The output and down projections are not joined; the last of them is rounded at last.
    output_bytes, down_bytes = 2 * HIDDEN * HIDDEN, 2 * HIDDEN * 128
    assert rounded[0] == NUM_LAYERS * (output_bytes + down_bytes)
    assert rounded == sorted(rounded, reverse=True) and rounded[-1] <= down_bytes
    assert watched.live(*ATTENTION, "gate_proj", "up_proj", "down_proj") == 0
