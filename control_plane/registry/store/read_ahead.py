"""Reads of a start, most of them made ahead by a second process while this one parses what came before.

Reading 300,000 small files takes as long as parsing them, and threads would take turns at the interpreter. The process
gives what it read, or nothing: then the store itself is read, which also raises what is wrong. So a process that dies
costs time only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, TypeAlias

from control_plane.child_process import ChildProcess, module_command
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.keys import manifest_key, record_key, version_key
from control_plane.registry.store.read_ahead_child import Found, Look, read_frame, write_frame
from control_plane.registry.store.store import Document

logger = logging.getLogger(__name__)

# Of a record its id, of a version id and digest, of a blob nothing and the digest.
_Name: TypeAlias = str | tuple[str, str]
_PIPE_BYTES = 1 << 20  # so far the process is ahead, beside the frame that it makes


class ReadAhead:
    """Documents of one store. From `begin` on one call is made at a time, each may be in another thread."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._child: ChildProcess | None = None
        self._requests: BinaryIO | None = None
        self._results: BinaryIO | None = None
        # Invariant: no key is in both. Results come in the order of the requests.
        self._due: deque[_Name] = deque()
        self._found: dict[_Name, Found] = {}

    @property
    def is_ahead(self) -> bool:
        """Whether the process runs, as far as is known."""
        return self._child is not None

    def begin(self, directory: Path) -> None:
        """Start the process on the store's directory; call this inside a running event loop."""
        command, environment = module_command("control_plane.registry.store.read_ahead_child", str(directory))
        requests, results = os.pipe(), os.pipe()
        self._requests, self._results = open(requests[1], "wb"), open(results[0], "rb")  # noqa: PTH123, SIM115
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # more than this user may have: the process is less far ahead
                fcntl.fcntl(results[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            self._child = ChildProcess(command, stdin=requests[0], stdout=results[1], environment=environment)
        except OSError as error:
            logger.warning("no process reads the store ahead, this one does: %s", error)
            self.close()
        finally:
            os.close(requests[0])
            os.close(results[1])

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        self._due.clear()
        for file in (self._requests, self._results):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._requests = self._results = None

    def expect_records(self, known_tags: Iterable[tuple[str, str]]) -> None:
        """Records that are read next, in this order: ids, with the tags under which they are known."""
        self._expect([(adapter_id, (record_key(adapter_id), tag)) for adapter_id, tag in known_tags])

    def expect_versions(self, known_tags: Iterable[tuple[tuple[str, str], str]], blobs: Iterable[str]) -> None:
        """Versions, as `expect_records`, that are read next, and blobs that are looked at after them.

        The looks at blobs lie between the versions, so that both processes work until the end.
        """
        versions = [(name, (version_key(*name), tag)) for name, tag in known_tags]
        manifests = [(("", digest), (manifest_key(digest), None)) for digest in blobs]
        self._expect([look for pair in zip_longest(versions, manifests) for look in pair if look is not None])

    def read_record(self, adapter_id: str, known_tag: str) -> Document:
        """See ArtifactStore."""
        return self._take(adapter_id) or self._store.read_record(adapter_id, known_tag)

    def read_version(self, adapter_id: str, digest: str, known_tag: str) -> Document:
        """See ArtifactStore."""
        return self._take((adapter_id, digest)) or self._store.read_version(adapter_id, digest, known_tag)

    def has_blob(self, digest: str) -> bool:
        """See ArtifactStore."""
        return self._take(("", digest)) is not None or self._store.has_blob(digest)

    def _expect(self, looks: Sequence[tuple[_Name, Look]]) -> None:
        while self._due:  # else both processes could wait for each other to read
            self._receive()
        self._found.clear()
        if self._requests is None:
            return
        self._due.extend([name for name, _ in looks])
        try:
            write_frame(self._requests, [look for _, look in looks])
        except OSError:
            self._lost()

    def _take(self, name: _Name) -> Document | None:
        """A result, empty for a blob; None where the store itself has to be read."""
        while self._due and name not in self._found:
            self._receive()
        match self._found.pop(name, None):
            case (beginning, end, tag):
                return beginning + end, tag
            case True:
                return b"", ""
            case _:
                return None

    def _receive(self) -> None:
        results = read_frame(self._results) if self._results is not None else None
        if results is None:
            self._lost()
            return
        for result in results:
            self._found[self._due.popleft()] = result

    def _lost(self) -> None:
        logger.warning("the process that reads the store ahead has ended, this one reads the rest")
        self.close()
