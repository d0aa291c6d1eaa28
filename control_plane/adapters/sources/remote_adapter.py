"""What a download needs to know of an adapter that lies elsewhere, whatever the protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from control_plane.checks import quoted, refuse
from control_plane.errors import InvalidRequest
from control_plane.registry.adapter_files import PEFT, TRTLLM, WEIGHTS_ARRAY, WEIGHTS_FILE, missing_file
from control_plane.signatures.verifier import SIGNATURE_FILE

WAIT_LIMIT_S = 30.0  # longest wait that a server's Retry-After gets
_SECONDS = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file as its server lists it."""

    name: str
    size_bytes: int
    tag: str  # the content's mark: a hash on a Hub, an ETag in a bucket


class TryLater(Exception):
    """The server cannot serve this at present, or the connection broke: try again, after `wait_s` if it said so."""

    def __init__(self, message: str, *, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Changed(Exception):
    """What is there is not what was listed."""


class RemoteAdapter(Protocol):
    """The files of one state of an adapter. Its methods block, and raise TryLater, Changed or MotetError."""

    @property
    def source(self) -> str:
        """Where the files are, as the version names it: "{root}/{path}", and "@{commit}" on a Hub."""

    @property
    def identity(self) -> str:
        """A text that is equal for equal bytes. It is shown to nobody."""

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        """The files that belong to the adapter."""

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """The bytes from `start` on, in pieces. What the server sends too little is found by who reads."""

    def error(self, file: RemoteFile, content: Iterator[bytes]) -> str:
        """What is wrong with a file that has its size; empty if nothing is."""

    def check_unchanged(self) -> None:
        """Raise Changed if a file is not what was listed any more."""


def seconds_to_wait(retry_after: str | None) -> float | None:
    """What a Retry-After header says, within limits; None where it does not give seconds."""
    return min(float(retry_after), WAIT_LIMIT_S) if retry_after and _SECONDS.fullmatch(retry_after) else None


def adapter_names(source: str, present: Mapping[str, int]) -> list[str]:
    """The files that belong to the adapter, of those present with their sizes. Raises InvalidRequest."""
    written = TRTLLM if WEIGHTS_ARRAY in present else PEFT
    if written is TRTLLM and WEIGHTS_FILE in present:
        raise refuse("source", f"{quoted(source)} has {WEIGHTS_ARRAY} and {WEIGHTS_FILE}; keep one of the two")
    for name in written.required:
        if name not in present:
            raise refuse("source", f"{quoted(source)} {missing_file(name, written, present)}")
    return [name for name in (*written.names, SIGNATURE_FILE) if name in present]


def not_found(source: str, what: str) -> InvalidRequest:
    """The error of a place that is not there, as far as the server's credentials show."""
    return refuse("source", f"{quoted(source)}: {what}")
