"""Buckets: URLs, what a deletion leaves, large files, and errors."""

from __future__ import annotations

import time
from pathlib import Path

import obstore
import pytest

from control_plane.registry.store import bucket as bucket_module
from control_plane.registry.store.bucket import Bucket, memory_store, open_bucket
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.object_store import ObjectStore
from control_plane.registry.store.open_store import open_store
from control_plane.registry.store.store import LEFTOVER_AGE, KeyExists, StoreUrlError


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://x", "^nosuch:// is not a store that Motet knows; give a directory, or"),
        ("http://x/y", "^http:// is not a store"),
        ("s3://key:hidden@bucket/x", "^s3://: credentials in the URL are not read; give them in the environment"),
        ("az://container/x", "^az://: .*Account must be specified"),
    ],
)
def test_a_url_that_cannot_be_opened_says_why(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreUrlError, match=words) as caught:
        open_store(url)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:90 00",
        "127.0.0.1:9000",
        "http://",
        "http://host:99999",
        "http://hidden\nhost",
        "http://h\u00f6st",
    ],
)
def test_an_endpoint_that_is_not_a_url_is_named_before_anything_is_sent(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore panics at the first request to some of them."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StoreUrlError, match=r"^AWS_ENDPOINT_URL is not a URL of http:// or https://") as caught:
        open_store("s3://bucket/path")
    assert "hidden" not in str(caught.value)
    assert isinstance(open_store("gs://bucket/path"), ObjectStore), "another provider's"


def test_paths_and_file_urls_are_directories_and_others_are_object_stores(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        opened = open_store(url)
        assert isinstance(opened, DirectoryStore) and opened.root == tmp_path
    for url in ("s3://bucket/path", "gs://bucket/path", "memory://name/path"):
        assert isinstance(open_store(url), ObjectStore)


def test_one_name_of_memory_is_one_store(tmp_path: Path) -> None:
    open_bucket(f"memory://{tmp_path.name}/a").put_if_absent("k", b"x")
    assert open_bucket(f"memory://{tmp_path.name}/a").get("k")[0] == b"x"
    assert open_bucket(f"memory://{tmp_path.name}/b").head("k") is None


def test_what_a_deletion_leaves_goes_after_a_day_unless_the_key_is_in_use_again() -> None:
    now_s = time.time()
    bucket = Bucket(memory_store("sweep"), clock=lambda: now_s)
    for key in ("d/a", "d/b"):
        bucket.delete(key, bucket.put_if_absent(key, b"x"))
    bucket.put_if_absent("d/b", b"again")
    assert bucket.sweep("d") == 0
    now_s += LEFTOVER_AGE.total_seconds() + 60
    assert bucket.sweep("d") == 1
    with pytest.raises(FileNotFoundError):
        obstore.head(bucket.remote, "d/a")
    assert bucket.get("d/b")[0] == b"again"


def test_a_large_file_is_sent_in_parts(bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "MAX_CONDITIONAL_BYTES", 1 << 20)
    content = bytes(range(256)) * 4096 * 7
    (tmp_path / "large").write_bytes(content)
    bucket = open_bucket(f"{bucket_url}/large")
    bucket.put_if_absent("d/0", tmp_path / "large")
    with pytest.raises(KeyExists):
        bucket.put_if_absent("d/0", tmp_path / "large")
    assert bucket.get("d/0")[0] == content


def test_a_list_has_more_names_than_one_response(bucket_url: str) -> None:
    bucket = open_bucket(f"{bucket_url}/many")
    for number in range(1005):
        obstore.put(bucket.remote, f"d/{number:04}", b"x")
    assert [entry.name for entry in bucket.list("d")] == [f"{number:04}" for number in range(1005)]


def test_errors_of_the_library_are_failures_of_the_store_in_one_line(bucket_url: str) -> None:
    bucket = open_bucket(f"{bucket_url.partition('://')[0]}://no-such-bucket/x")
    with pytest.raises(OSError) as caught:
        bucket.put_if_absent("k", b"x")
    assert "\n" not in str(caught.value)
