"""Which rotary embeddings of their own adapters may have, and what their contexts are then."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.rope_scaling import KINDS, RopeScaling, read_rope_scaling
from control_plane.errors import InvalidAdapter
from control_plane.registry.model.base_model import BaseModel
from tests.control_plane.registry.rig import CONFIG, base_model, pack, write_adapter

OWN = {"rope_type": "default", "rope_theta": 10000.0}


def rotary_base(**config: Any) -> BaseModel:
    """A base model of 512 tokens."""
    return replace(base_model(), config={"max_position_embeddings": 512, "rope_parameters": OWN} | config)


def rope_of(directory: Path, base: BaseModel, **fields: Any) -> dict[str, Any] | None:
    """What the manifest says."""
    info, _ = pack(write_adapter(directory, CONFIG | fields), base)
    rope: dict[str, Any] | None = json.loads(info.manifest).get("rope")
    assert info.context_length == (rope or {"context_length": 0})["context_length"]
    return rope


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("fields", "length", "parameters"),
    [
        ({"context_length": 2000}, 2000, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1024, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.5}, "context_length": 700},
            700,
            {"rope_type": "linear", "factor": 2.5},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "attention_factor": None}},
            2048,
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512},
        ),
        ({"rope_scaling": LLAMA3}, 4096, LLAMA3 | {"original_max_position_embeddings": 512}),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "context_length": 4096},
            4096,
            {"rope_type": "default", "rope_theta": 5e5},
        ),
    ],
)
def test_a_rotary_embedding_of_its_own(
    tmp_path: Path, fields: dict[str, Any], length: int, parameters: dict[str, Any]
) -> None:
    assert rope_of(tmp_path, rotary_base(), **fields) == {"context_length": length, "parameters": parameters}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"context_length": 512},
        {"rope_scaling": None, "rope_parameters": {}},
        {"rope_parameters": OWN},
        {"rope_scaling": {"type": "default", "rope_theta": 10000.0}, "context_length": 512},
    ],
)
def test_what_the_base_model_has_changes_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain, _ = pack(write_adapter(tmp_path / "plain"), rotary_base())
    same, _ = pack(write_adapter(tmp_path / "same", CONFIG | fields), rotary_base())
    assert same.digest == plain.digest and same.context_length == 0


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("fields", "config", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "rope_scaling: has the kind dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, {}, "one request would change others"),
        ({"rope_scaling": {"factor": 2.0}}, {}, "rope_scaling: has no rope_type; say which of default, linear"),
        ({"rope_scaling": {"rope_type": "spiral"}}, {}, "rope_type is 'spiral'; one of default, linear"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, {}, "rope_type is"),
        ({"rope_scaling": {"rope_type": "linear"}}, {}, "factor is missing; linear needs factor"),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, {}, "factor is 0.5; at least 1"),
        ({"rope_scaling": LINEAR | {"factor": "4"}}, {}, "factor is '4'; a number above 0"),
        ({"rope_scaling": LINEAR | {"factor": 1e300}}, {}, "factor is 1e"),
        ({"rope_scaling": LINEAR | {"beta_fast": 32}}, {}, "beta_fast is not a parameter of linear"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, {}, "low_freq_factor is not below"),
        ({"rope_scaling": "linear"}, {}, "rope_scaling: is not an object"),
        ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 4.0}}, {}, "contradicts rope_scaling"),
        ({"rope_scaling": LINEAR, "context_length": "long"}, {}, "context_length is 'long'"),
        ({"context_length": 1 << 40}, {}, "context_length: context_length is"),
        ({"context_length": True}, {}, "context_length: is True"),
        ({"context_length": 2048}, {"rope_parameters": LINEAR}, "own rotary embedding is scaled already"),
        ({"context_length": 2048}, {"rope_parameters": {}}, "names no rotary embedding"),
        ({"context_length": 2048}, {"rope_parameters": {"full": OWN, "sliding": OWN}}, "rotate in several ways"),
        ({"context_length": 2048}, {"max_position_embeddings": None}, "names no longest context"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        rope_of(tmp_path, rotary_base(**config), **fields)
    assert words in str(caught.value)


def test_a_manifest_reads_what_was_written() -> None:
    scaling = RopeScaling.of(4096, {"rope_type": "linear", "factor": 8.0})
    assert read_rope_scaling(json.loads(json.dumps(scaling.document()))) == scaling


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"context_length": 4096, "parameters": []},
        {"context_length": 1, "parameters": LINEAR},
        {"context_length": 4096.0, "parameters": LINEAR},
        {"context_length": 4096, "parameters": LINEAR, "more": 1},
        *({"context_length": 4096, "parameters": {"rope_type": kind}} for kind in KINDS),
    ],
)
def test_a_manifest_with_anything_else_is_refused(document: Any) -> None:
    with pytest.raises(ValueError):
        read_rope_scaling(document)
