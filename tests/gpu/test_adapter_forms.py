"""LoRA bias, DoRA, and LoRA of the embedding and the head: the engine on the GPU against PEFT on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_plane.engine.test_adapter_forms import BIASED, check_forms, outer_forms, vector_forms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*merging LoRA weights won't be possible", "ignore:.*have invalid shape"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers", "ignore:Model w.* `tie_word_embeddings=True`"),
]


def test_lora_bias_and_dora_generate_as_peft(tmp_path: Path) -> None:
    """Over fused linears, q, k and v with biases of their own."""
    check_forms(tmp_path, "qwen2", vector_forms("qwen2"), device="cuda")


def test_head_and_embedding_generate_as_peft(tmp_path: Path) -> None:
    """Tied, multiplied when looked up, and with a vocabulary that is not a whole number of pages' columns."""
    forms = outer_forms("embed_tokens", "v_proj")
    check_forms(tmp_path, "gemma3", forms, sizes={"vocab_size": 259}, device="cuda")


@pytest.mark.filterwarnings("ignore:.*merging LoRA weights won't be possible", "ignore:.*have invalid shape")
@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias")
def test_trained_biases_of_the_base_generate_as_peft_on_a_gpu(tmp_path: Path) -> None:
    check_forms(tmp_path, "qwen2", BIASED["qwen2"], device="cuda")
