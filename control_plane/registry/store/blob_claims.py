"""Which servers use a blob: a document beside its chunks, changed by compare-and-set. It decides who may delete it.

    {"state": "used", "servers": {"{server}": {"time_s": 1.0}}}       written before a blob is used
    {"state": "deleting", "servers": {}, "time_s": 1.0}               written before anything is deleted

A server that stops using a blob takes itself out, and deletes the blob only if no other server is left in the document.
A server whose last claim is long past at our start counts no more: its records were there when this one read them. On a
storage that only one process can write there is no such document.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from control_plane.errors import StoreUnavailable
from control_plane.registry.store.store import FencedStore, StoreConflict

logger = logging.getLogger(__name__)

CLAIM_S = 600.0  # a record that names a blob is written within this time of the claim, by the server's own clock
# Clocks of two servers differ by less than this minus CLAIM_S; and a request to delete that was sent takes effect, or
# never does, within the half of it.
GRACE_S = 3600.0
_NAME = "claims.json"


class BlobClaims:
    """The claims of this server. `clock` is the wall clock."""

    def __init__(
        self, store: FencedStore, clock: Callable[[], float], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._clock = clock
        self._monotonic = monotonic
        self._server = uuid.uuid4().hex
        self._start_s = clock()
        self._claimed_s: dict[str, float] = {}  # by blob: when it was claimed, monotonic

    def claim(self, blob: str) -> None:
        """Enter this server. Raises StoreUnavailable while another server deletes the blob."""
        if self._store.fence.is_sole:
            return
        while True:
            begin_s = self._monotonic()
            document, tag = self._read(blob)
            if document["state"] == "deleting":
                self._take_over(blob, document, tag)
                continue
            servers = document["servers"] | {self._server: {"time_s": self._clock()}}
            if self._replace(blob, {"state": "used", "servers": servers}, tag):
                self._claimed_s[blob] = begin_s
                return

    def is_valid(self, blob: str) -> bool:
        """Whether this server claimed the blob less than CLAIM_S ago."""
        return self._store.fence.is_sole or self._monotonic() - self._claimed_s.get(blob, float("-inf")) < CLAIM_S

    def seal(self, blob: str) -> bool:
        """Whether this server may delete the blob, which from then on nobody else can claim."""
        if self._store.fence.is_sole:
            return True
        self._claimed_s.pop(blob, None)
        while True:
            document, tag = self._read(blob)
            if document["state"] == "deleting":
                return document.get("by") == self._server or self._is_long_past(document)
            others = {
                server: claim
                for server, claim in document["servers"].items()
                if server != self._server and claim["time_s"] > self._start_s - GRACE_S
            }
            if others:
                logger.info("blob stays, another server may use it blob=%s", blob)
                changed = {"state": "used", "servers": others}
                if others == document["servers"] or self._replace(blob, changed, tag):
                    return False
            elif self._replace(blob, self._deleting(), tag):
                return True

    def remove(self, blob: str) -> None:
        """The blob is deleted: it may be claimed again."""
        if not self._store.fence.is_sole:
            self._store.delete(_key(blob))

    def is_claims(self, name: str) -> bool:
        """Whether a file of a blob is this document."""
        return name == _NAME

    def _take_over(self, blob: str, document: dict[str, Any], tag: str | None) -> None:
        """Finish the deletion of a server that is gone, so that the blob can be claimed."""
        if not self._is_long_past(document):
            raise StoreUnavailable(
                "another server is deleting these weights from the artifact store; register them again later",
                retry_after_s=30.0,
            )
        if self._replace(blob, self._deleting(), tag):
            for entry in self._store.list(blob):
                if entry.name != _NAME:
                    self._store.delete(f"{blob}/{entry.name}")
            self._store.delete(_key(blob))

    def _deleting(self) -> dict[str, Any]:
        return {"state": "deleting", "servers": {}, "by": self._server, "time_s": self._clock()}

    def _is_long_past(self, document: dict[str, Any]) -> bool:
        return bool(document.get("time_s", 0.0) < self._clock() - GRACE_S)

    def _read(self, blob: str) -> tuple[dict[str, Any], str | None]:
        """The document, empty if there is none or none that can be read, and its tag."""
        try:
            content, tag = self._store.get(_key(blob))
        except FileNotFoundError:
            return {"state": "used", "servers": {}}, None
        try:
            document = json.loads(content)
            for claim in document["servers"].values():
                float(claim["time_s"])
            float(document.get("time_s", 0.0))
            return {"state": str(document["state"]), **document}, tag
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            logger.warning("claims of a blob unreadable, counted as of an unknown server blob=%s", blob)
            return {"state": "used", "servers": {"unknown": {"time_s": self._clock()}}}, tag

    def _replace(self, blob: str, document: dict[str, Any], tag: str | None) -> bool:
        # With a mark of this write: two servers never write the same content.
        content = json.dumps(document | {"write": uuid.uuid4().hex}).encode()
        try:
            if tag is None:
                self._store.put_if_absent(_key(blob), content)
            else:
                self._store.replace_if_match(_key(blob), content, tag)
        except StoreConflict:
            return False
        return True


def _key(blob: str) -> str:
    return f"{blob}/{_NAME}"
