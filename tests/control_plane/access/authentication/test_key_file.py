"""The file of API keys is read strictly, and changed as a whole."""

from __future__ import annotations

import json
import math
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from control_plane.access.authentication.grants import MAX_ADAPTERS, Grant, InvalidAccessFile
from control_plane.access.authentication.key_file import (
    KeyEntry,
    change_keys,
    new_key,
    parse_keys,
    read_keys,
    sha256_of,
)
from control_plane.access.principal import Role

HASH = "ab" * 32
GRANT = Grant(tenants=("acme",), roles=(Role.INFER,))


def entry(**fields: Any) -> dict[str, Any]:
    """An entry of the file; a field that is None is left out."""
    whole = {"id": "k1", "sha256": HASH, "tenants": ["acme"], "roles": ["infer"], **fields}
    return {name: value for name, value in whole.items() if value is not None}


def parse(*entries: Any) -> tuple[KeyEntry, ...]:
    return parse_keys(json.dumps({"keys": entries}).encode())


def test_an_entry_has_tenants_roles_adapters_expiry_and_label() -> None:
    [key] = parse(
        entry(
            tenants=["acme", "labs"],
            roles=["infer", "adapters.write"],
            adapters=["acme.*", "@base"],
            expires="2027-01-31T13:00:00+01:00",
            label="Zoë's laptop",
        )
    )
    assert (key.id, key.sha256, key.label) == ("k1", HASH, "Zoë's laptop")
    assert key.grant == Grant(
        tenants=("acme", "labs"), roles=(Role.INFER, Role.ADAPTERS_WRITE), adapters=("acme.*", "@base")
    )
    assert key.expires_s == datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp()
    assert parse_keys(json.dumps({"keys": [key.as_json()]}).encode()) == (key,)
    assert HASH not in repr(key)


def test_fields_left_out_bound_nothing() -> None:
    [key] = parse(entry(tenants=["*"]))
    assert (key.grant.tenants, key.grant.adapters, key.expires_s, key.label) == (("*",), None, None, "")
    assert parse(entry(adapters=[]))[0].grant.adapters == ()  # no adapter, and not the base model
    assert parse() == ()


MISTAKES: list[tuple[Any, str]] = [
    ([], "is a JSON list; use an object"),
    ({}, "the file: field 'keys' is missing"),
    ({"keys": [], "key": 1}, "the file: field 'key' is unknown; known are keys"),
    ({"keys": {}}, "keys: is a JSON dict; use a list"),
    ({"keys": ["k"]}, r"keys\[0\]: is a JSON str; use an object"),
    ({"keys": [entry(sha256=None)]}, r"keys\[0\]: field 'sha256' is missing"),
    ({"keys": [entry(role=["infer"])]}, r"keys\[0\]: field 'role' is unknown; known are id, sha256, tenants, roles"),
    ({"keys": [entry(id="K")]}, r"keys\[0\]\.id: 'K' is not valid: use 1 to 32 characters"),
    ({"keys": [entry(id=7)]}, r"keys\[0\]\.id: 7 is not valid"),
    ({"keys": [entry(sha256="AB" * 32)]}, r"keys\[0\] \(k1\)\.sha256: is not the SHA-256 of a key"),
    ({"keys": [entry(tenants=[])]}, r"keys\[0\] \(k1\)\.tenants: is empty; name at least one"),
    ({"keys": [entry(tenants="acme")]}, r"tenants: 'acme' is not a list of strings"),
    ({"keys": [entry(tenants=["Acme"])]}, r"tenants: 'Acme' is not a tenant: \[a-z0-9\._-\], from 1 to 63"),
    ({"keys": [entry(tenants=["a", "a"])]}, r"tenants: 'a' appears twice"),
    ({"keys": [entry(roles=[])]}, r"roles: is empty; use at least one of infer, adapters.read"),
    ({"keys": [entry(roles=["root"])]}, r"roles: 'root' is not a role; use infer, adapters.read"),
    ({"keys": [entry(adapters="x")]}, r"adapters: 'x' is not a list of strings"),
    ({"keys": [entry(adapters=["a b"])]}, r"adapters: 'a b' is not valid: use an adapter's id, a pattern"),
    ({"keys": [entry(adapters=[f"a{i}" for i in range(MAX_ADAPTERS + 1)])]}, r"adapters: has 101 items; at most 100"),
    ({"keys": [entry(expires="2027-01-31")]}, r"expires: '2027-01-31' is not a time with its zone, such as"),
    ({"keys": [entry(expires=5)]}, r"expires: 5 is not a time with its zone"),
    ({"keys": [entry(label="two\nlines")]}, r"label: is not a printable text of at most 128"),
    ({"keys": [entry(), entry(sha256="cd" * 32)]}, r"keys\[1\]\.id: is that of keys\[0\]"),
    ({"keys": [entry(), entry(id="k2")]}, r"keys\[1\]\.sha256: is that of keys\[0\]"),
]


@pytest.mark.parametrize(("document", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_named_by_entry_field_value_and_limit(document: Any, message: str) -> None:
    with pytest.raises(InvalidAccessFile, match=message):
        parse_keys(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1: is not valid JSON"),
        (b'{"keys": [], "keys": []}', "'keys' appears twice"),
        (b"\xff", "is not valid JSON: the text is not UTF-8"),
        (b'{"keys": ' + b"[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_not_json_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(InvalidAccessFile, match=message):
        parse_keys(content)


def test_a_key_that_is_in_the_file_by_mistake_is_not_repeated() -> None:
    _, key = new_key(set(), GRANT)
    with pytest.raises(InvalidAccessFile) as caught:
        parse(entry(sha256=key))
    assert key not in str(caught.value)


def test_a_new_key_has_256_random_bits_and_only_its_hash_is_kept() -> None:
    made, key = new_key(set(), GRANT, expires_s=1e9, label="ci")
    match = re.fullmatch(r"motet_([0-9a-z]{10})_([0-9A-Za-z]{43})", key)
    assert match is not None and match[1] == made.id and made.sha256 == sha256_of(key)
    assert math.log2(62) * len(match[2]) >= 256
    assert match[2] not in json.dumps(made.as_json())
    assert new_key(set(), GRANT)[1] != key
    with pytest.raises(InvalidAccessFile, match=r"the new key \(\w+\)\.tenants: 'A' is not a tenant"):
        new_key(set(), Grant(tenants=("A",), roles=(Role.INFER,)))


def add(path: Path, number: int = 0) -> None:
    made = KeyEntry(id=f"n{number}", sha256=f"{number:064x}", grant=GRANT)
    change_keys(path, lambda entries: (*entries, made), may_create=True)


def test_a_changed_file_belongs_to_its_owner_alone_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path)
    path.chmod(0o644)
    add(path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [key.id for key in read_keys(path)] == ["n0", "n1"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


def test_a_refused_change_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path)
    before = path.read_bytes()
    with pytest.raises(InvalidAccessFile, match="is that of"):
        add(path)
    path.with_name("other.json").write_text("{")
    with pytest.raises(InvalidAccessFile):
        add(path.with_name("other.json"), 1)
    with pytest.raises(FileNotFoundError):
        change_keys(path.with_name("none.json"), lambda entries: entries)
    assert path.read_bytes() == before and path.with_name("other.json").read_text() == "{"
    assert list(tmp_path.glob(".*")) == []


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "keys.json"
    link.symlink_to(tmp_path / "real" / "keys.json")
    add(tmp_path / "real" / "keys.json")
    add(link, 1)
    assert link.is_symlink() and len(read_keys(tmp_path / "real" / "keys.json")) == 2


def test_concurrent_changes_lose_nothing(tmp_path: Path) -> None:
    """Each change has a lock of its own, also within one process."""
    path, together = tmp_path / "keys.json", threading.Barrier(4)

    def add_many(first: int) -> None:
        together.wait()
        for number in range(first, first + 10):
            add(path, number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add_many, range(0, 400, 100)))
    assert {key.id for key in read_keys(path)} == {f"n{first + i}" for first in range(0, 400, 100) for i in range(10)}
