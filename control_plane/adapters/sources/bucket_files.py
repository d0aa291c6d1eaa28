"""Reads adapters from a bucket of an object store. Blocks: call it in a thread.

Every part names the ETag that was listed, so that a file is never put together from two states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from control_plane.adapters.sources.locations import RemoteRoot
from control_plane.adapters.sources.remote_adapter import Changed, RemoteFile, TryLater, adapter_names
from control_plane.registry.adapter_files import ALL_NAMES
from control_plane.registry.store.bucket import Bucket
from control_plane.registry.store.store import KeyChanged
from control_plane.signatures.verifier import SIGNATURE_FILE

PART_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BucketAdapter:
    """An adapter below a prefix of a bucket. See RemoteAdapter."""

    bucket: Bucket
    url: str  # of the root
    prefix: str
    source: str
    files: tuple[RemoteFile, ...]

    @property
    def identity(self) -> str:
        """A text that is equal for equal bytes."""
        return " ".join((self.url, self.prefix, *(file.tag for file in self.files)))

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """See RemoteAdapter."""
        while start < file.size_bytes:
            try:
                part = self.bucket.get_part(
                    f"{self.prefix}/{file.name}", start, min(PART_BYTES, file.size_bytes - start), file.tag
                )
            except (FileNotFoundError, KeyChanged):
                raise Changed(f"{file.name} was replaced") from None
            except OSError as error:
                raise TryLater(f"the bucket does not respond ({error.__class__.__name__})") from None
            if not part:
                return
            start += len(part)
            yield part

    def error(self, file: RemoteFile, content: Iterator[bytes]) -> str:  # noqa: ARG002
        """Nothing: a bucket names no hash of the content; lengths are compared, and TLS protects the bytes."""
        return ""

    def check_unchanged(self) -> None:
        """See RemoteAdapter: the files must be of one moment."""
        for file in self.files:
            entry = _head(self.bucket, f"{self.prefix}/{file.name}")
            if entry is None or entry.tag != file.tag:
                raise Changed(f"{file.name} was replaced")


def find(bucket: Bucket, root: RemoteRoot, source: str) -> BucketAdapter:
    """The adapter that the text names, as it is at present."""
    parts, _ = root.place(source)
    prefix = "/".join(parts)
    listed = {}
    for name in (*ALL_NAMES, SIGNATURE_FILE):
        entry = _head(bucket, f"{prefix}/{name}")
        if entry is not None:
            listed[name] = entry
    names = adapter_names(source, {name: file.size_bytes for name, file in listed.items()})
    return BucketAdapter(bucket, root.url, prefix, source, tuple(listed[name] for name in names))


def _head(bucket: Bucket, key: str) -> RemoteFile | None:
    try:
        entry = bucket.head(key)
    except OSError as error:
        raise TryLater(
            f"the bucket does not respond, or refuses the server's credentials ({type(error).__name__})"
        ) from None
    return None if entry is None else RemoteFile(key.rpartition("/")[2], entry.size_bytes, entry.tag)
