"""The files of the audit log: how one ends, and how one follows another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from motet.audit.chain import GENESIS, digest_of

from control_plane.audit.log_file import AuditLogInUse, LogFile, Tail, rotated_files

LINE = b'{"prev":"%s","data":{}}' % (b"a" * 64)


def tail_of(path: Path, content: bytes) -> Tail:
    path.write_bytes(content)
    file = LogFile(path, max_bytes=1 << 30)
    try:
        return file.tail()
    finally:
        file.close()


@pytest.mark.parametrize("length", [1, 100, 1 << 16, (3 << 16) + 7])
def test_last_line_is_found_however_long_it_is(tmp_path: Path, length: int) -> None:
    last = b'{"prev":"","data":{"text":"%s"}}' % (b"x" * length)
    assert tail_of(tmp_path / "log", LINE + b"\n" + last + b"\n") == Tail(digest_of(last))
    torn = tail_of(tmp_path / "log", LINE + b"\n" + last)
    assert torn == Tail(digest_of(last), len(last), digest_of(LINE), is_ended=False)


def test_empty_and_torn_beginnings(tmp_path: Path) -> None:
    assert tail_of(tmp_path / "log", b"") == Tail(GENESIS)
    assert tail_of(tmp_path / "log", b"{torn") == Tail(digest_of(b"{torn"), 5, GENESIS, is_ended=False)
    # A crash after the end of a torn line was written, and before the line about it.
    assert tail_of(tmp_path / "log", b"{torn\n") == Tail(digest_of(b"{torn"), 5, GENESIS)
    (tmp_path / "log.000009").write_bytes(LINE + b"\n")
    (tmp_path / "log.000010.gz").write_bytes(b"somebody's own")
    assert tail_of(tmp_path / "log", b"") == Tail(digest_of(LINE))
    assert tail_of(tmp_path / "log", b"{torn") == Tail(digest_of(b"{torn"), 5, digest_of(LINE), is_ended=False)


def test_new_file_is_for_its_owner_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    LogFile(tmp_path / "log", max_bytes=1).close()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").touch(0o640)
    (tmp_path / "other").chmod(0o640)
    LogFile(tmp_path / "other", max_bytes=1).close()
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o640


def test_second_server_is_refused(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "log", max_bytes=1)
    with pytest.raises(AuditLogInUse, match="another process writes to it"):
        LogFile(tmp_path / "log", max_bytes=1)
    file.close()
    LogFile(tmp_path / "log", max_bytes=1).close()


def test_rotation_that_failed_half_way_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LogFile(tmp_path / "log", max_bytes=10)
    file.write(b"0123456789\n")
    assert file.is_full(0, 1)
    open_file, errors = os.open, [OSError("too many open files")]
    monkeypatch.setattr(os, "open", lambda *args, **kw: _raise(errors.pop()) if errors else open_file(*args, **kw))
    with pytest.raises(OSError, match="too many open files"):
        file.rotate()
    rotation = file.rotate()
    assert rotation.rotated == "log.000001" and not file.is_full(0, 1)
    assert [path.name for _, path in rotated_files(tmp_path / "log")] == ["log.000001"]
    file.write(b"new\n")
    assert (tmp_path / "log").read_bytes() == b"new\n"
    file.close()


def _raise(error: OSError) -> int:
    raise error


def test_numbers_of_rotated_files_are_never_used_again(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "log", max_bytes=1, num_kept=1)
    names = [file.rotate().rotated for _ in range(3)]
    file.close()
    assert names == ["log.000001", "log.000002", "log.000003"]
    assert [path.name for _, path in rotated_files(tmp_path / "log")] == ["log.000003"]
