"""Loads another project's kernels from a directory outside the repository, for `bench --peer DIR`.

DIR holds `motet_peer.py`, which the operator writes around the other project. DIR is put on the module search path, so
that what lies beside the file can be imported. The file must define

    NAME: str                      the column's heading
    call(op, arguments) -> a call of nothing, or None for an op that the project does not have

op is the name in the table's first column and arguments are our public call's by name (kernels/<op>/__init__.py),
tensors on the device; for attention `batch` has block_tables, query_start and context_lens. LoRA has, instead of the
arena's pages, a [n, rank, in], b [n, rank, out], scaling [n] and token_slots: add_lora beside y and x, with smaller
ranks filled up with zeros; add_lora_group the same with a list of a and of b by module; lora_shrink beside x, without b
and scaling, to return float32 [T, rank]; lora_expand beside y and such an h, without a; add_lora_embedding beside y and
token_ids. What the call needs in another layout is made in call(), which is not timed. It must return what ours
returns and write where ours writes: the two are compared, and a peer that raises or returns other values is left out of
the row and listed below the table.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels.measure import Call

FILE = "motet_peer.py"


class PeerRefused(Exception):
    """The directory has no usable peer; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class PeerModule:
    """The two things that a peer defines."""

    name: str
    make_call: Callable[[str, dict[str, Any]], Call | None]

    def call(self, op: str, arguments: dict[str, Any]) -> Call | None:
        """The op over these inputs, None if the peer has no such op. The peer may keep and change the dict."""
        made = self.make_call(op, dict(arguments))
        if made is not None and not callable(made):
            raise PeerRefused(
                f"peer {self.name}: call({op!r}, ...) returned a {type(made).__name__}, want a call or None"
            )
        return made


def load_peer(directory: Path) -> PeerModule:
    """The peer in a directory. Raises PeerRefused."""
    path = directory / FILE
    if not path.is_file():
        raise PeerRefused(f"--peer: {directory} holds no {FILE}; see benchmarks/kernels/peer_module.py")
    spec = importlib.util.spec_from_file_location("motet_peer", path)
    assert spec is not None and spec.loader is not None, "a file named .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(directory.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PeerRefused(f"--peer: {path} failed to load: {type(error).__name__}: {error}") from error
    name, make_call = getattr(module, "NAME", None), getattr(module, "call", None)
    if not isinstance(name, str) or not name or not callable(make_call):
        raise PeerRefused(f"--peer: {path} must define NAME, a string, and call(op, arguments)")
    return PeerModule(name, make_call)
