"""LoRA tasks: adapters that clients send with a request and later name by a number alone. They live in memory only.

Owns which tasks are cached, within a budget in bytes; the least recently used one makes room. Weights that a request
uses stay until the request ends. In front of the artifact store it is one more place that packed bytes are read from.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from control_plane.checks import refuse
from control_plane.errors import Exhausted, LoraTaskTaken
from control_plane.host_cache.fresh_blobs import BlobStore

FLAGS = "--task-cache-bytes, --task-cache-memory-share"


@dataclass(frozen=True, slots=True)
class TaskKey:
    """One task. The ids of one tenant mean nothing to another one."""

    tenant: str
    task_id: int


@dataclass(frozen=True, slots=True)
class TaskBlob:
    """A packed adapter in memory."""

    digest: str
    manifest: bytes
    chunks: Sequence[bytes]

    @property
    def size_bytes(self) -> int:
        return len(self.manifest) + sum(map(len, self.chunks))


class TaskCache:
    """Changed by the event loop; `read_manifest` and `read_range` are for threads, too."""

    def __init__(self, store: BlobStore, *, budget_bytes: int) -> None:
        """`store` has what is no task's. A budget of 0 turns tasks off."""
        self.budget_bytes = budget_bytes
        # Called with a digest that no task has any more.
        self.on_forgotten: Callable[[str], None] = lambda _digest: None
        self._store = store
        self._digests: dict[TaskKey, str] = {}  # least recently used first
        self._num_tasks_by_digest = Counter[str]()
        self._num_leases_by_digest = Counter[str]()
        # Invariants: a blob is here as long as a task or a lease has its digest; used_bytes is the sum of their sizes.
        self._blobs: dict[str, TaskBlob] = {}
        self.used_bytes = 0

    def digest_of(self, key: TaskKey) -> str | None:
        """The digest of a task's weights, which counts as a use; None: it is not cached."""
        digest = self._digests.pop(key, None)
        if digest is not None:
            self._digests[key] = digest
        return digest

    def has_digest(self, digest: str) -> bool:
        """Whether a task, or a request that runs, has these weights."""
        return digest in self._blobs

    def check_fits(self, size_bytes: int) -> None:
        """Raise InvalidRequest if so many bytes do not fit the empty cache."""
        if size_bytes > self.budget_bytes:
            raise refuse(
                "header.files",
                f"{size_bytes} bytes when packed; the server caches at most {self.budget_bytes} bytes of LoRA tasks "
                f"({FLAGS}): register it as an adapter, or raise the limit",
            )

    def add(self, key: TaskKey, blob: TaskBlob) -> None:
        """Cache a task; other tasks make room. The weights that the task has already are fine.

        Raises LoraTaskTaken where it has others, InvalidRequest where the cache is too small, and Exhausted where
        running requests hold too much of it.
        """
        known = self.digest_of(key)
        if known == blob.digest:
            return
        if known is not None:
            raise LoraTaskTaken(
                f"LoRA task {key.task_id} is cached with other weights, of digest {known}; use another id for these"
            )
        self.check_fits(blob.size_bytes)
        if blob.digest not in self._blobs:
            self._make_room(blob.size_bytes)
            self._blobs[blob.digest] = blob
            self.used_bytes += blob.size_bytes
        self._digests[key] = blob.digest
        self._num_tasks_by_digest[blob.digest] += 1

    @contextlib.contextmanager
    def lease(self, digest: str) -> Iterator[None]:
        """Keep weights that are here until the block ends, whatever happens to their tasks."""
        assert digest in self._blobs, "only weights that are cached can be kept"
        self._num_leases_by_digest[digest] += 1
        try:
            yield
        finally:
            self._num_leases_by_digest[digest] -= 1
            self._forget_unused(digest)

    def read_manifest(self, digest: str) -> bytes:
        """See BlobStore."""
        blob = self._blobs.get(digest)
        return self._store.read_manifest(digest) if blob is None else blob.manifest

    def read_range(self, digest: str, index: int, start: int, size_bytes: int) -> bytes:
        """See BlobStore."""
        blob = self._blobs.get(digest)
        if blob is None:
            return self._store.read_range(digest, index, start, size_bytes)
        return blob.chunks[index][start : start + size_bytes]

    def _make_room(self, size_bytes: int) -> None:
        """Forget tasks until so many bytes are free; none where that does not suffice. Raises Exhausted."""
        leased_bytes = sum(self._blobs[digest].size_bytes for digest, num in self._num_leases_by_digest.items() if num)
        if leased_bytes + size_bytes > self.budget_bytes:
            raise Exhausted(
                f"running requests leave less than {size_bytes} of the {self.budget_bytes} bytes for LoRA tasks "
                f"({FLAGS}); send it again when some have ended"
            )
        for key in list(self._digests):
            if self.used_bytes + size_bytes <= self.budget_bytes:
                return
            digest = self._digests[key]
            if not self._num_leases_by_digest[digest]:
                del self._digests[key]
                self._num_tasks_by_digest[digest] -= 1
                self._forget_unused(digest)

    def _forget_unused(self, digest: str) -> None:
        if self._num_tasks_by_digest[digest] or self._num_leases_by_digest[digest]:
            return
        del self._num_tasks_by_digest[digest], self._num_leases_by_digest[digest]
        self.used_bytes -= self._blobs.pop(digest).size_bytes
        self.on_forgotten(digest)
