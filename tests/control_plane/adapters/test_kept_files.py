"""Which version's files a push keeps, and when they do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.adapters.kept_files import check_files_from, source_version
from control_plane.checks import Violations
from control_plane.errors import AdapterNotFound, InvalidAdapter, InvalidRequest
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.records import AdapterRecord
from control_plane.registry.versions.rollout import Rollout
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict
from tests.control_plane.api.fake_adapters import DIGEST, adapter_record, adapter_version
from tests.control_plane.registry.rig import base_model

OTHER, PLAIN = "b" * 64, "c" * 64
BASE = base_model()


def record(active: str = DIGEST) -> AdapterRecord:
    """Three versions, the newest first; the second one brings nothing."""
    of_base: dict[str, Any] = {"base_fingerprint": BASE.fingerprint}
    versions = (
        replace(adapter_version(OTHER, number=3), files=("tokenizer",), **of_base),
        replace(adapter_version(PLAIN, number=2), **of_base),
        replace(adapter_version(DIGEST, number=1), files=("chat_template",), **of_base),
    )
    return replace(adapter_record("poet", versions, active), rollout=Rollout(version_labels={"stable": OTHER}))


def chosen(named: str = "", active: str = DIGEST) -> str:
    version = source_version(record(active), "poet", named, BASE)
    return "" if version is None else version.digest


def test_the_active_version_is_kept_from_and_the_newest_where_none_is_active() -> None:
    assert chosen() == DIGEST
    assert chosen(active=OTHER) == OTHER
    assert chosen(active=PLAIN) == "", "it has none to keep"
    assert chosen(active="") == OTHER
    assert source_version(None, "poet", "", BASE) is None, "a new name"


def test_a_version_is_named_by_number_label_or_digest() -> None:
    assert [chosen(named) for named in ("1", "3", "stable", OTHER, "2")] == [DIGEST, OTHER, OTHER, OTHER, ""]
    for missing in ("4", "nightly", "d" * 64):
        with pytest.raises(AdapterNotFound):
            chosen(missing)
    with pytest.raises(AdapterNotFound, match="'poet' has no version '1'"):
        source_version(None, "poet", "1", BASE)


def test_files_for_another_base_checkpoint_are_not_kept() -> None:
    old = record()
    versions = tuple(replace(version, base_fingerprint="e" * 64) for version in old.versions)
    with pytest.raises(InvalidRequest, match=r"another base checkpoint.*without_files"):
        source_version(replace(old, versions=versions), "poet", "", BASE)


@pytest.mark.parametrize("named", ["0", "-1", "1.5", "Stable", "a b", DIGEST + "a", DIGEST.upper(), "1" * 10])
def test_what_names_no_version_is_refused(named: str) -> None:
    violations = Violations()
    check_files_from(named, is_cleared=False, violations=violations)
    with pytest.raises(InvalidRequest, match=r"header\.files_from"):
        violations.raise_if_any()


def test_naming_and_clearing_exclude_each_other() -> None:
    violations = Violations()
    for named, is_cleared in (("", False), ("", True), ("7", False), ("stable", False), (DIGEST, False)):
        check_files_from(named, is_cleared=is_cleared, violations=violations)
    violations.raise_if_any()
    check_files_from("7", is_cleared=True, violations=violations)
    with pytest.raises(InvalidRequest, match=r"header\.without_files"):
        violations.raise_if_any()


def test_a_signed_push_keeps_files_of_its_own_signer_only() -> None:
    release = SignatureVerdict("release", SignatureMethod.KEY, "0" * 64, 1.0)
    other = replace(release, signer="nightly")
    documents = {"tokenizer": b"{}"}
    for theirs, ours in ((release, release), (release, None), (None, None)):
        Inherited(DIGEST, documents, 10, theirs).check_signature(ours)
    NOT_INHERITED.check_signature(release)
    for wrong, message in ((other, "signed by 'nightly'"), (None, "has no signature")):
        with pytest.raises(InvalidRequest, match=message):
            Inherited(DIGEST, documents, 10, wrong).check_signature(release)


def test_fewer_tokens_than_the_files_may_name_are_refused_but_for_a_template() -> None:
    for name in ("tokenizer", "generation_config"):
        kept = Inherited(DIGEST, {name: b"{}", "chat_template": b"{}"}, 11)
        assert kept.fitting(11) == kept.fitting(12) == kept.documents
        with pytest.raises(InvalidAdapter, match=f"whose {name} may name any of its 11 tokens.* have 10"):
            kept.fitting(10)
    assert Inherited(DIGEST, {"chat_template": b"{}"}, 11).fitting(10) == {"chat_template": b"{}"}
