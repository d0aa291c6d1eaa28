"""The storage for a path or a URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.store import FencedStore, StoreUrlError


def open_store(place: str, *, is_exclusive: bool = False) -> FencedStore:
    """The storage at a directory, or at an s3://, gs://, az://, memory:// or file:// URL. Raises StoreUrlError.

    `is_exclusive`: the operator says that no other control plane uses a remote one.
    """
    if place.startswith("file://"):
        return DirectoryStore(Path(unquote(urlsplit(place).path)))
    if "://" not in place:
        return DirectoryStore(Path(place))
    try:
        # Imported here: a server with a directory needs no client of object stores.
        from control_plane.registry.store.bucket import open_bucket
        from control_plane.registry.store.object_store import ObjectStore
    except ImportError as error:
        raise StoreUrlError(
            f"{place.partition('://')[0]}:// needs the Python package obstore, which is not installed ({error}); "
            "install it where the control plane runs"
        ) from error
    return ObjectStore(open_bucket(place), is_exclusive=is_exclusive)
