"""Packs an adapter's directory without a server, for `motet convert merge`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from control_plane.registry.adapter_files import ALL_NAMES, COMPANION_LIMITS
from control_plane.registry.companions.packing import pack_whole
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.served_modules import Modules

# Values are merged in float32 and rounded once, so the adapter's are not rounded before.
_DTYPE = "float32"


def pack_directory(directory: Path, model_dir: Path, work_dir: Path, modules: Modules) -> list[str]:
    """Write manifest.json and the chunks as 0, 1, ... into `work_dir`, which is empty. Returns the names of the files
    beside the weights that belong to the adapter.

    Every check of a registration is made. Raises InvalidAdapter, or BaseModelError for the base model.
    """
    files = {name: directory / name for name in ALL_NAMES if (directory / name).is_file()}
    base_model = BaseModel.load(model_dir, _DTYPE)
    packed = pack_whole(
        files, base_model, directory=work_dir, max_adapter_bytes=_size(files.values()), reported=modules
    )
    (work_dir / "manifest.json").write_bytes(packed.manifest)
    for index, chunk in enumerate(packed.chunks):
        chunk.path.rename(work_dir / str(index))
    return sorted(files.keys() & COMPANION_LIMITS.keys()) if packed.companions else []


def _size(paths: Iterable[Path]) -> int:
    return max((path.stat().st_size for path in paths), default=0)
