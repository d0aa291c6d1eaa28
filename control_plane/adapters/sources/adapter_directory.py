"""The files of an adapter in a directory of this machine."""

from __future__ import annotations

from pathlib import Path

from control_plane.checks import refuse
from control_plane.errors import PathNotAllowed
from control_plane.registry.adapter_files import PEFT, TRTLLM, WEIGHTS_ARRAY, WEIGHTS_FILE, missing_file
from control_plane.signatures.verifier import SIGNATURE_FILE


def find_files(directory: Path, described: str, *, below: Path | None) -> dict[str, Path]:
    """The adapter's files and its signature by name, links followed. All of them must lie below `below`.

    `described` is the directory in messages. `below`: resolved; None where links may lead anywhere. Raises
    InvalidRequest for what is not an adapter, and PathNotAllowed.
    """
    files = {}
    written = TRTLLM if exists(directory / WEIGHTS_ARRAY) else PEFT
    if written is TRTLLM and exists(directory / WEIGHTS_FILE):
        raise refuse("source", f"{described} has {WEIGHTS_ARRAY} and {WEIGHTS_FILE}; keep one of the two")
    for name in (*written.names, SIGNATURE_FILE):
        try:
            path = (directory / name).resolve(strict=True)
        except (OSError, RuntimeError):
            present = _names(directory)
            if name in present:
                raise refuse(
                    "source", f"{described}: {name} is a link to a file that is not there; put it there, or remove it"
                ) from None
            if name not in written.required:  # not every adapter is signed
                continue
            raise refuse("source", f"{described} {missing_file(name, written, present)}") from None
        if below is not None and not path.is_relative_to(below):
            raise PathNotAllowed(f"{described} leads out of its root")
        if not path.is_file():
            raise refuse("source", f"{described}: {name} is not a file")
        files[name] = path
    return files


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except OSError:  # it is not there, or may not be read
        return []


def exists(path: Path) -> bool:
    """Whether it is there and can be reached; False for what is not a path of the system, such as a name too long."""
    try:
        return path.exists()
    except (OSError, RuntimeError):  # a loop of links, or a directory that may not be read
        return False
