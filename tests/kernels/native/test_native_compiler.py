"""The C compiler's command, its version, and its end when it hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.native import compiler
from kernels.native.compiler import CompilerFailed, compile_library, find_compiler, identity_of, missing_compiler


def test_cc_names_the_compiler_and_may_hold_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "sh -DANSWER=7")
    assert find_compiler() == ["sh", "-DANSWER=7"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert find_compiler() is None
    assert missing_compiler() == ("no C compiler (no-such-compiler): install gcc or clang, or name one with CC")
    monkeypatch.setenv("CC", " ")
    assert find_compiler() is not None


def test_a_cc_that_is_no_command_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '")
    assert find_compiler() is None
    assert missing_compiler() == "no C compiler (gcc '): install gcc or clang, or name one with CC"


def test_setup_reports_a_missing_compiler_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.tell_missing_compiler()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("CC", "no-such-compiler")
    compiler.tell_missing_compiler()
    reported = capsys.readouterr().out
    assert reported.count("\n") == 1
    assert "no C compiler (no-such-compiler)" in reported and "slower" in reported


def test_flags_of_the_command_are_part_of_the_identity() -> None:
    real = find_compiler()
    assert real is not None
    assert identity_of([*real, "-DA"]) != identity_of(real)
    assert identity_of(real) == identity_of(real)


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hold a pipe open, which ends with the last of them."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\nexec 3> {pipe}\nsleep 1000 &\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(compiler, "VERSION_TIMEOUT_S", 0.2)
    with pytest.raises(CompilerFailed, match=r"compiler --version did not end within 0.2 s"):
        identity_of([str(script)])
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_one_source_that_fails_fails_all(tmp_path: Path) -> None:
    real = find_compiler()
    assert real is not None
    sources = [tmp_path / f"{number}.c" for number in range(4)]
    for source in sources:
        source.write_text("int x;\n" * 2)
    sources[2].write_text("int x = nothing;\n")
    with pytest.raises(CompilerFailed, match="nothing"):
        compile_library(real, [], sources, tmp_path)
    assert not (tmp_path / "library.so").exists()
