"""Names of versions in requests: "{id}", "{id}@{number}", "{id}@{label}". Every RPC parses them here."""

from __future__ import annotations

from typing import NamedTuple

from contract.ids import LABEL_KEY_FORM, MAX_VERSION_NUMBER, is_version_selector
from control_plane.checks import Violations, check_adapter_id, quoted

_PREFIX = "adapters/"


class VersionName(NamedTuple):
    """An adapter, and perhaps one of its versions."""

    adapter_id: str
    selector: str = ""  # number or label of a version; empty: none is named

    @property
    def number(self) -> int | None:
        """The number of the version, if it is named by one. A label begins with a letter."""
        return int(self.selector) if self.selector.isdecimal() else None


def version_name_of(name: str, digest: str, field: str, violations: Violations) -> VersionName:
    """Parse a name with or without "adapters/". `digest`: what the request names beside it, if anything."""
    adapter_id, at, selector = name.removeprefix(_PREFIX).partition("@")
    check_adapter_id(adapter_id, field, violations)
    if not at:
        return VersionName(adapter_id)
    if not is_version_selector(selector):
        violations.add(
            field,
            f"{quoted(selector)} after '@' is not a version's number, from 1 to {MAX_VERSION_NUMBER}, and not a label: "
            f"{LABEL_KEY_FORM}",
        )
    elif digest:
        violations.add(field, f"names version {quoted(selector)}, and a digest names one too; give one of them")
    return VersionName(adapter_id, selector)
