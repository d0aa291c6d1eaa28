"""The directory of a merged checkpoint: the base's files around the weights, and the adapter's own in their place.

The directory appears as a whole or not at all: it is written beside its place under another name.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data_plane.errors import ConfigError
from data_plane.merging.checkpoint import Merged, merge_checkpoint
from data_plane.merging.module_tree import ModuleTree
from data_plane.models.checkpoint.shards import INDEX_FILE, read_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")
_SPACE = 1.01  # of the base's weights, for what the adapter adds


def check_out(out: Path) -> None:
    """Raises ConfigError if something is there already, or nothing can be written there."""
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists; name a directory that does not, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory; make it first, or correct the path")


def write_merged(
    model_dir: Path, packed_dir: Path, adapter_dir: Path, companions: Collection[str], out: Path, tree: ModuleTree
) -> Merged:
    """Merge into a new directory. `companions`: names of the adapter's files that replace the base's.

    Raises CannotMerge and ConfigError; nothing is left then.
    """
    check_out(out)
    needed = sum(path.stat().st_size for path in model_dir.glob("*.safetensors")) * _SPACE
    if (free := shutil.disk_usage(out.parent).free) < needed:
        raise ConfigError(f"{out.parent} has {free} bytes free and the merged weights need {int(needed)}; make room")
    partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    try:
        merged = merge_checkpoint(model_dir, packed_dir, partial, tree)
        _copy_files(model_dir, partial)
        for name in companions:
            _take(adapter_dir / name, partial / name)
        _write_config(partial, merged)
        if (partial / INDEX_FILE).exists():
            _write_index(partial / INDEX_FILE, merged)
        partial.chmod(0o777 & ~_umask())
        check_out(out)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return merged


def _copy_files(model_dir: Path, out: Path) -> None:
    for pattern in _KEPT:
        for path in sorted(model_dir.glob(pattern)):
            is_other_index = path.name.endswith(".index.json") and path.name != INDEX_FILE
            if path.is_file() and not is_other_index and not path.name.startswith("."):
                shutil.copyfile(path, out / path.name)


def _take(source: Path, target: Path) -> None:
    """Copy a file of the adapter. Of generation defaults, what the adapter does not name stays the base's."""
    if source.name == GENERATION_FILE and target.exists():
        _write_json(target, read_json(target) | read_json(source))
    else:
        shutil.copyfile(source, target)


def _write_config(out: Path, merged: Merged) -> None:
    config = read_json(out / CONFIG_FILE)
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    if merged.is_untied:
        for part in parts:
            part["tie_word_embeddings"] = False
    if merged.vocab_size is not None:
        for part in parts:
            if "vocab_size" in part:
                part["vocab_size"] = merged.vocab_size
    _write_json(out / CONFIG_FILE, config)


def _write_index(path: Path, merged: Merged) -> None:
    index = read_json(path)
    known = index.get("metadata")
    metadata: dict[str, Any] = known if isinstance(known, dict) else {}
    metadata.pop("total_parameters", None)  # of some: not worth to be counted
    _write_json(
        path, index | {"metadata": metadata | {"total_size": merged.size_bytes}, "weight_map": merged.weight_map}
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
