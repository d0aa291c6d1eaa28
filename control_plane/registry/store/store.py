"""The interface of a storage: six methods over keys, two of them conditional writes.

Keys are relative paths, made from digests and checked ids only. Every call blocks; use threads. Content is visible as a
whole or not at all, and is durable when a write returns. Two servers that write one key cannot overwrite each other
unseen: a write names the state that it replaces, and of two writes that replace one state, one fails.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

# A control plane that was paused for as long as this may still be writing.
LEFTOVER_AGE = timedelta(hours=24)


# Content and tag of a document. The content is empty where the caller knows it: the present tag is its `known_tag`.
Document: TypeAlias = tuple[bytes, str]


class StoreLocked(OSError):
    """Another process has the store open."""


class StoreUrlError(ValueError):
    """The URL of a store cannot be used; says why."""


class StoreConflict(OSError):
    """The key is not in the state that the write was to replace: somebody else wrote it."""


class KeyExists(StoreConflict):
    """`put_if_absent` found content."""


class KeyChanged(StoreConflict):
    """The content of the key is another one than the tag names, or is gone."""


class Entry(NamedTuple):  # takes a third of the time of a dataclass, and a start makes one for each document
    """What lies directly below a prefix: a key with content, or a further prefix (a directory)."""

    name: str  # last part of the key
    tag: str = ""  # names this state of the content; empty for a prefix
    size_bytes: int = 0
    modified_s: float = 0.0  # wall clock of the storage, seconds since 1970


class Store(Protocol):
    """Content by key. Missing keys raise FileNotFoundError, an unreachable storage another OSError."""

    def get(self, key: str, start: int = 0, size_bytes: int | None = None) -> tuple[bytes, str]:
        """A part of the content, shorter where it ends (None: all from `start` on), and its tag."""

    def head(self, key: str) -> Entry | None:
        """The entry of a key; None if it has no content."""

    def list(self, prefix: str, *, names_only: bool = False) -> list[Entry]:
        """What lies directly below a prefix, sorted by name; nothing if there is none.

        A tag in a list shows that there is content, and no more: lists of Google have no generations, those of Azure
        write an ETag in another way. Conditions take the tags that other methods return. With `names_only` the other
        fields may be those of a prefix: a directory then looks at no file.
        """

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        """Write a key that has no content, and return its tag. Raises KeyExists, also if content appears meanwhile.

        A Path is a local file, which is never in memory as a whole. An object store writes a file above
        `MAX_CONDITIONAL_BYTES` without the condition: only content-addressed chunks are that large.
        """

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        """Replace the content that `tag` names, and return the new tag. Raises KeyChanged."""

    def delete(self, key: str, tag: str | None = None) -> None:
        """Remove the content that `tag` names (raises KeyChanged), or any (None; a missing key is fine).

        Needs no space on a local disk.
        """


class Fence(Protocol):
    """Keeps other control planes away from a storage."""

    # Whether nobody else can write while the fence is held. False: a lease, which a paused process may outlive.
    is_sole: bool

    def lock(self) -> None:
        """Keep other control planes out until `close`. Raises StoreLocked."""

    def close(self) -> None:
        """Give the lock back. No call is under way."""

    def check(self) -> None:
        """Raise OSError unless the lock is held at this moment. Never locked: no check."""


class FencedStore(Store, Protocol):
    """A storage that one control plane has open at a time."""

    @property
    def fence(self) -> Fence:
        """What keeps other control planes away."""


def read_document(store: Store, key: str, known_tag: str) -> Document:
    """A document, without its content if it is in the state that `known_tag` names (empty: none is known)."""
    if known_tag:
        entry = store.head(key)
        if entry is not None and entry.tag == known_tag:
            return b"", known_tag
    return store.get(key)


def delete_below(store: Store, prefix: str) -> None:
    """Remove whatever lies below a prefix."""
    for entry in store.list(prefix):
        key = f"{prefix}/{entry.name}"
        if entry.tag:
            store.delete(key)
        else:
            delete_below(store, key)
    store.delete(prefix)


def replace(store: Store, key: str, content: bytes | Path) -> str:
    """Write a key whatever its content is: for content that is the same whoever writes it."""
    while True:
        entry = store.head(key)
        try:
            if entry is None:
                return store.put_if_absent(key, content)
            return store.replace_if_match(key, content, entry.tag)
        except StoreConflict:
            continue
