"""Documents of records and versions: what is written is read, what is damaged is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from control_plane.access.visibility import NOBODYS, Ownership, Visibility
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion
from control_plane.registry.store.record_documents import (
    decode_record,
    decode_version,
    encode_record,
    encode_version,
    with_versions,
)

VERSIONS = tuple(
    AdapterVersion(
        digest=letter * 64,
        kind="lora",
        max_rank=8,
        dtype="float32",
        size_bytes=100,
        arena_bytes=200,
        target_modules=("a.q_proj", "a.v_proj"),
        create_time_s=5.5,
        base_fingerprint="f" * 64,
        number=number,
    )
    for letter, number in (("b", 2), ("a", 1))
)
RECORD = AdapterRecord(
    adapter_id="poet",
    uid="u",
    display_name="Poet",
    labels={"team": "x"},
    state=AdapterState.ACTIVE,
    state_reason="",
    versions=VERSIONS,
    active_digest="b" * 64,
    is_pinned=True,
    create_time_s=1.0,
    update_time_s=2.0,
    revision=7,
    last_number=2,
    ownership=Ownership("acme", Visibility.SHARED, ("labs", "ops")),
)
# As a control plane wrote records that held their versions.
OLD_VERSIONS: list[dict[str, Any]] = [
    {name: value for name, value in json.loads(encode_version(version)).items() if name not in ("format", "number")}
    for version in VERSIONS
]
OLD: dict[str, Any] = {
    name: value
    for name, value in json.loads(encode_record(RECORD)).items()
    if name not in ("version_digests", "last_number", "owner", "visibility", "shared_with")
} | {"format": 1, "state": "active", "state_reason": "", "versions": OLD_VERSIONS}


def test_what_is_written_is_read_again() -> None:
    stored = decode_record(encode_record(RECORD))
    assert (stored.digests, stored.is_old) == (("b" * 64, "a" * 64), False)
    found = {version.digest: decode_version(encode_version(version)) for version in VERSIONS}
    assert with_versions(stored, found) == RECORD


def test_warnings_are_kept_and_documents_without_them_are_as_before() -> None:
    warned = replace(VERSIONS[0], warnings=("one", "two"))
    assert decode_version(encode_version(warned)) == warned
    assert b"warnings" not in encode_version(VERSIONS[0])
    document = json.loads(encode_version(warned)) | {"warnings": [1]}
    with pytest.raises(ValueError, match="warnings is not a list of texts"):
        decode_version(json.dumps(document).encode())


def test_a_record_says_little_of_each_version() -> None:
    """A change of a name with a thousand versions of many modules writes what a digest takes."""
    modules = tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(200))
    many = replace(RECORD, versions=(replace(VERSIONS[0], target_modules=modules),) * 1000)
    assert len(encode_record(many)) < 1000 * 70 + 1000


def test_a_failed_state_is_found_out_anew() -> None:
    failed = replace(RECORD, state=AdapterState.FAILED, state_reason="another base model")
    assert decode_record(encode_record(failed)).record.state is AdapterState.ACTIVE


def test_without_the_document_of_its_active_version_a_record_is_failed() -> None:
    stored = decode_record(encode_record(RECORD))
    record = with_versions(stored, {VERSIONS[1].digest: VERSIONS[1]})
    assert (record.state, record.versions) == (AdapterState.FAILED, VERSIONS[1:])
    assert "active version is missing" in record.state_reason
    # Another one that is missing was deleted.
    assert with_versions(stored, {VERSIONS[0].digest: VERSIONS[0]}) == replace(RECORD, versions=VERSIONS[:1])


def test_records_that_hold_their_versions_are_read_and_numbered_by_age() -> None:
    stored = decode_record(json.dumps(OLD).encode())
    assert stored.is_old and stored.record == replace(RECORD, ownership=NOBODYS)
    assert decode_record(json.dumps(OLD | {"state": "deleting"}).encode()).record.state is AdapterState.DELETING


def test_records_without_an_owner_are_no_tenants_and_private() -> None:
    document = json.loads(encode_record(RECORD)) | {"format": 2}
    for name in ("owner", "visibility", "shared_with"):
        del document[name]
    stored = decode_record(json.dumps(document).encode())
    assert stored.record.ownership == NOBODYS == Ownership("", Visibility.PRIVATE)
    assert (stored.digests, stored.is_old) == (("b" * 64, "a" * 64), False)


def changed(**members: Any) -> bytes:
    """The record's document with other members; None leaves one out."""
    document = json.loads(encode_record(RECORD)) | members
    return json.dumps({name: value for name, value in document.items() if value is not None}).encode()


DAMAGED: list[tuple[str, bytes, str]] = [
    ("nested", b'{"a":' * 100_000, "nested too deeply"),
    ("a list", b"[]", "not a JSON object"),
    ("cut", b'{"format": 2', "delimiter"),
    ("not utf-8", b"\xff\xfe", "not text in UTF-8"),
    ("no format", b"{}", "format None"),
    ("a later format", b'{"format": 5}', "another version of Motet"),
    ("no digests", b'{"format": 2}', "version_digests"),
    ("no owner", changed(owner=None), "owner is missing"),
    ("an owner that is not a tenant", changed(owner="A b"), "owner is missing or is not a tenant"),
    ("an owner in an older record", changed(format=2), "not known: owner, shared_with, visibility"),
    ("no visibility", changed(visibility=None), "not a valid Visibility"),
    ("no such visibility", changed(visibility="all"), "'all' is not a valid Visibility"),
    ("shared with nobody", changed(shared_with=[]), "visibility shared contradicts shared_with"),
    ("private and shared", changed(visibility="private"), "visibility private contradicts shared_with"),
    ("shared with no list", changed(shared_with="labs"), "shared_with is missing or is not a list of tenants"),
    ("shared with a number", changed(shared_with=["labs", 1]), "shared_with is missing or is not a list of tenants"),
    ("a field is missing", json.dumps(json.loads(encode_record(RECORD)) | {"x": 1}).encode(), "not known: x"),
    ("no number", json.dumps(json.loads(encode_record(RECORD)) | {"revision": "7"}).encode(), "revision"),
    ("a truth as a number", json.dumps(json.loads(encode_record(RECORD)) | {"revision": True}).encode(), "revision"),
    ("labels are numbers", json.dumps(json.loads(encode_record(RECORD)) | {"labels": {"a": 1}}).encode(), "labels"),
    ("old: no versions", json.dumps(OLD | {"versions": {}}).encode(), "versions"),
    ("old: active is not among them", json.dumps(OLD | {"active_digest": "x"}).encode(), "not among its versions"),
    ("old: no such state", json.dumps(OLD | {"state": "x"}).encode(), "AdapterState"),
]


@pytest.mark.parametrize(("raw", "words"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED])
def test_a_damaged_record_is_a_value_error_with_the_reason(raw: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_record(raw)


@pytest.mark.parametrize("raw", [b'{"a":' * 100_000, b"{}", b'{"format": 2}', b'{"format": 2, "target_modules": [1]}'])
def test_a_damaged_version_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode_version(raw)


@pytest.mark.parametrize(("name", "value"), [("labels", {"team": 1}), ("revision", True), ("uid", 7), ("new", 1)])
def test_a_damaged_record_is_noticed_also_after_good_ones_of_its_form(name: str, value: object) -> None:
    good = encode_record(RECORD)
    for _ in range(2):
        assert decode_record(good).record.labels == RECORD.labels
        with pytest.raises(ValueError, match=name):
            decode_record(json.dumps(json.loads(good) | {name: value}, sort_keys=True).encode())


@pytest.mark.parametrize("around", [b" %s", b"%s\n", b"\t%s "])
def test_spaces_around_a_document_do_not_matter_and_anything_else_does(around: bytes) -> None:
    assert decode_version(around % encode_version(VERSIONS[0])) == VERSIONS[0]
    with pytest.raises(ValueError):
        decode_version(encode_version(VERSIONS[0]) + b"x")


@pytest.mark.parametrize(
    "modules", [(), ("a.q_proj",), ("a.q_proj", "a.v_proj"), ("a.q_proj", "b.v_proj"), ('a"], "b": [',), ("a.q_proj",)]
)
def test_a_version_has_its_own_modules_whichever_was_read_before(modules: tuple[str, ...]) -> None:
    version = replace(VERSIONS[0], target_modules=modules)
    for other in (VERSIONS[0], version, replace(version, digest="e" * 64)):
        decoded = decode_version(encode_version(other))
        assert decoded == other
        with pytest.raises(ValueError):
            decode_version(b'{"target_modules": [' + encode_version(other))
    longer = replace(version, target_modules=(*modules, "z"))
    assert decode_version(encode_version(longer)) == longer
