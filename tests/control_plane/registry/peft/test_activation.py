"""Activated adapters (aLoRA): what a version keeps of them, and what they may not change."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.errors import InvalidAdapter
from control_plane.registry.store.record_documents import decode_version, encode_version
from data_plane.adapters.format.manifest import read_manifest
from data_plane.errors import AdapterCorrupt
from tests.control_plane.api.fake_adapters import DIGEST, adapter_version
from tests.control_plane.registry.rig import CONFIG, base_model, pack, safetensors_bytes, tensors, write_adapter

FIELD = "alora_invocation_tokens"


def test_the_tokens_are_a_part_of_the_version(tmp_path: Path) -> None:
    plain, _ = pack(write_adapter(tmp_path / "plain"), base_model())
    empty, _ = pack(write_adapter(tmp_path / "null", CONFIG | {FIELD: None}), base_model())
    activated, _ = pack(write_adapter(tmp_path / "activated", CONFIG | {FIELD: [255, 0]}), base_model())
    other, _ = pack(write_adapter(tmp_path / "other", CONFIG | {FIELD: [0, 255]}), base_model())
    assert empty.digest == plain.digest and FIELD not in json.loads(plain.manifest)
    assert len({plain.digest, activated.digest, other.digest}) == 3
    assert activated.alora_invocation_tokens == (255, 0) and plain.alora_invocation_tokens == ()
    assert read_manifest(activated.manifest, activated.digest).alora_invocation_tokens == (255, 0)


@pytest.mark.parametrize("value", [[], [-1], ["a"], 5, [1 << 31], None])
def test_a_worker_refuses_bad_tokens_in_a_manifest(tmp_path: Path, value: Any) -> None:
    info, _ = pack(write_adapter(tmp_path), base_model())
    manifest = json.dumps(json.loads(info.manifest) | {FIELD: value}).encode()
    with pytest.raises(AdapterCorrupt, match="invocation_tokens"):
        read_manifest(manifest, hashlib.sha256(manifest).hexdigest())


def test_a_record_keeps_them_and_others_are_as_before() -> None:
    version = replace(adapter_version(DIGEST), alora_invocation_tokens=(5, 6))
    assert decode_version(encode_version(version)) == version
    assert FIELD not in json.loads(encode_version(adapter_version(DIGEST)))
    damaged = json.loads(encode_version(version)) | {FIELD: [5, -6]}
    with pytest.raises(ValueError, match=FIELD):
        decode_version(json.dumps(damaged).encode())


@pytest.mark.parametrize(
    ("fields", "vectors", "words"),
    [
        ({"use_dora": True}, "magnitude", "DoRA magnitudes"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "", "a rotary embedding of its own"),
    ],
)
def test_what_cannot_act_from_a_token_on_is_refused(
    tmp_path: Path, fields: dict[str, Any], vectors: str, words: str
) -> None:
    own = {"rope_type": "default", "rope_theta": 10000.0}
    base = replace(base_model(), config={"max_position_embeddings": 512, "rope_parameters": own})
    weights = safetensors_bytes(tensors(vectors=vectors))
    with pytest.raises(InvalidAdapter, match=f"{FIELD}: is set, and the adapter has {words}"):
        pack(write_adapter(tmp_path, CONFIG | {FIELD: [1]} | fields, weights), base)
