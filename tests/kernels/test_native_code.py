"""C that is compiled where it runs."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import native_code

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A source file, and a cache folder that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MOTET_NATIVE", raising=False)
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    native_code.load.cache_clear()
    yield path
    native_code.load.cache_clear()


def made(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "motet").iterdir())


def test_source_is_compiled_once_and_anew_when_it_changes(source: Path, tmp_path: Path) -> None:
    library = native_code.load(source)
    assert library is not None and library.answer() == 42
    (first,) = made(tmp_path)
    assert first.parent.stat().st_mode & 0o077 == 0
    written = first.stat().st_mtime_ns
    native_code.load.cache_clear()
    assert native_code.load(source) is not None and made(tmp_path) == [first]
    assert first.stat().st_mtime_ns == written
    source.write_text(SOURCE.replace("42", "43"))
    native_code.load.cache_clear()
    library = native_code.load(source)
    assert library is not None and library.answer() == 43
    assert len(made(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MOTET_NATIVE", "0", "MOTET_NATIVE=0"),
        ("CC", "no-such-compiler", "install gcc or clang"),
        ("CC", "false", "native code is off"),
    ],
)
def test_without_it_the_log_says_why_once(
    name: str, value: str, told: str, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        assert native_code.load(source) is None
        assert native_code.load(source) is None
    (line,) = caplog.messages
    assert told in line and "answer.c" in line


def test_source_that_does_not_compile_is_told_with_the_compiler_s_words(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("int answer(void) { return nothing; }\n")
    assert native_code.load(source) is None
    assert "nothing" in caplog.text


def test_threads_are_those_of_torch() -> None:
    address = native_code.openmp_parallel()
    assert address is not None
    entered = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: entered.append(1))
    parallel = ctypes.CFUNCTYPE(None, type(body), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)
    parallel(body, None, 2, 0)
    assert entered == [1, 1]
