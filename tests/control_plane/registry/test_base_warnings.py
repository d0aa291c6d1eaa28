"""An adapter whose configuration names another base model is registered, with a warning that stays with the version."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.api.wire import version_message
from tests.control_plane.registry.rig import CONFIG, base_model, open_registry, write_adapter

SERVED = replace(base_model(), model_dir=Path("/models/Llama-3.1-8B"))


def named(directory: Path, base: Any) -> dict[str, Path]:
    """An adapter whose configuration has this base_model_name_or_path."""
    return write_adapter(directory, CONFIG | {"base_model_name_or_path": base})


async def test_another_base_model_is_said_in_the_log_and_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = named(tmp_path / "named", "/home/me/Qwen2.5-7B-Instruct")
    registry = await open_registry(str(tmp_path / "store"), SERVED)
    with caplog.at_level(logging.WARNING):
        (version,) = (await registry.register("poet", files)).record.versions
    (warning,) = version.warnings
    assert "'Qwen2.5-7B-Instruct' as its base model, and 'Llama-3.1-8B' is served" in warning
    assert [record.getMessage() for record in caplog.records] == [f"adapter registered adapter_id=poet: {warning}"]
    await registry.close()

    again = await open_registry(str(tmp_path / "store"), SERVED)
    (stored,) = again.get("poet").versions
    assert stored == version and list(version_message(stored).warnings) == [warning]
    same = (await again.register("other", named(tmp_path / "same", "acme/Llama-3.1-8B"))).record
    assert same.active_digest == version.digest, "the name is not part of the adapter's bytes"
    assert same.versions[0].warnings == ()
    await again.close()


@pytest.mark.parametrize("name", ["/home/me/checkpoint-500", "unsloth/llama-3.1-8b-bnb-4bit", "", None, 7, ["x"]])
async def test_what_may_be_the_same_or_says_nothing_gives_no_warning(tmp_path: Path, name: Any) -> None:
    registry = await open_registry(str(tmp_path / "store"), SERVED)
    (version,) = (await registry.register("poet", named(tmp_path / "a", name))).record.versions
    assert version.warnings == ()
    await registry.close()
