"""How long a context may be."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from data_plane.errors import ConfigError
from data_plane.models.limits import context_limit, model_length

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}


def test_limit_is_the_models_own() -> None:
    assert context_limit(AutoConfig.for_model("llama", max_position_embeddings=777)) == 777
    assert context_limit(AutoConfig.for_model("gpt2", n_positions=99)) == 99


def test_limit_is_the_original_length_where_frequencies_follow_the_batch() -> None:
    """Longer, one request of the batch would switch the rotary frequencies of all."""
    config = AutoConfig.for_model("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=128, **SIZES)
    assert context_limit(config) == 128


def test_lengths_of_other_names_are_read() -> None:
    assert context_limit(AutoConfig.for_model("dbrx", max_seq_len=77)) == 77
    assert context_limit(AutoConfig.for_model("mamba")) is None


def test_a_longer_context_than_the_models_is_refused_with_the_reason() -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=512)
    assert context_limit(config, 512) == 512
    with pytest.raises(ConfigError, match=r"--max-model-len: 513 is above 512 tokens, the length in config\.json"):
        context_limit(config, 513)
    config = AutoConfig.for_model("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=128, **SIZES)
    with pytest.raises(ConfigError, match="beyond it the frequencies of longrope rope follow the longest request"):
        context_limit(config, 129)


def test_length_is_bounded_by_the_model_and_by_the_blocks() -> None:
    assert model_length(None, 512, num_blocks=10, block_size=16) == 160
    assert model_length(None, 100, num_blocks=10, block_size=16) == 100
    assert model_length(64, 512, num_blocks=10, block_size=16) == 64
    with pytest.raises(ConfigError, match="raise --num-blocks"):
        model_length(161, 512, num_blocks=10, block_size=16)
