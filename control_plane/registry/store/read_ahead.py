"""Reads and parses the documents of many names for a start in processes of their own, which share the names.

One process takes several seconds for 300,000 small files, and threads would take turns at the interpreter. The
processes give what they found and say nothing about the rest: the server reads that itself, which also raises what is
wrong. So a process that dies costs time only.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from control_plane.child_process import ChildProcess, module_command
from control_plane.registry.records import AdapterVersion
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store.read_ahead_child import Frame, read_frame, write_frame
from control_plane.registry.store.record_documents import StoredRecord

logger = logging.getLogger(__name__)

MAX_PROCESSES = 3  # this one makes objects of what so many find
_PIPE_BYTES = 1 << 20  # so far each process is ahead, beside the frame that it makes


@dataclass
class Found:
    """What processes found."""

    records: dict[str, StoredRecord] = field(default_factory=dict)
    versions: dict[tuple[str, str], AdapterVersion] = field(default_factory=dict)  # by id and digest
    blobs: set[str] = field(default_factory=set)  # digests of complete ones

    def add(self, frame: Frame, known: KnownDocuments) -> None:
        """Add what is in a frame."""
        for record in frame.records:
            self.records[record[0]] = known.read_record(record)
        for adapter_id in frame.same_records:
            self.records[adapter_id] = known.record(adapter_id)
        lists = known.shared_lists(frame.lists)
        for version in frame.versions:
            self.versions[version[0], version[1]] = known.read_version(version, lists[version[3]])
        for name in frame.same_versions:
            self.versions[name] = known.version(name)
        self.blobs.update(frame.blobs)


@dataclass(eq=False)
class _Reader:
    """One process."""

    child: ChildProcess
    requests: BinaryIO
    results: BinaryIO
    num_due: int = 0  # names that it said nothing about yet

    def close(self) -> None:
        self.child.kill()
        for file in (self.requests, self.results):
            with contextlib.suppress(OSError):
                file.close()


class ReadAhead:
    """The processes. Calls are made one at a time, each may be in another thread."""

    def __init__(self) -> None:
        self._readers: list[_Reader] = []

    def start(self, directory: Path, count: int) -> None:
        """Start so many processes on a store's directory; call this inside a running event loop."""
        command, environment = module_command("control_plane.registry.store.read_ahead_child", str(directory))
        try:
            for _ in range(count):
                self._readers.append(_started(command, environment))
        except OSError as error:
            logger.warning("no process reads the store ahead, this one does: %s", error)
            self.close()

    def request(self, known: KnownDocuments, names: Sequence[str]) -> None:
        """Give each process its share of the names."""
        for place, reader in enumerate(list(self._readers)):
            share = names[place :: len(self._readers)]
            reader.num_due = len(share)
            try:
                write_frame(reader.requests, [known.tags(name) for name in share])
            except OSError:
                self._lost()
                return

    def take(self, found: Found, known: KnownDocuments) -> bool:
        """Add the next frame of a process to `found`. False: nothing more comes."""
        due = {reader.results.fileno(): reader for reader in self._readers if reader.num_due}
        if not due:
            return False
        ready = select.poll()
        for descriptor in due:
            ready.register(descriptor, select.POLLIN)
        reader = due[ready.poll()[0][0]]
        values = read_frame(reader.results)
        if values is None:
            self._lost()
            return False
        frame = Frame(*values)
        found.add(frame, known)
        reader.num_due -= frame.num_names[0]
        return True

    def close(self) -> None:
        """End the processes."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def _lost(self) -> None:
        logger.warning("a process that reads the store ahead has ended, this one reads the rest")
        self.close()


def _started(command: list[str], environment: dict[str, str]) -> _Reader:
    requests, results = os.pipe(), os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # more than this user may have: the process is less far ahead
            fcntl.fcntl(results[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    ours = open(requests[1], "wb"), open(results[0], "rb", buffering=0)  # noqa: PTH123, SIM115
    try:
        return _Reader(ChildProcess(command, stdin=requests[0], stdout=results[1], environment=environment), *ours)
    except OSError:
        for file in ours:
            file.close()
        raise
    finally:
        os.close(requests[0])
        os.close(results[1])
