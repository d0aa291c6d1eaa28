"""Labels, shares of requests, the way back, what is kept, and how all of it is written down."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from control_plane.registry.records import AdapterRecord, AdapterState
from control_plane.registry.store.record_documents import decode_record, encode_record
from control_plane.registry.versions.rollout import (
    MAX_PREVIOUS,
    NO_ROLLOUT,
    Canary,
    Rollout,
    VersionRollout,
    decode_rollout,
    encode_rollout,
)

A, B, C, D = (letter * 64 for letter in "abcd")
KEYS = [f"user-{number}" for number in range(4000)]
FULL = Rollout({"stable": A, "next": B}, Canary(B, 125), 7, 1234.5, (C, A))


def record(rollout: Rollout = NO_ROLLOUT) -> AdapterRecord:
    return AdapterRecord(
        adapter_id="a",
        uid="u" * 32,
        display_name="",
        labels={},
        state=AdapterState.ACTIVE,
        state_reason="",
        versions=(),
        active_digest=A,
        is_pinned=False,
        create_time_s=1.0,
        update_time_s=2.0,
        rollout=rollout,
    )


def test_a_larger_share_has_every_key_of_a_smaller_one() -> None:
    before: set[str] = set()
    for per_mille in (1, 5, 50, 51, 300, 999, 1000):
        chosen = {key for key in KEYS if Canary(B, per_mille).has("a", key)}
        assert before <= chosen
        assert abs(len(chosen) / len(KEYS) - per_mille / 1000) < 0.03
        before = chosen
    assert before == set(KEYS)


def test_the_same_key_gets_the_same_version_and_each_adapter_has_its_own_share_of_keys() -> None:
    canary = Canary(B, 500)
    first = {key for key in KEYS if canary.has("a", key)}
    assert first == {key for key in KEYS if Canary(C, 500).has("a", key)}
    other = {key for key in KEYS if canary.has("b", key)}
    assert 0.2 < len(first & other) / len(KEYS) < 0.3


def test_activations_are_remembered_and_a_rollback_takes_the_latest() -> None:
    rollout = NO_ROLLOUT.activated(B, A).activated(C, B)
    assert rollout.previous_digests == (B, A)
    assert rollout.activated(A, C).previous_digests == (C, B)
    assert rollout.rolled_back().previous_digests == (A,)
    assert rollout.without_versions({B}).previous_digests == (A,)
    long = NO_ROLLOUT
    for number in range(30):
        long = long.activated(f"{number + 1:064d}", f"{number:064d}")
    assert len(long.previous_digests) == MAX_PREVIOUS


def test_a_canary_ends_when_its_version_becomes_the_active_one() -> None:
    rollout = replace(NO_ROLLOUT, canary=Canary(B, 10))
    assert rollout.activated(B, A).canary is None
    assert rollout.activated(C, A).canary == Canary(B, 10)
    assert replace(rollout, previous_digests=(B,)).rolled_back().canary is None


def test_what_is_not_kept_is_neither_needed_nor_new() -> None:
    digests = [f"{number:064x}" for number in range(10, 0, -1)]  # newest first
    nothing = replace(NO_ROLLOUT, keep_versions=3)
    assert nothing.excess(digests, digests[0]) == digests[:2:-1]
    assert NO_ROLLOUT.excess(digests, digests[0]) == []
    needed = Rollout({"old": digests[9]}, Canary(digests[8], 1), 3, None, (digests[7], digests[6]))
    assert needed.excess(digests, digests[5]) == [digests[6], digests[4], digests[3]]
    assert needed.holds(digests[9]) and needed.holds(digests[8]) and not needed.holds(digests[7])


def test_a_version_is_rolled_out_as_its_registration_says() -> None:
    staged = VersionRollout(canary_per_mille=20, labels=("next",), keep_versions=5, ttl_s=60.0)
    assert staged.is_staged and not VersionRollout().is_staged
    rollout = staged.applied_to(Rollout({"next": A, "stable": A}), B, 100.0)
    assert rollout == Rollout({"next": B, "stable": A}, Canary(B, 20), 5, 160.0)
    assert VersionRollout().applied_to(FULL, D, 1.0) is FULL


def test_a_rollout_survives_its_document_and_records_without_one_are_written_as_before() -> None:
    stored = json.loads(json.dumps(encode_rollout(FULL)))
    assert decode_rollout(stored) == FULL
    assert decode_record(encode_record(record(FULL))).record.rollout == FULL
    plain = encode_record(record())
    assert json.loads(plain)["format"] == 3 and b"rollout" not in plain
    assert decode_record(plain).record.rollout is NO_ROLLOUT


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"version_labels": {"1": A}},
        {"version_labels": {"a": "x"}},
        {"version_labels": [A]},
        {"canary": [A, 0]},
        {"canary": [A, 1001]},
        {"canary": [A]},
        {"canary": A},
        {"keep_versions": -1},
        {"keep_versions": True},
        {"expire_time_s": "soon"},
        {"expire_time_s": True},
        {"previous_digests": ["x"]},
        {"previous_digests": A},
        {"more": 1},
    ],
)
def test_a_damaged_rollout_is_a_value_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="rollout"):
        decode_rollout(copy.deepcopy(wrong))
    document = json.loads(encode_record(record(FULL))) | {"rollout": wrong}
    with pytest.raises(ValueError, match="rollout"):
        decode_record(json.dumps(document).encode())
