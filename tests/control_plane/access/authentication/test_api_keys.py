"""An API key stands for its entry in the file, from the moment the file is read until it is revoked or expires."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import control_plane.access.authentication.api_keys as api_keys
from control_plane.access.authentication.api_keys import ApiKeys
from control_plane.access.authentication.grants import Grant
from control_plane.access.authentication.key_file import KeyEntry, change_keys, new_key
from control_plane.access.authenticator import Authenticator, Presented
from control_plane.access.principal import Principal, Role
from control_plane.errors import Unauthenticated

GRANT = Grant(tenants=("acme", "labs"), roles=(Role.INFER, Role.ADAPTERS_WRITE), adapters=("acme.*",))


def write(path: Path, *entries: KeyEntry) -> None:
    """Every write has a time of its own, however fast the test is."""
    change_keys(path, lambda _: entries, may_create=True)
    write.number += 1  # type: ignore[attr-defined]
    os.utime(path, (write.number, write.number))  # type: ignore[attr-defined]


write.number = 0  # type: ignore[attr-defined]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_gives_the_principal_of_its_entry(path: Path) -> None:
    (first, key), (second, other) = new_key(set(), GRANT), new_key(set(), GRANT, expires_s=100.0)
    write(path, first, second)
    method = ApiKeys(path)
    assert method.num_keys == 2
    assert method.principal(Presented(token=key)) == Principal(
        f"key:{first.id}",
        frozenset({Role.INFER, Role.ADAPTERS_READ, Role.ADAPTERS_WRITE}),
        ("acme", "labs"),
        ("acme.*",),
    )
    expiring = method.principal(Presented(token=other))
    assert expiring is not None and expiring.expires_s == 100.0
    with pytest.raises(Unauthenticated, match="expired"):
        Authenticator([method], wall_clock=lambda: 100.0).principal(Presented(token=other))


def test_tokens_of_another_form_are_left_to_other_methods(path: Path) -> None:
    write(path)
    for token in ("", "a.b.c", "Motet_x_y", "sesame"):
        assert ApiKeys(path).principal(Presented(token=token)) is None


CHANGES: list[Callable[[str], str]] = [
    lambda key: key[:-1] + ("a" if key[-1] != "a" else "b"),
    lambda key: key[:-1],
    lambda key: key + "a",
    lambda key: key.rpartition("_")[0],
    lambda key: key.rpartition("_")[0] + "_",
    lambda key: key.swapcase().replace("MOTET_", "motet_"),
    lambda key: "motet_" + "0" * 10 + "_" + key.rpartition("_")[2],
    lambda key: "motet_",
    lambda key: "motet_é_\udcff",
    lambda key: f"motet_{'x' * 4000}",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_key_is_refused_in_the_same_words_as_an_unknown_one(path: Path, change: Callable[[str], str]) -> None:
    entry, key = new_key({"0" * 10}, GRANT)
    write(path, entry)
    token = change(key)
    with pytest.raises(Unauthenticated) as caught:
        ApiKeys(path).principal(Presented(token=token))
    assert str(caught.value) == "the API key is not valid; ask the operator of the server for a new one"


def test_the_hash_in_the_file_is_no_key(path: Path) -> None:
    """Who reads the file cannot call the server."""
    entry, _ = new_key(set(), GRANT)
    write(path, entry)
    with pytest.raises(Unauthenticated):
        ApiKeys(path).principal(Presented(token=f"motet_{entry.id}_{entry.sha256}"))


def test_unknown_ids_cost_the_same_comparison(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing shows whether an id exists: both cases hash the token and compare 64 characters."""
    compared: list[tuple[str, str]] = []

    class Recording:
        @staticmethod
        def compare_digest(a: str, b: str) -> bool:
            compared.append((a, b))
            return False

    entry, key = new_key({"unknown"}, GRANT)
    write(path, entry)
    method = ApiKeys(path)
    monkeypatch.setattr(api_keys, "hmac", Recording)
    for token in (key, f"motet_unknown_{key.rpartition('_')[2]}"):
        with pytest.raises(Unauthenticated):
            method.principal(Presented(token=token))
    assert [len(text) for pair in compared for text in pair] == [64, 64, 64, 64]


def test_a_revoked_key_is_refused_after_the_next_look_at_the_file(path: Path) -> None:
    (first, key), (second, other) = new_key(set(), GRANT), new_key(set(), GRANT)
    write(path, first)
    method = ApiKeys(path)
    write(path, second)
    assert method.principal(Presented(token=key)) is not None  # not looked at yet
    assert method.files.refresh()
    with pytest.raises(Unauthenticated):
        method.principal(Presented(token=key))
    assert method.principal(Presented(token=other)) is not None


def test_a_damaged_file_keeps_the_keys_that_were_read_before(path: Path) -> None:
    entry, key = new_key(set(), GRANT)
    write(path, entry)
    method = ApiKeys(path)
    path.write_text('{"keys": [')
    assert not method.files.refresh()
    assert method.principal(Presented(token=key)) is not None
