"""One process per directory, and the check that the directory is still the locked one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from control_plane.directory_lock import DirectoryAway, DirectoryInUse, DirectoryLock


def test_a_second_lock_is_refused_until_the_first_is_given_back(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path / "d"), DirectoryLock(tmp_path / "d")
    first.acquire()
    with pytest.raises(DirectoryInUse, match="in use by another control plane"):
        second.acquire()
    DirectoryLock(tmp_path / "d", "other").acquire()  # another name is another lock
    first.release()
    second.acquire()
    first.release()  # again is fine
    second.check()


def test_a_directory_that_is_moved_is_noticed_and_is_right_again_when_it_is_back(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "d")
    lock.check()  # not locked: nothing to check
    lock.acquire()
    lock.check()
    (tmp_path / "d").rename(tmp_path / "away")
    with pytest.raises(DirectoryAway, match="not there"):
        lock.check()
    (tmp_path / "d").mkdir()  # as the empty place where a volume was mounted
    (tmp_path / "d" / "lock").touch()
    with pytest.raises(DirectoryAway, match="not the file that this process locked"):
        lock.check()
    (tmp_path / "d" / "lock").unlink()
    (tmp_path / "d").rmdir()
    (tmp_path / "away").rename(tmp_path / "d")
    lock.check()


def test_a_directory_that_the_lock_makes_is_its_users_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    DirectoryLock(tmp_path / "d").acquire()
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    assert not caplog.records


@pytest.mark.parametrize(("mode", "is_open"), [(0o755, True), (0o701, True), (0o750, False), (0o700, False)])
def test_a_directory_of_the_operator_keeps_its_mode_and_is_warned_of_if_all_may_enter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_open: bool
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(mode)
    with caplog.at_level(logging.WARNING):
        DirectoryLock(tmp_path / "d").acquire()
    assert (tmp_path / "d").stat().st_mode & 0o777 == mode
    assert [str(tmp_path / "d") in record.getMessage() for record in caplog.records] == [True] * is_open
