"""The verdict on a signature is stored with the version, outlives a restart, and follows a new signature."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.registry.peft.packing import CheckFiles
from control_plane.registry.records import AdapterVersion
from control_plane.registry.store.record_documents import decode_version, encode_version
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict
from tests.control_plane.registry.rig import files, open_registry

KEY = SignatureVerdict("release", SignatureMethod.KEY, "ab" * 32, 1_700_000_000.0)
CERTIFICATE = SignatureVerdict("ours", SignatureMethod.CERTIFICATE, "cd" * 32, 1_700_000_001.0, "CN=signer")
VERSION = AdapterVersion("0" * 64, "lora", 4, "float32", 10, 20, ("a.b",), 1.0, "ab" * 32, 1)


def signed(verdict: SignatureVerdict | None) -> CheckFiles:
    def check(given: Mapping[str, Path], _copies: Path) -> tuple[Mapping[str, Path], SignatureVerdict | None]:
        return given, verdict

    return check


async def test_the_verdict_follows_the_latest_signature_and_outlives_a_restart(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    registry = await open_registry(place)
    first = await registry.register("a", files(tmp_path), check_files=signed(KEY))
    version = first.record.active_version
    assert version is not None and version.signature == KEY
    # The same signature again, verified later, changes nothing.
    again = await registry.register("a", files(tmp_path), check_files=signed(replace(KEY, verify_time_s=5.0)))
    assert again.record is again.previous
    unsigned = await registry.register("a", files(tmp_path))
    assert unsigned.record is unsigned.previous, "what is known of the same files is not forgotten"
    other = await registry.register("a", files(tmp_path), check_files=signed(CERTIFICATE))
    assert other.previous is not None and other.record.revision == other.previous.revision + 1
    await registry.close()
    registry = await open_registry(place)
    found = registry.get("a").active_version
    assert found is not None and found.signature == CERTIFICATE
    await registry.close()


async def test_files_that_are_only_checked_show_their_verdict_and_store_none(tmp_path: Path) -> None:
    registry = await open_registry(str(tmp_path / "store"))
    await registry.register("a", files(tmp_path))
    checked = await registry.register("a", files(tmp_path), validate_only=True, check_files=signed(KEY))
    version, stored = checked.record.active_version, registry.get("a").active_version
    assert version is not None and version.signature == KEY
    assert stored is not None and stored.signature is None
    await registry.close()


@pytest.mark.parametrize("verdict", [KEY, CERTIFICATE])
def test_a_document_keeps_the_verdict(verdict: SignatureVerdict) -> None:
    version = replace(VERSION, signature=verdict)
    assert decode_version(encode_version(version)) == version


def test_documents_without_a_verdict_are_those_of_before_and_read_as_unsigned() -> None:
    raw = encode_version(VERSION)
    assert "signature" not in json.loads(raw) and decode_version(raw) == VERSION


@pytest.mark.parametrize("wrong", ["x", {"signer": "x"}, {"signer": "x", "method": "vow"}, []])
def test_a_damaged_verdict_is_not_taken_for_none(wrong: object) -> None:
    document = json.loads(encode_version(replace(VERSION, signature=KEY)))
    with pytest.raises(ValueError, match=r"signature|SignatureMethod|missing"):
        decode_version(json.dumps(document | {"signature": wrong}).encode())
