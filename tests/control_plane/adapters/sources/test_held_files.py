"""A writer of a directory root swaps names while the server reads: files that lie elsewhere are never read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.adapters.roots import AdapterRoots
from control_plane.adapters.sources.held_files import held_open
from control_plane.adapters.sources.progress import Progress
from control_plane.errors import InvalidRequest, MotetError, PathNotAllowed, StoreUnavailable
from control_plane.registry.adapter_files import CONFIG_FILE
from control_plane.registry.peft.ingest import FILE_NAMES
from control_plane.store_calls import StoreCalls


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the root, with the same names."""
    return write(tmp_path / "outside", "secret")


def write(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True)
    for name in FILE_NAMES:
        (directory / name).write_text(text)
    return directory


def link_file(adapter: Path, outside: Path) -> None:
    (adapter / CONFIG_FILE).unlink()
    (adapter / CONFIG_FILE).symlink_to(outside / CONFIG_FILE)


def link_folder(adapter: Path, outside: Path) -> None:
    adapter.rename(adapter.with_name("former"))
    adapter.symlink_to(outside)


def link_folder_above(adapter: Path, outside: Path) -> None:
    adapter.parent.rename(adapter.parent.with_name("former"))
    (outside.parent / "elsewhere").mkdir()
    (outside.parent / "elsewhere" / adapter.name).symlink_to(outside)
    adapter.parent.symlink_to(outside.parent / "elsewhere")


def put_pipe(adapter: Path, _outside: Path) -> None:
    (adapter / CONFIG_FILE).unlink()
    os.mkfifo(adapter / CONFIG_FILE)


def remove(adapter: Path, _outside: Path) -> None:
    (adapter / CONFIG_FILE).unlink()


@pytest.mark.parametrize(
    ("swap", "error", "says"),
    [
        (link_file, PathNotAllowed, "leads out of its root"),
        (link_folder, PathNotAllowed, "leads out of its root"),
        (link_folder_above, PathNotAllowed, "leads out of its root"),
        (put_pipe, InvalidRequest, f"{CONFIG_FILE} is not a file"),
        (remove, InvalidRequest, f"{CONFIG_FILE} was there and cannot be opened any more"),
    ],
)
async def test_a_name_that_is_swapped_between_check_and_open_is_refused(
    tmp_path: Path, outside: Path, swap: Callable[[Path, Path], None], error: type[MotetError], says: str
) -> None:
    adapter = write(tmp_path / "root" / "team" / "poet", "own")
    roots = AdapterRoots({"lab": tmp_path / "root"})
    source = await roots.find("lab/team/poet")
    swap(adapter, outside)
    with pytest.raises(error, match=says):
        async with source.open(Progress()):
            pass
    roots.close()
    assert open_files() == []


async def test_a_name_that_is_swapped_after_the_open_leads_to_the_same_file(tmp_path: Path, outside: Path) -> None:
    adapter = write(tmp_path / "root" / "poet", "own")
    roots = AdapterRoots({"lab": tmp_path / "root"})
    source = await roots.find("lab/poet")
    async with source.open(Progress()) as found:
        link_folder(adapter, outside)
        assert {name: path.read_text() for name, path in found.files.items()} == dict.fromkeys(FILE_NAMES, "own")
        assert len(open_files()) == len(FILE_NAMES)
    roots.close()
    assert open_files() == []


async def test_a_link_to_another_place_below_the_root_is_followed(tmp_path: Path) -> None:
    shared = write(tmp_path / "root" / "shared", "own")
    (tmp_path / "root" / "poet").symlink_to(shared)
    roots = AdapterRoots({"lab": tmp_path / "root"})
    source = await roots.find("lab/poet")
    async with source.open(Progress()) as found:
        assert found.files[CONFIG_FILE].read_text() == "own"
    roots.close()


async def test_files_that_open_too_late_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, is_back, was_closed = write(tmp_path / "poet", "own"), threading.Event(), threading.Event()
    open_file, close_file = os.open, os.close

    def hang(path: Path, flags: int) -> int:
        is_back.wait(60)
        return open_file(path, flags)

    def close(descriptor: int) -> None:
        close_file(descriptor)
        was_closed.set()

    monkeypatch.setattr(os, "open", hang)
    monkeypatch.setattr(os, "close", close)
    calls = StoreCalls(timeout_s=0.05, what="the adapter root")
    files = {CONFIG_FILE: adapter / CONFIG_FILE}
    with pytest.raises(StoreUnavailable, match="the adapter root did not respond"):
        async with held_open(calls, files, "source", below=tmp_path):
            pass
    is_back.set()
    assert was_closed.wait(60)
    assert open_files() == []


def open_files() -> list[str]:
    """The files of adapters that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(descriptor.readlink()))
        except FileNotFoundError:  # that of iterdir
            continue
    return [path for path in found if path.removesuffix(" (deleted)").endswith(tuple(FILE_NAMES))]
