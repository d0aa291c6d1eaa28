"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kernels.native.folder import CacheFolder, DamagedFile, ForeignFile, sealed, unsealed


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "a" / "b")
    assert folder.read("x") is None
    for content in (b"", b"one\n", b"motet sha256 " * 20):
        folder.write("x", content)
        assert folder.read("x") == content
    assert [path.name for path in folder.path.iterdir()] == ["x"]


def test_a_seal_fits_its_content_only() -> None:
    data = sealed(b"content")
    assert unsealed(data) == b"content"
    assert not any(unsealed(data[:end]) is not None for end in range(len(data)))
    assert unsealed(data + b"x") is None
    assert unsealed(b"C" + data[1:]) is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "child").touch()
    with pytest.raises(OSError):
        folder.write("name", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o644)
    with pytest.raises(ForeignFile, match="not a regular file"):
        folder.read("pipe")
    (tmp_path / "link").symlink_to(folder.write("x", b""))
    with pytest.raises(OSError, match="link"):
        folder.read("link")


def test_a_file_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    path = CacheFolder(tmp_path).write("x", b"")
    tmp_path.chmod(0o755)
    folder = CacheFolder(tmp_path, trusted_owners=frozenset({tmp_path.stat().st_uid + 1}))
    with pytest.raises(ForeignFile, match=f"{tmp_path} belongs to user {path.stat().st_uid}"):
        folder.read("x")
    with pytest.raises(ForeignFile):
        folder.write("y", b"")


def test_names_come_with_the_one_used_last_first(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    for age, name in enumerate(("a.so", "b.so", "c.so", "d.txt")):
        path = folder.write(name, b"")
        os.utime(path, ns=(0, (100 - age) * 10**9))
    assert folder.names("", ".so") == ["a.so", "b.so", "c.so"]
    folder.mark_used("c.so")
    assert folder.names("", ".so") == ["c.so", "a.so", "b.so"]
    assert CacheFolder(tmp_path / "none").names("", "") == []


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    old, young = tmp_path / ".tmp-old", tmp_path / ".tmp-young"
    old.touch()
    young.touch()
    day_ago_ns = time.time_ns() - 86400 * 10**9
    os.utime(old, ns=(day_ago_ns, day_ago_ns))
    folder.write("x", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-young", "x"]


def test_a_lock_that_another_holds_too_long_keeps_nobody_out(tmp_path: Path) -> None:
    one, other = CacheFolder(tmp_path), CacheFolder(tmp_path)
    with one.locked(0), other.locked(0):
        other.write("x", b"")
    assert one.read("x") == b""


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = CacheFolder(tmp_path).write("x", b"content")
    path.write_bytes(b"content")
    with pytest.raises(DamagedFile, match=f"{path} is damaged"):
        CacheFolder(tmp_path).read("x")
