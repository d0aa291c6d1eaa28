"""`motet audit` over files of a log, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from motet.audit.chain import GENESIS, digest_of
from motet.cli.main import main

from tests.client.test_audit_chain import chain


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of nine lines: three files, of which two were rotated away."""
    lines = chain(9)
    for name, part in (("log.000001", lines[:3]), ("log.000002", lines[3:6]), ("log", lines[6:])):
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in part))
    (tmp_path / "log.000002.gz").write_bytes(b"somebody's own")
    return tmp_path / "log"


def verified(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    code = main(["audit", "verify", "--json", *map(str, argv)])
    return code, json.loads(capsys.readouterr().out)


def test_a_log_is_checked_over_its_rotated_files(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, summary = verified(capsys, log)
    assert code == 0
    assert summary == {
        "ok": True,
        "files": [f"{log}.000001", f"{log}.000002", str(log)],
        "num_lines": 9,
        "num_torn_lines": 0,
        "begins_after": GENESIS,
        "is_from_beginning": True,
        "first_time": "2026-01-01T00:00:01Z",
        "last_time": "2026-01-01T00:00:09Z",
        "last_hash": digest_of(chain(9)[-1]),
        "has_anchor": None,
        "first_wrong": None,
    }
    # However a shell orders the names, each file is read once, and in order.
    assert verified(capsys, log, f"{log}.000001", f"{log}.000002") == (code, summary)


def test_the_first_wrong_line_is_named_with_its_file(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rotated = Path(f"{log}.000002")
    rotated.write_bytes(rotated.read_bytes().replace(b"adapters/a5", b"adapters/b5"))
    code, summary = verified(capsys, log)
    assert (code, summary["ok"], summary["num_lines"]) == (1, False, 5)
    assert summary["first_wrong"] == {
        "file": str(rotated),
        "line": 2,
        "what": "was changed: the next line has another digest of it",
    }
    assert main(["audit", "verify", str(log)]) == 1
    assert f"{rotated}:2: was changed" in capsys.readouterr().out


def test_a_file_that_is_missing_in_the_middle_is_found(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{log}.000002").unlink()
    code, summary = verified(capsys, log)
    assert code == 1
    assert (summary["first_wrong"]["file"], summary["first_wrong"]["line"]) == (str(log), 1)
    assert "3 lines are missing" in summary["first_wrong"]["what"]


def test_an_end_that_is_gone_is_found_by_an_anchor_alone(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, summary = verified(capsys, log)
    anchor = summary["last_hash"]
    assert verified(capsys, log, "--anchor", anchor)[1]["has_anchor"] is True
    log.write_bytes(b"")
    assert verified(capsys, log)[0] == 0
    code, summary = verified(capsys, log, "--anchor", anchor)
    assert (code, summary["ok"], summary["has_anchor"]) == (1, False, False)
    assert main(["audit", "verify", "--anchor", anchor, str(log)]) == 1
    assert f"no line has the hash {anchor}" in capsys.readouterr().out


def test_a_log_without_its_oldest_files_says_so(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{log}.000001").unlink()
    assert main(["audit", "verify", str(log)]) == 0
    out = capsys.readouterr().out
    assert "6 lines in 2 files are in order" in out
    assert f"begins in the middle of a log, after the line with the hash {digest_of(chain(9)[2])}" in out


def test_a_whole_log_begins_with_its_first_line(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(capsys, "--whole", log)[:1] == (0,)
    Path(f"{log}.000001").unlink()
    code, summary = verified(capsys, "--whole", log)
    assert (code, summary["ok"], summary["is_from_beginning"]) == (1, False, False)
    Path(f"{log}.000002").unlink()
    log.write_bytes(b"")
    assert verified(capsys, log)[0] == 0
    code, summary = verified(capsys, "--whole", log)
    assert (code, summary["ok"], summary["num_lines"]) == (1, False, 0)
    assert main(["audit", "verify", "--whole", str(log)]) == 1
    assert "the first line of the log is not here" in capsys.readouterr().out


def test_lines_that_match_are_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "show", str(log), "--since", "2026-01-01T00:00:05", "--action", "adapter.pin"]) == 0
    shown = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["s-5", "s-6", "s-7", "s-8", "s-9"]
    assert main(["audit", "show", str(log), "--tenant", "nobody"]) == 0
    assert capsys.readouterr().out == ""


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "verify", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"motet: {tmp_path / 'none'} cannot be read: No such file or directory\n"
    with pytest.raises(SystemExit):
        main(["audit", "verify", "--anchor", "abc", str(tmp_path / "none")])
    assert "'abc' is not a SHA-256" in capsys.readouterr().err
