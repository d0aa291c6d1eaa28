"""Packs an adapter with what it brings beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from control_plane.registry.adapter_files import COMPANION_LIMITS
from control_plane.registry.companions.documents import with_documents
from control_plane.registry.companions.reading import read_companions
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import PackedInfo, ingest


def pack_whole(files: Mapping[str, Path], base_model: BaseModel, *, directory: Path, **arguments: Any) -> PackedInfo:
    """What `ingest` makes of the weights, and the documents of the other files. Raises InvalidAdapter."""
    packed = ingest(files, base_model, directory=directory, **arguments)
    companions = {name: path for name, path in files.items() if name in COMPANION_LIMITS}
    return with_documents(packed, read_companions(companions, base_model, packed.num_tokens), directory)
