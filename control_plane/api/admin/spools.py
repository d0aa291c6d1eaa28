"""The files of uploads as far as they have come, and for how long those of a broken call stay.

Owns which call has which spool. Knows nothing of streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from motet.v1 import adapters_pb2

from control_plane.checks import refuse
from control_plane.directory_lock import PRIVATE
from control_plane.errors import UploadNotFound

KEPT_S = 900.0  # seconds for which the files of a broken upload stay
MAX_KEPT_PER_TENANT = 16  # broken uploads
MAX_KEPT = 64  # broken uploads of all tenants
# Kept bytes of all tenants, as a multiple of what one tenant may have.
_TENANTS_BYTES = 4


@dataclass(frozen=True, slots=True)
class UploadKey:
    """Whose upload it is. Another tenant or principal with the same id has another upload."""

    tenant: str
    principal: str
    upload_id: str


@dataclass(slots=True)
class Received:
    """What came of one file. The digest is that of exactly these bytes, and all of them are in the file."""

    num_bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class Spool:
    """The files of one upload."""

    def __init__(self, directory: Path, files: list[adapters_pb2.UploadFile]) -> None:
        self.directory = directory
        self.files = files
        self.received = [Received() for _ in files]
        self.is_ended = False  # whether no further call may continue it
        self.expires_s = 0.0  # while it is kept

    @property
    def num_bytes(self) -> int:
        """What came of all files."""
        return sum(received.num_bytes for received in self.received)

    def remove(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(slots=True)
class _Running:
    spool: Spool | None
    interrupt: Callable[[], None]
    ended: asyncio.Event


class Spools:
    """The spools of one server. `clock`: seconds. Used from one event loop."""

    def __init__(self, directory: Path, *, clock: Callable[[], float], max_tenant_bytes: int) -> None:
        """`max_tenant_bytes`: bytes of broken uploads that are kept for one tenant."""
        self._directory = directory
        self._clock = clock
        self._max_tenant_bytes = max_tenant_bytes
        self._running: dict[UploadKey, _Running] = {}
        self._kept: OrderedDict[UploadKey, Spool] = OrderedDict()  # Invariant: in order of expiry
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        """Calls with an upload_id that hold a spool."""
        return len(self._running)

    def received_bytes(self, key: UploadKey) -> list[int]:
        """What came of each file of a broken or running upload. Raises UploadNotFound."""
        self._expire()
        running = self._running.get(key)
        spool = self._kept.get(key) if running is None else running.spool
        if spool is None or not key.upload_id:
            raise UploadNotFound(
                f"no upload {key.upload_id!r} of yours can be continued: it ended, its time ran out, or the server was "
                "started again; send it from the beginning"
            )
        return [received.num_bytes for received in spool.received]

    @contextlib.asynccontextmanager
    async def held(
        self, key: UploadKey, files: list[adapters_pb2.UploadFile], interrupt: Callable[[], None]
    ) -> AsyncIterator[Spool]:
        """The spool of one call while the block runs: that of the broken call before it, or an empty one.

        Another call with the same key makes `interrupt` be called and waits for the end of the block. Raises
        InvalidRequest if the broken call had other files.
        """
        if not key.upload_id:
            spool = self._new(files)
            try:
                yield spool
            finally:
                spool.remove()
            return
        while (other := self._running.get(key)) is not None:
            other.interrupt()
            await other.ended.wait()
        running = self._running[key] = _Running(None, interrupt, asyncio.Event())
        try:
            spool = running.spool = self._taken(key, files)
            try:
                yield spool
            finally:
                self._put_back(key, spool)
        finally:
            del self._running[key]
            running.ended.set()

    def remove_oldest(self) -> bool:
        """Make room on the disk. Returns whether there was anything to remove."""
        if not self._kept:
            return False
        self._kept.popitem(last=False)[1].remove()
        return True

    def _new(self, files: list[adapters_pb2.UploadFile]) -> Spool:
        self._directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        return Spool(Path(tempfile.mkdtemp(dir=self._directory, prefix="upload-")), files)

    def _taken(self, key: UploadKey, files: list[adapters_pb2.UploadFile]) -> Spool:
        self._expire()
        spool = self._kept.get(key)
        if spool is None:
            return self._new(files)
        if spool.files != files:
            raise refuse(
                "header.files",
                "are not those that the broken call with this header.upload_id announced; use a new id for other files",
            )
        return self._kept.pop(key)

    def _put_back(self, key: UploadKey, spool: Spool) -> None:
        """Keep the spool for a further call, in the place of the tenant's oldest ones, or remove it."""
        if spool.is_ended or not spool.num_bytes or spool.num_bytes > self._max_tenant_bytes:
            spool.remove()
            return
        self._expire()
        same = [other for other in self._kept if other.tenant == key.tenant]
        while same and (
            len(same) >= MAX_KEPT_PER_TENANT or self._kept_bytes(same) + spool.num_bytes > self._max_tenant_bytes
        ):
            self._kept.pop(same.pop(0)).remove()
        all_bytes = self._kept_bytes(list(self._kept)) + spool.num_bytes
        if len(self._kept) >= MAX_KEPT or all_bytes > _TENANTS_BYTES * self._max_tenant_bytes:
            spool.remove()
            return
        spool.expires_s = self._clock() + KEPT_S
        self._kept[key] = spool
        self._set_timer()

    def _kept_bytes(self, keys: list[UploadKey]) -> int:
        return sum(self._kept[key].num_bytes for key in keys)

    def _expire(self) -> None:
        now_s = self._clock()
        while self._kept and next(iter(self._kept.values())).expires_s <= now_s:
            self.remove_oldest()

    def _set_timer(self) -> None:
        if self._timer is None:
            oldest = next(iter(self._kept.values()))
            delay_s = max(oldest.expires_s - self._clock(), 1.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()
        if self._kept:
            self._set_timer()
