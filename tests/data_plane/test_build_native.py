"""`motet worker --build-native`: files for images, one line for each, and no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_plane import build_native, worker
from kernels.native.build import PREBUILT
from kernels.native.compiler import CompilerFailed


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were compiled into, by a stand-in that makes two files there."""
    requested: list[Path] = []

    def prebuild(folder: Path) -> Iterator[Path]:
        requested.append(folder)
        yield folder / "one.so"
        yield folder / "two.so"

    monkeypatch.setattr(build_native, "prebuild", prebuild)
    monkeypatch.delenv("MOTET_NATIVE_CACHE", raising=False)
    monkeypatch.delenv("MOTET_MODEL", raising=False)
    return requested


def test_each_file_is_a_line(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main(["--build-native", "--native-cache", "/image"]) == 0
    assert capsys.readouterr().out == "motet worker compiled /image/one.so\nmotet worker compiled /image/two.so\n"


def test_the_folder_is_the_flag_s_or_the_environment_s_or_beside_the_code(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.main(["--build-native"]) == 0
    monkeypatch.setenv("MOTET_NATIVE_CACHE", "/environment")
    assert worker.main(["--build-native"]) == 0
    assert worker.main(["--native-cache", "/flag", "--build-native"]) == 0
    assert folders == [PREBUILT, Path("/environment"), Path("/flag")]


def test_a_failure_is_one_line_and_a_status(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prebuild(folder: Path) -> Iterator[Path]:
        raise CompilerFailed("no C compiler")
        yield folder

    monkeypatch.setattr(build_native, "prebuild", prebuild)
    assert worker.main(["--build-native"]) == 1
    assert capsys.readouterr().err == "motet worker: --build-native: no C compiler\n"


def test_other_flags_are_refused(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker.main(["--build-native", "--threads", "2"])
    assert "unrecognized arguments: --threads 2" in capsys.readouterr().err
    assert folders == []
