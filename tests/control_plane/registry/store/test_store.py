"""The six methods, on every kind of storage: a directory, memory, and object stores on this machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import obstore
import pytest

from control_plane.registry.store.store import FencedStore, KeyChanged, KeyExists, delete_below, replace
from tests.control_plane.registry.store.buckets import KINDS, unfenced


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path, urls: Mapping[str, str]) -> FencedStore:
    return unfenced(kind, tmp_path, urls)


def test_content_is_read_whole_and_in_parts(store: FencedStore, tmp_path: Path) -> None:
    (tmp_path / "chunk").write_bytes(b"0123456789")
    tag = store.put_if_absent("blobs/d/0", tmp_path / "chunk")
    assert store.get("blobs/d/0") == (b"0123456789", tag)
    parts = [store.get("blobs/d/0", start, 4)[0] for start in (0, 4, 8, 12)]
    assert parts == [b"0123", b"4567", b"89", b""]
    entry = store.head("blobs/d/0")
    assert entry is not None and (entry.name, entry.size_bytes, entry.tag) == ("0", 10, tag)
    assert entry.modified_s > 1e9
    assert (store.head("blobs/d/1") is None and store.head("blobs/d") is None) or store.list("blobs/d")
    for missing in ("blobs/d/1", "nothing"):
        with pytest.raises(FileNotFoundError):
            store.get(missing)
        with pytest.raises(FileNotFoundError):
            store.get(missing, 3, 4)


def test_a_list_has_keys_and_prefixes_directly_below(store: FencedStore) -> None:
    for key in ("a/2", "a/1", "a/b/3", "a/b/c/4", "b/5"):
        store.put_if_absent(key, key.encode())
    assert [(entry.name, bool(entry.tag)) for entry in store.list("a")] == [("1", True), ("2", True), ("b", False)]
    assert _names(store, "a") == ["1", "2", "b"]
    assert store.list("nothing") == [] and _names(store, "nothing") == []
    assert [entry.size_bytes for entry in store.list("b")] == [3]
    entry = store.head("b/5")
    assert entry is not None and entry.tag == store.get("b/5")[1], "unlike that of a list"
    delete_below(store, "a")
    delete_below(store, "a")
    assert store.list("a") == [] and _names(store, "a") == [] and store.get("b/5")[0] == b"b/5"


def _names(store: FencedStore, prefix: str) -> list[str]:
    return [entry.name for entry in store.list(prefix, names_only=True)]


def test_content_is_put_only_where_none_is(store: FencedStore) -> None:
    store.put_if_absent("adapters/a.json", b"first")
    with pytest.raises(KeyExists):
        store.put_if_absent("adapters/a.json", b"second")
    assert store.get("adapters/a.json")[0] == b"first"


def test_content_is_replaced_only_in_the_state_that_the_tag_names(store: FencedStore) -> None:
    first = store.put_if_absent("adapters/a.json", b"first")
    second = store.replace_if_match("adapters/a.json", b"other", first)
    assert second != first and store.get("adapters/a.json") == (b"other", second)
    with pytest.raises(KeyChanged):
        store.replace_if_match("adapters/a.json", b"third", first)
    with pytest.raises(KeyChanged):
        store.replace_if_match("adapters/b.json", b"third", first)
    assert store.get("adapters/a.json")[0] == b"other" and store.head("adapters/b.json") is None
    replace(store, "adapters/a.json", b"whatever")
    replace(store, "adapters/b.json", b"whatever")
    assert {entry.name for entry in store.list("adapters")} == {"a.json", "b.json"}


def test_content_is_deleted_only_in_the_state_that_the_tag_names(store: FencedStore) -> None:
    first = store.put_if_absent("adapters/a.json", b"first")
    second = store.replace_if_match("adapters/a.json", b"other", first)
    with pytest.raises(KeyChanged):
        store.delete("adapters/a.json", first)
    store.delete("adapters/a.json", second)
    assert store.head("adapters/a.json") is None and store.list("adapters") == []
    with pytest.raises(FileNotFoundError):
        store.get("adapters/a.json")
    with pytest.raises(KeyChanged):
        store.delete("adapters/a.json", second)
    with pytest.raises(KeyChanged):
        store.replace_if_match("adapters/a.json", b"again", second)
    store.put_if_absent("adapters/a.json", b"again")  # over what a deletion left
    assert store.get("adapters/a.json")[0] == b"again"
    store.delete("adapters/a.json")
    store.delete("adapters/a.json")  # a missing one is fine


def test_of_many_that_change_one_key_each_change_counts(kind: str, tmp_path: Path, urls: Mapping[str, str]) -> None:
    """Eight writers, each with a view of its own, count in one document."""
    num_writers, num_steps = 8, 5
    won: list[str] = []

    def count() -> None:
        store = unfenced(kind, tmp_path, urls)
        for _ in range(num_steps):
            while True:
                try:
                    content, tag = store.get("count")
                except FileNotFoundError:
                    content, tag = b"0 -", ""
                number = int(content.split()[0]) + 1
                document = f"{number} {threading.get_ident()}".encode()
                try:
                    store.replace_if_match("count", document, tag) if tag else store.put_if_absent("count", document)
                except (KeyChanged, KeyExists):
                    continue
                won.append(document.decode())
                break

    threads = [threading.Thread(target=count) for _ in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert unfenced(kind, tmp_path, urls).get("count")[0].split()[0] == str(num_writers * num_steps).encode()
    assert len({entry.split()[0] for entry in won}) == num_writers * num_steps


def test_a_retried_write_that_finds_its_own_content_has_succeeded(
    store: FencedStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request took effect and its response was lost, so that the client library sends it again."""
    if kind == "directory":
        return  # has no requests
    put = obstore.put

    def put_twice(*args: Any, **kwargs: Any) -> Any:
        put(*args, **kwargs)
        return put(*args, **kwargs)

    monkeypatch.setattr(obstore, "put", put_twice)
    tag = store.put_if_absent("adapters/a.json", b"mine")
    store.replace_if_match("adapters/a.json", b"mine, changed", tag)
    assert store.get("adapters/a.json")[0] == b"mine, changed"
