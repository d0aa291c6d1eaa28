"""Adapter roots on a disk that hangs; what is found below them is tested with CreateAdapter."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from control_plane.adapters.roots import AdapterRoots
from control_plane.adapters.sources.remote_adapter import adapter_names
from control_plane.errors import InvalidRequest, StoreUnavailable
from control_plane.registry.adapter_files import CONFIG_FILE, EXACT_ARRAY, ROWS_ARRAY, WEIGHTS_ARRAY, WEIGHTS_FILE
from control_plane.registry.peft.ingest import FILE_NAMES
from control_plane.store_calls import MAX_HUNG_CALLS, StoreCalls

LONG_S = 60.0


async def test_a_root_that_hangs_is_refused_in_time_and_takes_no_threads_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FILE_NAMES:
        (tmp_path / name).write_text("x")
    is_back = threading.Event()
    is_file = Path.is_file

    def hang(path: Path) -> bool:
        is_back.wait(LONG_S)
        return is_file(path)

    calls = StoreCalls(timeout_s=0.05, what="the adapter root")
    roots = AdapterRoots({"team": tmp_path.parent}, calls)
    monkeypatch.setattr(Path, "is_file", hang)
    readings = (roots.files(f"team/{tmp_path.name}") for _ in range(2 * MAX_HUNG_CALLS))
    refused = await asyncio.gather(*readings, return_exceptions=True)
    assert {type(error) for error in refused} == {StoreUnavailable}
    assert "the adapter root did not respond within 0.05 s" in str(refused[0])
    async with asyncio.timeout(LONG_S):
        assert await asyncio.to_thread(lambda: 7) == 7
        is_back.set()
        while calls.num_hung:
            await asyncio.sleep(0)
    calls.timeout_s = LONG_S
    assert set(await roots.files(f"team/{tmp_path.name}")) == set(FILE_NAMES)
    roots.close()


async def test_a_link_to_nothing_is_refused_and_not_left_out(tmp_path: Path) -> None:
    directory, roots = tmp_path / "adapter", AdapterRoots({"team": tmp_path})
    directory.mkdir()
    for name in FILE_NAMES:
        (directory / name).write_text("x")
    (directory / "tokenizer.json").symlink_to(directory / "blobs" / "4d7a")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json is a link to a file that is not there"):
        await roots.files("team/adapter")
    with pytest.raises(InvalidRequest, match=r"has no adapter_config\.json"):
        await roots.files(f"team/{'x' * 300}")  # too long a name for the file system
    roots.close()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["adapter_model.bin"], r"only as adapter_model\.bin, a pickle.* save it again with save_pretrained"),
        ([f"adapter_model-0000{n}-of-00002.safetensors" for n in (1, 2)], "its weights are in 2 shards: join them"),
        ([], r"has no adapter_model\.safetensors; name a directory that PEFT's save_pretrained wrote"),
    ],
)
async def test_what_lies_there_in_place_of_the_weights_is_named(tmp_path: Path, names: list[str], words: str) -> None:
    directory, roots = tmp_path / "adapter", AdapterRoots({"team": tmp_path})
    directory.mkdir()
    for name in (CONFIG_FILE, *names):
        (directory / name).write_text("x")
    with pytest.raises(InvalidRequest, match=words):
        await roots.files("team/adapter")
    with pytest.raises(InvalidRequest, match=words):  # of a Hub or a bucket
        adapter_names("team/adapter", dict.fromkeys((CONFIG_FILE, *names), 1))
    roots.close()


async def test_the_files_of_a_directory_decide_about_its_format(tmp_path: Path) -> None:
    directory, roots = tmp_path / "adapter", AdapterRoots({"team": tmp_path})
    directory.mkdir()
    for name in (WEIGHTS_ARRAY, ROWS_ARRAY):
        (directory / name).write_text("x")
    assert set(await roots.files("team/adapter")) == {WEIGHTS_ARRAY, ROWS_ARRAY}
    for name in (CONFIG_FILE, EXACT_ARRAY):
        (directory / name).write_text("x")
    assert set(await roots.files("team/adapter")) == {WEIGHTS_ARRAY, ROWS_ARRAY, CONFIG_FILE, EXACT_ARRAY}
    (directory / WEIGHTS_FILE).write_text("x")
    with pytest.raises(InvalidRequest, match="keep one of the two"):
        await roots.files("team/adapter")
    (directory / WEIGHTS_FILE).unlink()
    (directory / ROWS_ARRAY).unlink()
    with pytest.raises(InvalidRequest, match=r"has no model\.lora_config\.npy; name a directory that TensorRT-LLM's"):
        await roots.files("team/adapter")
    roots.close()


async def test_a_revision_of_a_directory_is_refused_as_such(tmp_path: Path) -> None:
    roots = AdapterRoots({"team": tmp_path})
    (tmp_path / "poet").mkdir()
    with pytest.raises(InvalidRequest, match=r"'team/poet@v1': there is none, and a directory has no @revision"):
        await roots.files("team/poet@v1")
    with pytest.raises(InvalidRequest, match="a directory has no @revision"):
        await roots.files(f"team/{'a' * 300}@v1")
    (tmp_path / "poet@v1").mkdir()
    for name in FILE_NAMES:
        (tmp_path / "poet@v1" / name).write_text("x")
    assert set(await roots.files("team/poet@v1")) == set(FILE_NAMES)
