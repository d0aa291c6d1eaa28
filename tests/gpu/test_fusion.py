"""On a GPU too the fused layers are used, and compute what the plain ones do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from data_plane.config import CUDA_TOKEN_BUDGET
from data_plane.layers.decoder_layer import DecoderLayer
from data_plane.layers.gated_mlp import GatedMlp
from data_plane.layers.rotary_attention import RotaryAttention
from data_plane.models.loader import load_model
from tests.makers import make_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("arch", "expected"), [("llama", (2, 2, 2)), ("qwen3", (2, 2, 2)), ("gemma3", (2, 2, 0)), ("olmo2", (2, 2, 0))]
)
def test_what_is_fused_on_a_gpu(arch: str, expected: tuple[int, int, int], dtype: str, tmp_path: Path) -> None:
    """The proof at load compares our kernels with transformers' modules; what it refuses stays plain and is slower."""
    loaded = load_model(make_checkpoint(tmp_path, arch), dtype, torch.device("cuda"), max_step_tokens=CUDA_TOKEN_BUDGET)
    found = Counter(type(module) for module in loaded.model.modules())
    assert (found[RotaryAttention], found[GatedMlp], found[DecoderLayer]) == expected
