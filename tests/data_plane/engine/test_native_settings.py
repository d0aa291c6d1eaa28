"""What a worker's settings say of native code holds before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_plane.engine.build import build_engine
from data_plane.errors import ConfigError
from kernels import native
from kernels.native import build
from tests.data_plane.engine.test_oracle import worker_config


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    native.configure(native.NativeSettings())
    yield
    native.configure(usual)


def test_a_worker_on_a_gpu_compiles_no_native_code(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def load(*_: object, **__: object) -> None:
        seen.append(native.library())
        raise ConfigError("enough was seen")

    monkeypatch.setattr("data_plane.engine.build.load_model", load)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "a GPU without tables")
    monkeypatch.setattr("data_plane.engine.build.device_memory", lambda _: None)
    with pytest.raises(ConfigError, match="enough was seen"):
        build_engine(worker_config(checkpoint, native_code="on", device="cuda"))
    assert seen == [None]


@pytest.mark.parametrize("native_code", ["on", "off"])
def test_native_code_is_set_up_before_the_model_is_loaded(
    native_code: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, Path | None]] = []

    def load(*_: object, **__: object) -> None:
        seen.append((native.library() is not None, build.cache_folder()))
        raise ConfigError("enough was seen")

    monkeypatch.setattr("data_plane.engine.build.load_model", load)
    has_library = native.library() is not None
    usual = build.cache_folder()
    assert usual is not None
    # A link to the folder of all tests, so that nothing is compiled once more.
    cache = tmp_path / "cache"
    usual.mkdir(parents=True, exist_ok=True)
    cache.symlink_to(usual)
    with pytest.raises(ConfigError, match="enough was seen"):
        build_engine(worker_config(checkpoint, native_code=native_code, native_cache=cache))
    assert seen == [(native_code == "on" and has_library, cache)]
