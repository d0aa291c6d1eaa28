"""Which names of base models are clearly those of different models."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.registry.model.base_names import MAX_NAME_CHARS, are_different, base_warnings, last_part

DIFFERENT = [
    ("Llama-3-8B", "Llama-3.1-8B"),
    ("Llama-3-8B", "Llama-3-70B"),
    ("Llama-3-8B", "Llama-3-8B-Instruct"),
    ("Llama-3-8B-bnb-4bit", "Meta-Llama-3-8B-Instruct"),
    ("Mixtral-8x7B-v0.1", "Mistral-7B-v0.1"),
    ("Mistral-7B-v0.1", "Mistral-7B-v0.3"),
    ("Qwen2.5-7B", "Qwen2.5-Coder-7B"),
    ("gemma-2-2b-it", "gemma-2-2b"),
    ("opt-125m", "opt-350m"),
    ("Qwen2.5-0.5B", "SmolLM2-135M"),
]
PERHAPS_THE_SAME = [
    ("Llama-3-8B", "Llama-3-8B"),
    ("Meta-Llama-3-8B", "Llama-3-8B"),
    ("llama3-8b", "Llama-3-8B"),
    ("qwen2.5_0.5b", "Qwen2.5-0.5B"),
    ("Llama-2-7b-hf", "Llama-2-7b"),
    ("llama-3-8b-Instruct-bnb-4bit", "Meta-Llama-3-8B-Instruct"),
    ("Mistral-7B-Instruct-v0.2-GPTQ", "Mistral-7B-Instruct-v0.2"),
    ("Qwen3-30B-A3B-FP8", "Qwen3-30B-A3B"),
    ("checkpoint-500", "Llama-3-8B"),
    ("model", "Llama-3-8B"),
    ("Llama-3-8B", "base"),
    ("gpt2", "Llama-3-8B"),
    ("2b1c0ffee8b", "Llama-3-8B"),
    ("", "Llama-3-8B"),
]


@pytest.mark.parametrize(("own", "served"), DIFFERENT)
def test_names_with_sizes_and_other_words_are_of_different_models(own: str, served: str) -> None:
    assert are_different(own, served) and are_different(served, own)


@pytest.mark.parametrize(("own", "served"), PERHAPS_THE_SAME)
def test_names_that_say_little_or_differ_in_how_weights_are_stored_may_be_of_one(own: str, served: str) -> None:
    assert not are_different(own, served) and not are_different(served, own)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("meta-llama/Llama-3-8B", "Llama-3-8B"),
        ("/home/me/models/Llama-3-8B/", "Llama-3-8B"),
        ("C:\\models\\Llama-3-8B", "Llama-3-8B"),
        ("/root/.cache/huggingface/hub/models--meta-llama--Llama-3-8B/snapshots/8cde5ca8380496c9", "Llama-3-8B"),
        ("snapshots/8cde5ca8380496c9", "8cde5ca8380496c9"),
        ("./", "."),
        ("", ""),
        ("x/" * MAX_NAME_CHARS + "Llama-3-8B", ""),
    ],
)
def test_last_part_is_that_of_a_repository_or_a_path(name: str, part: str) -> None:
    assert last_part(name) == part


def test_warning_names_both_and_shows_nothing_raw(tmp_path: Path) -> None:
    served = tmp_path / "Llama-3.1-8B"
    served.mkdir()
    (link := tmp_path / "current").symlink_to(served)
    (warning,) = base_warnings("acme/Llama-3-8B\x1b[31m" + "x" * 200, link)
    assert "'Llama-3-8B\\x1b[31mxxx" in warning and "'Llama-3.1-8B' is served" in warning
    assert warning.isprintable() and len(warning) < 400
    assert base_warnings("/data/Llama-3.1-8B", link) == base_warnings("", link) == ()
