"""An object store that one control plane has open: a bucket behind a lease."""

from __future__ import annotations

import logging
from pathlib import Path

from control_plane.registry.store.bucket import Bucket
from control_plane.registry.store.store import Entry, Fence, StoreLocked
from control_plane.registry.store.store_lease import LeaseTaken, LeaseUnsupported, StoreLease

logger = logging.getLogger(__name__)


class LeaseFence:
    """Keeps other control planes away by a lease. A process that is paused beyond its lease may still have one write
    under way: hence the conditional writes."""

    is_sole = False

    def __init__(self, bucket: Bucket, *, is_exclusive: bool = False) -> None:
        """`is_exclusive`: the operator says that no other control plane uses the bucket."""
        self._bucket = bucket
        self._is_exclusive = is_exclusive
        self._lease = StoreLease(bucket, takes_over=is_exclusive)

    def lock(self) -> None:
        """See Fence."""
        try:
            self._lease.acquire()
        except LeaseTaken as error:
            raise StoreLocked(f"the store is in use: {error}; give each control plane its own") from error
        except LeaseUnsupported as error:
            if not self._is_exclusive:
                raise StoreLocked(
                    f"the store ({self._bucket.what}) cannot keep two control planes apart: {error}; if no other one "
                    "uses it, say so with --exclusive-store"
                ) from error
            logger.warning("store without a lease, because the operator says that nobody else uses it error=%s", error)

    def close(self) -> None:
        """See Fence."""
        self._lease.release()

    def check(self) -> None:
        """See Fence."""
        self._lease.check()


class ObjectStore:
    """See store.FencedStore. Every change is made between two looks at the fence."""

    def __init__(self, bucket: Bucket, *, fence: Fence | None = None, is_exclusive: bool = False) -> None:
        self.bucket = bucket
        self._fence = fence or LeaseFence(bucket, is_exclusive=is_exclusive)

    @property
    def fence(self) -> Fence:
        """See FencedStore."""
        return self._fence

    def get(self, key: str, start: int = 0, size_bytes: int | None = None) -> tuple[bytes, str]:
        """See Store."""
        return self.bucket.get(key, start, size_bytes)

    def head(self, key: str) -> Entry | None:
        """See Store."""
        return self.bucket.head(key)

    def list(self, prefix: str, *, names_only: bool = False) -> list[Entry]:
        """See Store."""
        return self.bucket.list(prefix, names_only=names_only)

    def put_if_absent(self, key: str, content: bytes | Path) -> str:
        """See Store."""
        self._fence.check()
        tag = self.bucket.put_if_absent(key, content)
        self._fence.check()  # lost meanwhile, another control plane may have undone it: that is not a success
        return tag

    def replace_if_match(self, key: str, content: bytes | Path, tag: str) -> str:
        """See Store."""
        self._fence.check()
        new_tag = self.bucket.replace_if_match(key, content, tag)
        self._fence.check()
        return new_tag

    def delete(self, key: str, tag: str | None = None) -> None:
        """See Store."""
        self._fence.check()
        self.bucket.delete(key, tag)
        self._fence.check()
