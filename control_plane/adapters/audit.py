"""The audit log: one line for each change of an adapter that a caller made, or tried to make."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from contract.process_log import AUDIT_LOGGER
from control_plane.caller import current_caller
from control_plane.errors import MotetError

audit = logging.getLogger(AUDIT_LOGGER)


@dataclass(slots=True)
class AuditEntry:
    """What the line will say. The block may fill in what it learns on the way."""

    verb: str
    adapter_id: str = ""
    digest: str = ""


@contextlib.contextmanager
def audited(verb: str, adapter_id: str = "", digest: str = "") -> Iterator[AuditEntry]:
    """Write one line when the block ends: who changed which adapter, and the result."""
    caller = current_caller()
    entry = AuditEntry(verb, adapter_id, digest)
    result = "ok"
    try:
        yield entry
    except BaseException as error:
        result = error.reason if isinstance(error, MotetError) else type(error).__name__
        raise
    finally:
        audit.info(
            "verb=%s adapter_id=%s digest=%s tenant=%s principal=%s peer=%s result=%s",
            entry.verb,
            entry.adapter_id,
            entry.digest,
            caller.tenant,
            caller.principal.name,
            caller.peer,
            result,
        )
