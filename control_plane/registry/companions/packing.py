"""Packs an adapter with what it brings beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from control_plane.registry.adapter_files import COMPANION_LIMITS
from control_plane.registry.companions.documents import with_documents
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.companions.reading import read_companions
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import PackedInfo, ingest
from control_plane.registry.peft.problems import Problems

# Tokens of an adapter whose weights cannot be read: no id is called wrong that its vocabulary may have.
_ANY_VOCABULARY = 1 << 31


def pack_whole(
    files: Mapping[str, Path],
    base_model: BaseModel,
    *,
    directory: Path,
    inherited: Inherited = NOT_INHERITED,
    **arguments: Any,
) -> PackedInfo:
    """What `ingest` makes of the weights, and the documents of the other files or of another version.

    Raises InvalidAdapter with all that is wrong with the files.
    """
    companions = {name: path for name, path in files.items() if name in COMPANION_LIMITS}
    problems = Problems()
    with problems.collected():
        packed = ingest(files, base_model, directory=directory, **arguments)
    if problems:
        with problems.collected():
            read_companions(companions, base_model, _ANY_VOCABULARY)
    problems.raise_all()
    documents = {
        **inherited.fitting(packed.num_tokens or base_model.vocab_size),
        **read_companions(companions, base_model, packed.num_tokens),
    }
    return with_documents(packed, documents, directory)
