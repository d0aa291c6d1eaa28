"""Opening a store, and what a store says of its storage."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from control_plane.directory_lock import DirectoryAway
from control_plane.errors import Exhausted, StoreUnavailable
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.store import StoreLocked
from control_plane.registry.store.store_lease import LeaseLost


class FailingFiles(DirectoryStore):
    """Raises what a test gives on every write."""

    error: OSError | None = None

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        self._fail()
        return super().put_if_absent(key, content)

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        self._fail()
        return super().replace_if_match(key, content, tag)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def test_every_start_counts_and_one_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    files = FailingFiles(tmp_path)
    store = ArtifactStore(files)
    files.error = OSError(errno.ENOSPC, "no space")
    with pytest.raises(Exhausted):
        store.acquire()
    files.error = None
    other = ArtifactStore(str(tmp_path))
    assert other.acquire() == 1
    with pytest.raises(StoreLocked):
        store.acquire()
    other.close()
    assert store.acquire() == 2
    assert json.loads((tmp_path / "incarnation.json").read_bytes())["incarnation"] == 2
    store.close()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENOSPC, "x"), Exhausted, "full; the operator must free space"),
        (OSError(errno.EDQUOT, "x"), Exhausted, "full; the operator must free space"),
        (OSError(errno.EIO, "/secret/path"), StoreUnavailable, r"does not respond \(write\); try again"),
        (FileNotFoundError(errno.ENOENT, "x"), StoreUnavailable, r"does not respond \(write\); try again"),
        (DirectoryAway("/secret/path is not there"), StoreUnavailable, "the operator must bring it back"),
        (
            LeaseLost("another control plane took the store over"),
            StoreUnavailable,
            "another control plane took the store",
        ),
    ],
)
def test_failures_are_errors_for_clients(tmp_path: Path, error: OSError, kind: type, words: str) -> None:
    files = FailingFiles(tmp_path)
    files.error = error
    with pytest.raises(kind, match=words) as caught:
        ArtifactStore(files).write_record("a", b"{}", expected=lambda found: True)
    assert "secret" not in str(caught.value)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    store.acquire()
    store.write_record("a", b"{}", expected=lambda found: found is None)
    for path in ("adapters/README", "adapters/A.json", "blobs/notes", "versions/.trash"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "adapters" / "b.json.tmp").write_text("x")
    names = store.list_names()
    assert (names.records, names.deleting, names.versions, names.blobs) == (("a",), (), (), ())
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == ["A.json", "README", "a.json"]
    assert (tmp_path / "blobs" / "notes").exists() and (tmp_path / "versions" / ".trash").exists()
    store.close()
