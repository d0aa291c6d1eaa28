"""A log that the server wrote and rotated, and somebody changed: `motet audit verify` fails for whatever was done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from motet.cli.main import main

from control_plane.audit.log_file import LogFile, rotated_files
from tests.control_plane.audit.sinks import a_record, a_writer

Attack = Callable[[list[Path]], object]


def write_log(path: Path, num_records: int) -> list[Path]:
    """The files of a log, the oldest first."""
    writer = a_writer(LogFile(path, max_bytes=2000))  # type: ignore[arg-type]
    for number in range(num_records):
        writer.put(a_record(number, resource=f"adapters/a{number}"))
    writer.close()
    return [*(file for _, file in rotated_files(path)), path]


def edit(files: list[Path], change: Callable[[list[bytes]], list[bytes]], which: int = 1) -> None:
    files[which].write_bytes(b"".join(change(files[which].read_bytes().splitlines(keepends=True))))


def swap_files(files: list[Path]) -> None:
    between = files[1].with_name("between")
    files[1].rename(between)
    files[2].rename(files[1])
    between.rename(files[2])


def replace_all(files: list[Path]) -> None:
    """A whole chain of other lines, which is in order by itself."""
    for file in files:
        file.unlink()
    write_log(files[-1], 40)


ATTACKS: dict[str, Attack] = {
    "a word changed": lambda files: edit(files, lambda lines: [lines[0].replace(b"success", b"failure"), *lines[1:]]),
    "the last line changed": lambda files: edit(
        files, lambda lines: [*lines[:-1], lines[-1].replace(b"success", b"failure")], -1
    ),
    "a line removed": lambda files: edit(files, lambda lines: [lines[0], *lines[2:]]),
    "the first line of all removed": lambda files: edit(files, lambda lines: lines[1:], 0),
    "the last line removed": lambda files: edit(files, lambda lines: lines[:-1], -1),
    "the last line cut off": lambda files: edit(files, lambda lines: [*lines[:-1], lines[-1][:40]], -1),
    "the end of the last line removed": lambda files: edit(files, lambda lines: [*lines[:-1], lines[-1][:-1]], -1),
    "two lines swapped": lambda files: edit(files, lambda lines: [lines[1], lines[0], *lines[2:]]),
    "a line put in twice": lambda files: edit(files, lambda lines: [lines[0], *lines]),
    "a line that is not an event put in": lambda files: edit(files, lambda lines: [lines[0], b"\n", *lines[1:]]),
    "the end of a rotated file cut off": lambda files: edit(files, lambda lines: lines[:-1]),
    "the end of line of a rotated file removed": lambda files: edit(files, lambda lines: [*lines[:-1], lines[-1][:-1]]),
    "a rotated file emptied": lambda files: edit(files, lambda lines: []),
    "a rotated file removed": lambda files: files[1].unlink(),
    "the oldest file removed": lambda files: files[0].unlink(),
    "two rotated files swapped": swap_files,
    "a rotated file copied behind the others": lambda files: (
        shutil.copy(files[0], files[0].with_name(f"{files[-1].name}.000099")) and None
    ),
    "the file that is written emptied": lambda files: files[-1].write_bytes(b""),
    "the whole log replaced": replace_all,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_was_done_to_a_log_is_found(attack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_log(tmp_path / "log", 40)
    assert len(files) >= 4
    verify = ["audit", "verify", "--json", "--whole", str(files[-1])]
    assert main(verify) == 0
    noted = json.loads(capsys.readouterr().out)["last_hash"]
    assert main([*verify, "--anchor", noted]) == 0
    ATTACKS[attack](files)
    assert main([*verify, "--anchor", noted]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["first_wrong"] or not summary["has_anchor"] or not summary["is_from_beginning"]
