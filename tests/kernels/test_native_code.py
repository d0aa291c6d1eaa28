"""C that is compiled where it runs."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import native_code

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source file, and a place of its own for temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("CC", raising=False)
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    native_code.load.cache_clear()
    yield path
    native_code.load.cache_clear()


def test_source_is_compiled_once_and_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    library = native_code.load(source)
    assert library is not None and library.answer() == 42
    assert native_code.load(source) is library
    assert not list((tmp_path / "tmp").iterdir())


def test_cc_may_hold_flags(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = native_code.find_compiler()
    assert compiler is not None
    source.write_text("int answer(void) { return ANSWER; }\n")
    monkeypatch.setenv("CC", " ".join([*compiler, "-DANSWER=7"]))
    library = native_code.load(source)
    assert library is not None and library.answer() == 7


@pytest.mark.parametrize(
    ("compiler", "told"), [("no-such-compiler", "no-such-compiler; install gcc"), ("false", "off")]
)
def test_without_a_compiler_the_log_says_why_once(
    compiler: str, told: str, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.INFO):
        assert native_code.load(source) is None
        assert native_code.load(source) is None
    (line,) = caplog.messages
    assert told in line and "answer.c" in line


def test_turned_off_nothing_is_compiled(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "_is_off", False)  # put back at the end
    assert native_code.load(source) is not None
    native_code.turn_off()
    assert native_code.load(source) is None


@pytest.mark.parametrize("text", ["int answer(void) { return nothing; }\n", "#error nothing \\344\n"])
def test_source_that_does_not_compile_is_told_with_the_compiler_s_words(
    text: str, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_bytes(text.replace("\\344", "\xe4").encode("latin-1"))
    assert native_code.load(source) is None
    assert "nothing" in caplog.text
