"""`motet keys`: keys are shown once, and the file changes as a whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from motet.cli import server_parts
from motet.cli.main import main

from control_plane.access.authentication.api_keys import ApiKeys
from control_plane.access.authenticator import Presented
from control_plane.access.principal import Principal, Role
from tests.client.test_cli import Capture

KEY = re.compile(r"motet_([0-9a-z]{10})_[0-9A-Za-z]{43}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def new(path: Path, capsys: Capture, *argv: str) -> tuple[str, str]:
    """The id of a new key, and the key."""
    assert main(["keys", "new", "--file", str(path), "--tenant", "acme", "--role", "infer", *argv]) == 0
    [key] = capsys.readouterr().out.splitlines()
    match = KEY.fullmatch(key)
    assert match is not None
    return match[1], key


def principal(path: Path, key: str) -> Principal:
    found = ApiKeys(path).principal(Presented(token=key))
    assert found is not None
    return found


def test_a_new_key_is_printed_once_and_works(path: Path, capsys: Capture) -> None:
    key_id, key = new(path, capsys, "--tenant", "labs", "--role", "adapters.read", "--adapter", "acme.*")
    assert principal(path, key) == Principal(
        f"key:{key_id}", frozenset({Role.INFER, Role.ADAPTERS_READ}), ("acme", "labs"), ("acme.*",)
    )
    assert key not in path.read_text() and KEY.search(path.read_text()) is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_goes_to_a_new_file_that_only_its_owner_reads(path: Path, capsys: Capture) -> None:
    out = path.with_name("acme.key")
    argv = ["keys", "new", "--file", str(path), "--tenant", "acme", "--role", "infer", "--out", str(out)]
    former = os.umask(0)
    try:
        assert main(argv) == 0
    finally:
        os.umask(former)
    captured = capsys.readouterr()
    key = out.read_text().strip()
    assert KEY.fullmatch(key) and principal(path, key).tenants == ("acme",)
    assert captured.out == "" and key not in captured.err and str(out) in captured.err
    assert out.stat().st_mode & 0o777 == 0o600
    # The same file again would lose the first key.
    before = path.read_text()
    assert main(argv) == 3
    assert f"--out: {out} exists and is not replaced" in capsys.readouterr().err
    assert (path.read_text(), out.read_text().strip()) == (before, key)


def test_no_key_is_left_that_the_server_does_not_know(path: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "acme.key"
    argv = ["keys", "new", "--tenant", "acme", "--role", "infer", "--out"]
    assert main([*argv, str(path), "--file", str(path)]) == 3
    assert "is the server's file of keys" in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "none" / "acme.key"), "--file", str(path)]) == 3
    assert "acme.key cannot be made: No such file" in capsys.readouterr().err and not path.exists()
    full = json.dumps({"keys": [entry_of(idx) for idx in range(10_000)]})
    path.write_text(full)
    assert main([*argv, str(out), "--file", str(path)]) == 3
    assert not out.exists() and path.read_text() == full


def entry_of(idx: int) -> dict[str, object]:
    return {"id": f"k{idx:09d}", "sha256": f"{idx:064x}", "tenants": ["a"], "roles": ["infer"]}


def test_keys_expire_after_a_time_or_at_a_moment(path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    for text, expires_s in (("30d", 3_592_000.0), ("12h", 1_043_200.0), ("45m", 1_002_700.0)):
        assert principal(path, new(path, capsys, "--expires", text)[1]).expires_s == expires_s
    late = principal(path, new(path, capsys, "--expires", "2999-01-31T12:00:00+01:00")[1])
    assert late.expires_s is not None and late.expires_s > 3e10


@pytest.mark.parametrize("text", ["0d", "30", "-1d", "1w", "2999-01-31", "2020-01-31T12:00:00Z", "99999d", "d", "x"])
def test_other_times_are_refused(path: Path, capsys: Capture, text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["keys", "new", "--file", str(path), "--tenant", "a", "--role", "infer", f"--expires={text}"])
    assert caught.value.code == 2 and f"--expires: {text}: " in capsys.readouterr().err
    assert not path.exists()


def test_the_list_shows_everything_but_hashes(path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = new(path, capsys, "--adapter", "acme.*", "--adapter", "@base", "--expires", "30d", "--label", "Zoë")
    second, _ = new(path, capsys, "--tenant", "*", "--role", "admin")
    monkeypatch.setenv("MOTET_API_KEYS", str(path))  # the control plane's own variable
    assert main(["keys", "list"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["ID", "TENANTS", "ROLES", "ADAPTERS", "EXPIRES", "LABEL"]
    assert rows[0].split()[:4] == [first, "acme", "infer", "acme.*,@base"] and rows[0].endswith("Zoë")
    assert rows[1].split() == [second, "acme,*", "infer,admin", "all", "never"]
    assert main(["keys", "list", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    stored = json.loads(path.read_text())["keys"]
    assert shown == [{name: value for name, value in entry.items() if name != "sha256"} for entry in stored]
    monkeypatch.setattr("time.time", lambda: 1e11)
    assert main(["keys", "list"]) == 0
    assert "(expired)" in capsys.readouterr().out


def test_a_revoked_key_is_gone_and_the_others_stay(path: Path, capsys: Capture) -> None:
    first, key = new(path, capsys)
    _, other = new(path, capsys)
    assert main(["keys", "revoke", "--file", str(path), first]) == 0
    assert f"key {first} is revoked" in capsys.readouterr().err
    assert ApiKeys(path).num_keys == 1 and principal(path, other).name
    assert main(["keys", "revoke", "--file", str(path), key]) == 4
    assert key not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["new", "--tenant", "acme", "--role", "boss"], 3, "'boss' is not a role; use infer, adapters.read"),
        (["new", "--tenant", "ACME", "--role", "infer"], 3, "'ACME' is not a tenant"),
        (["new", "--tenant", "a", "--role", "infer", "--adapter", "a b"], 3, "'a b' is not valid"),
        (["new", "--tenant", "a", "--role", "infer", "--label", "x" * 129], 3, "at most 128 characters"),
        (["list"], 4, "is not there; `motet keys new` makes it"),
        (["revoke", "abc"], 4, "is not there"),
    ],
)
def test_mistakes_are_said_in_one_line_and_nothing_is_written(
    path: Path, capsys: Capture, argv: list[str], code: int, message: str
) -> None:
    assert main(["keys", argv[0], "--file", str(path), *argv[1:]]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1
    assert not path.exists()


def test_a_damaged_file_stays_as_it_is(path: Path, capsys: Capture) -> None:
    path.write_text('{"keys": [{"id": 1}]}')
    for argv in (["list"], ["revoke", "a"], ["new", "--tenant", "a", "--role", "infer"]):
        assert main(["keys", argv[0], "--file", str(path), *argv[1:]]) == 3
        assert "keys[0]: field 'sha256' is missing" in capsys.readouterr().err
    assert path.read_text() == '{"keys": [{"id": 1}]}'


def test_commands_at_the_same_time_lose_no_key(path: Path) -> None:
    command = [sys.executable, "-m", "motet", "keys", "new", "--file", str(path), "--tenant", "a", "--role", "infer"]
    environment = server_parts.child_environment()
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    keys = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 6
    assert len({principal(path, key).name for key in keys}) == 6
