"""The library of C sources: made once, found again, and never one that is stale, torn or somebody else's."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.native import build
from kernels.native.build import KEPT_OTHERS, Loaded, Loader, Recipe
from kernels.native.compiler import CompilerFailed, find_compiler
from kernels.native.cpu import Cpu
from kernels.native.folder import CacheFolder
from kernels.native.target import Target, targets_to_prebuild

ROOT = Path(__file__).parents[3]
TARGET = Target("any", ())


class Place:
    """A source, a cache folder, and a compiler that counts the files it compiles."""

    def __init__(self, folder: Path) -> None:
        self.sources = folder / "sources"
        (self.sources / "op").mkdir(parents=True)
        self.source = self.sources / "op" / "constant.c"
        self.header = self.sources / "constant.h"
        self.write(42)
        self.cache = folder / "cache"
        self.log = folder / "compiled"
        self.log.touch()
        real = find_compiler()
        assert real is not None
        self.script = folder / "compiler"
        self.use_compiler(
            "1.0", f'case "$*" in *" -c "*) echo compiled >> {self.log};; esac; exec {" ".join(real)} "$@"'
        )

    def write(self, constant: int) -> None:
        self.source.write_text('#include "../constant.h"\nint constant(void) { return CONSTANT; }\n')
        self.header.write_text(f"#define CONSTANT {constant}\n")

    def use_compiler(self, version: str, body: str) -> None:
        self.script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\n{body}\n')
        self.script.chmod(0o755)

    def load(self, **changes: object) -> Loaded | None:
        """What a process that starts now gets."""
        settings: dict[str, object] = {
            "compiler": [str(self.script)],
            "cache": CacheFolder(self.cache),
            "prebuilt": None,
            **changes,
        }
        compiler = settings.pop("compiler")
        assert compiler is None or isinstance(compiler, Sequence)
        return Loader(Recipe(self.sources, TARGET), compiler, **settings).load()  # type: ignore[arg-type]

    def fill(self) -> Path:
        """Have the cache hold the library, which this process does not open; its path."""
        loaded = self.load(open_library=lambda path: ctypes.CDLL(None))
        assert loaded is not None
        return self.cache / loaded.name

    @property
    def num_compiled(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def constant_of(loaded: Loaded | None) -> int:
    assert loaded is not None
    return int(loaded.library.constant())


def test_a_second_start_compiles_nothing(place: Place) -> None:
    assert constant_of(place.load()) == 42
    assert constant_of(place.load()) == 42
    assert place.num_compiled == 1


def test_sources_and_headers_that_changed_are_compiled_again(place: Place) -> None:
    assert constant_of(place.load()) == 42
    place.write(43)
    assert constant_of(place.load()) == 43
    place.source.write_text("int constant(void) { return 44; }\n")
    assert constant_of(place.load()) == 44


def test_every_source_below_the_folder_is_part_of_the_library(place: Place) -> None:
    (place.sources / "other.c").write_text("int other(void) { return 1; }\n")
    loaded = place.load()
    assert constant_of(loaded) == 42
    assert loaded is not None and loaded.library.other() == 1


def test_another_version_or_other_flags_of_the_compiler_compile_again(place: Place) -> None:
    place.fill()
    place.script.write_text(place.script.read_text().replace("echo 1.0", "echo 1.1"))
    place.fill()
    assert place.num_compiled == 2
    place.load(compiler=[str(place.script), "-DOTHER"])
    assert place.num_compiled == 3


def test_names_tell_targets_apart(place: Place) -> None:
    one, other = (Recipe(place.sources, Target(name, ())).name("1.0") for name in ("one", "other"))
    flags = Recipe(place.sources, Target("one", ("-mavx",))).name("1.0")
    assert len({one, other, flags}) == 3


@pytest.mark.parametrize("damage", ["torn", "changed", "empty"])
def test_a_damaged_library_is_reported_and_made_again(
    damage: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    path = place.fill()
    data = path.read_bytes()
    path.write_bytes({"torn": data[:-100], "changed": data[:500] + b"x" + data[501:], "empty": b""}[damage])
    assert constant_of(place.load()) == 42
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() == data
    assert place.num_compiled == 2


def test_a_folder_of_somebody_else_is_named_and_left_alone(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    path = place.fill()
    before = path.read_bytes()
    assert constant_of(place.load(cache=CacheFolder(place.cache, trusted_owners=frozenset()))) == 42
    assert f"{place.cache} belongs to user" in caplog.text
    assert path.read_bytes() == before
    assert place.num_compiled == 2


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_that_others_may_write_is_named_and_left_alone(
    mode: int, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.cache.mkdir()
    place.cache.chmod(mode)
    assert constant_of(place.load()) == 42
    assert f"{place.cache} may be written by others (mode {mode:o})" in caplog.text
    assert not list(place.cache.iterdir())


def test_a_file_that_others_may_write_is_replaced(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    path = place.fill()
    path.chmod(0o666)
    assert constant_of(place.load()) == 42
    assert f"{path} may be written by others" in caplog.text
    assert place.num_compiled == 2
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_link_is_replaced_and_not_followed(place: Place, tmp_path: Path) -> None:
    path = place.fill()
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert constant_of(place.load()) == 42
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == before
    assert place.num_compiled == 2


def test_processes_that_start_together_compile_once(place: Place) -> None:
    code = (
        "import sys; from pathlib import Path; from kernels.native.build import *\n"
        "from kernels.native.folder import CacheFolder\n"
        "recipe = Recipe(Path(sys.argv[1]), Target('any', ()))\n"
        "loaded = Loader(recipe, [sys.argv[2]], cache=CacheFolder(Path(sys.argv[3])), prebuilt=None).load()\n"
        "sys.exit(loaded.library.constant() != 42)"
    )
    command = [sys.executable, "-c", code, str(place.sources), str(place.script), str(place.cache)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert place.num_compiled == 1
    assert [path.suffix for path in place.cache.iterdir() if path.name != ".lock"] == [".so"]


def test_without_a_compiler_a_library_of_any_compiler_serves(place: Place) -> None:
    place.fill()
    assert constant_of(place.load(compiler=None)) == 42
    prebuilt = CacheFolder(place.cache)
    assert constant_of(place.load(compiler=None, cache=None, prebuilt=prebuilt)) == 42


def test_a_library_beside_the_code_serves_whatever_the_compiler_is(place: Place, tmp_path: Path) -> None:
    place.fill()
    place.use_compiler("2.0", f"echo compiled >> {place.log}; exit 1")
    prebuilt, cache = CacheFolder(place.cache), CacheFolder(tmp_path / "own")
    assert constant_of(place.load(cache=cache, prebuilt=prebuilt)) == 42
    assert place.num_compiled == 1


def test_a_compiler_that_fails_leaves_what_another_one_made(place: Place) -> None:
    place.fill()
    place.use_compiler("2.0", "exit 1")
    assert constant_of(place.load()) == 42
    place.script.write_text("#!/bin/sh\nexit 1\n")
    assert constant_of(place.load()) == 42


def test_without_a_compiler_or_library_the_log_says_why(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    assert place.load(compiler=None) is None
    assert "install gcc or clang" in caplog.text


def test_a_source_that_does_not_compile_is_reported_in_the_compiler_s_words(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.source.write_bytes("#error nothing \xe4\n".encode("latin-1"))
    assert place.load() is None
    assert "#error nothing" in caplog.text
    assert place.load() is None  # and nothing of it was kept


def test_where_nothing_may_be_run_a_copy_elsewhere_is_loaded(place: Place) -> None:
    place.fill()

    def open_library(path: str) -> ctypes.CDLL:
        if path.startswith(str(place.cache)):
            raise OSError("failed to map segment from shared object")
        return ctypes.CDLL(path)

    assert constant_of(place.load(open_library=open_library)) == 42
    assert place.num_compiled == 1


def test_where_nothing_can_be_loaded_at_all_there_is_no_library(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.fill()

    def open_library(path: str) -> ctypes.CDLL:
        raise OSError("failed to map segment from shared object")

    assert place.load(open_library=open_library) is None
    assert "native code is off" in caplog.text and "failed to map segment" in caplog.text


class FullFolder(CacheFolder):
    """A folder on a full disk."""

    def write(self, name: str, content: bytes) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_the_library_is_loaded_and_not_kept(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    assert constant_of(place.load(cache=FullFolder(place.cache))) == 42
    assert "No space left on device" in caplog.text
    assert [path.name for path in place.cache.iterdir()] == [".lock"]


def test_where_no_folder_can_be_made_the_library_is_loaded_and_not_kept(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert constant_of(place.load(cache=CacheFolder(tmp_path / "file" / "cache"))) == 42
    assert "native code is compiled at each start" in caplog.text


def test_a_few_libraries_of_other_sources_stay_those_used_last(place: Place) -> None:
    cache = CacheFolder(place.cache)
    others = [f"kernels-any-{number:024d}-x.so" for number in range(KEPT_OTHERS + 2)]
    for other in others:
        cache.write(other, b"")
    now_ns = time.time_ns()
    for age, other in enumerate(others):  # the first is the youngest
        os.utime(place.cache / other, ns=(0, now_ns - age * 10**9))
    name = place.fill().name
    assert {path.name for path in place.cache.glob("*.so")} == {name, *others[:KEPT_OTHERS]}


def test_libraries_are_made_ahead_for_every_level(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "SOURCES", place.sources)
    monkeypatch.setattr(build, "this_cpu", lambda: Cpu("x86_64", "old", frozenset({"sse2"})))
    monkeypatch.setattr(build, "find_compiler", lambda: [str(place.script)])
    monkeypatch.setenv("MOTET_NATIVE_CACHE", str(tmp_path / "unused"))
    levels = targets_to_prebuild(Cpu("x86_64", "old", frozenset()))
    old_umask = os.umask(0o077)
    try:
        paths = list(build.prebuild(tmp_path / "image"))
    finally:
        os.umask(old_umask)
    assert place.num_compiled == len(paths) == len(levels) == 3
    for path, level in zip(paths, levels, strict=True):
        prebuilt = CacheFolder(tmp_path / "image")
        loaded = Loader(Recipe(place.sources, level), None, cache=None, prebuilt=prebuilt).load()
        assert loaded is not None and loaded.name == path.name
        assert constant_of(loaded) == 42
        assert path.stat().st_mode & 0o777 == 0o644  # another user runs the image
    assert path.parent.stat().st_mode & 0o777 == 0o755


def test_without_a_compiler_nothing_is_made_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(CompilerFailed, match="install gcc or clang"):
        list(build.prebuild(tmp_path))


def test_the_cache_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("MOTET_NATIVE_CACHE", raising=False)
    assert build.cache_folder() == Path("/h/.cache/motet/native")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert build.cache_folder() == Path("/x/motet/native")
    monkeypatch.setenv("MOTET_NATIVE_CACHE", "/m")
    assert build.cache_folder() == Path("/m")


def test_turned_off_there_is_no_library(caplog: pytest.LogCaptureFixture) -> None:
    usual = build.settings()
    assert build.library() is not None
    assert build.library_name().endswith(".so")
    try:
        with caplog.at_level(logging.INFO):
            build.configure(replace(usual, is_off=True))
            assert build.library() is None
            assert build.library() is None
        assert build.library_name() == "none"
        assert caplog.messages == ["native code is off reason=it was turned off"]
    finally:
        build.configure(usual)


def test_the_sources_of_this_checkout_are_compiled_without_torch() -> None:
    code = (
        "import sys, kernels.native.build, kernels.native; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
