"""Which version's tokenizer additions, chat template and generation defaults a pushed version keeps.

A push brings weights. It keeps what the version that it replaces has beside them, unless its header says otherwise.
"""

from __future__ import annotations

from contract.ids import DIGEST_FORM, LABEL_KEY_FORM, is_digest, is_version_selector
from control_plane.checks import Violations, quoted, refuse
from control_plane.errors import AdapterNotFound
from control_plane.registry.catalog import selected_version
from control_plane.registry.companions.inherited import CLEARING_FIELD, FIELD, WAY_ON
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.records import AdapterRecord, AdapterVersion
from control_plane.registry.versions.record_changes import version_of


def check_files_from(named: str, *, is_cleared: bool, violations: Violations) -> None:
    """Whether a digest, a number or a label is named, or nothing."""
    if named and is_cleared:
        violations.add(CLEARING_FIELD, f"is set, and {FIELD} names version {quoted(named)}; give one of them")
    elif named and not (is_digest(named) or is_version_selector(named)):
        violations.add(
            FIELD,
            f"{quoted(named)} does not name a version: give its number, from 1, its label ({LABEL_KEY_FORM}), or its "
            f"digest ({DIGEST_FORM})",
        )


def source_version(
    record: AdapterRecord | None, adapter_id: str, named: str, base_model: BaseModel
) -> AdapterVersion | None:
    """The version whose files a push keeps: the named one, else the active one, else the newest. None if it has none.

    Raises AdapterNotFound and InvalidRequest.
    """
    if record is None or not record.versions:
        if named:
            raise AdapterNotFound(
                f"{FIELD}: adapter {adapter_id!r} has no version {quoted(named)}, and no other; leave it empty",
                resource=f"adapters/{adapter_id}",
            )
        return None
    if named:
        version = version_of(record, named) if is_digest(named) else selected_version(record, named)
    else:
        version = record.version(record.active_digest) or record.versions[0]
    if not version.files:
        return None
    if version.base_fingerprint != base_model.fingerprint:
        raise refuse(FIELD, f"is version {version.digest}, whose files were made for another base checkpoint; {WAY_ON}")
    return version
