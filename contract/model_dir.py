"""Why a path given with --model is not a checkpoint directory, and what to give instead.

Standard library only: control plane and worker call it before anything else is imported.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_A_CHECKPOINT = "a checkpoint directory of Hugging Face form, with config.json, tokenizer.json and *.safetensors"
_MAX_LISTED = 5


def why_no_checkpoint(path: Path) -> str | None:
    """What is wrong with `path` and what to do, or None if it holds a config.json."""
    try:
        if (path / "config.json").is_file():
            return None
        if path.is_file():
            return _about_a_file(path)
        if not path.is_dir():
            return _about_nothing(path)
        return _about_a_directory(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}; give {_A_CHECKPOINT}"


def _about_nothing(path: Path) -> str:
    if _HUB_ID.fullmatch(str(path)):
        return (
            f"there is no directory {path}; if that is an id of the Hugging Face Hub: Motet downloads nothing, run "
            f"`hf download {path} --local-dir {path.name}` and give --model {path.name}"
        )
    return f"there is no directory {path}; give {_A_CHECKPOINT}"


def _about_a_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return f"{path} is a GGUF file, which is not served; give {_A_CHECKPOINT}"
    if (path.parent / "config.json").is_file():
        return f"{path} is a file; give its directory, --model {path.parent}"
    return f"{path} is a file; give {_A_CHECKPOINT}"


def _about_a_directory(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        base = _base_of_adapter(path / "adapter_config.json")
        return (
            f"{path} is an adapter; give its base model{base} with --model, and when the server runs: "
            f"motet adapters add NAME {path}"
        )
    names = sorted(child.name for child in path.iterdir())
    if any(name.endswith(".gguf") for name in names):
        return f"{path} holds GGUF files, which are not served; give {_A_CHECKPOINT}"
    below = sorted(
        str(file.parent) for pattern in ("*/config.json", "snapshots/*/config.json") for file in path.glob(pattern)
    )
    if below:
        return f"{path} holds no config.json; there is one in {_listed(below)}: give that directory"
    return f"{path} holds no config.json (it holds {_listed(names) or 'nothing'}); give {_A_CHECKPOINT}"


def _base_of_adapter(file: Path) -> str:
    """ ", NAME," from an adapter's configuration, or nothing."""
    try:
        name = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return f", {name[:200]}," if isinstance(name, str) and name else ""


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
