"""Changes of an adapter's ownership, as callers request them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.access.tenant_names import TENANT_FORM, is_tenant
from control_plane.access.visibility import Ownership, Visibility
from control_plane.checks import Violations, quoted, refuse

MAX_SHARED_WITH = 256


@dataclass(frozen=True, slots=True)
class OwnershipChange:
    """None leaves a field as it is."""

    owner: str | None = None  # tenant; empty: no tenant's
    visibility: Visibility | None = None
    shared_with: tuple[str, ...] | None = None  # with visibility SHARED only

    def applied_to(self, ownership: Ownership) -> Ownership:
        """The ownership after the change. Leaving SHARED empties `shared_with`. Raises InvalidRequest."""
        owner = ownership.owner if self.owner is None else self.owner
        visibility = ownership.visibility if self.visibility is None else self.visibility
        if visibility is not Visibility.SHARED:
            if self.shared_with:
                raise refuse(
                    "shared_with",
                    f"names tenants, and the adapter would be {visibility.value}; set visibility to shared too",
                )
            return Ownership(owner, visibility)
        shared_with = ownership.shared_with if self.shared_with is None else self.shared_with
        if not shared_with:
            raise refuse(
                "shared_with", "is empty with visibility shared; name at least one tenant, or set visibility to private"
            )
        return Ownership(owner, visibility, shared_with)


NO_CHANGE = OwnershipChange()


def check_owner(owner: str, field: str, violations: Violations) -> None:
    """An owner is a tenant, or empty."""
    if owner and not is_tenant(owner):
        violations.add(field, f"{quoted(owner)} is not a valid tenant: {TENANT_FORM}")


def check_shared_with(tenants: Sequence[str], field: str, violations: Violations) -> None:
    """Tenants, each once."""
    if len(tenants) > MAX_SHARED_WITH:
        violations.add(field, f"has {len(tenants)} tenants; use at most {MAX_SHARED_WITH}, or visibility public")
        return
    for index, tenant in enumerate(tenants):
        if not is_tenant(tenant):
            violations.add(f"{field}[{index}]", f"{quoted(tenant)} is not a valid tenant: {TENANT_FORM}")
    if len(set(tenants)) < len(tenants):
        violations.add(field, "names a tenant twice; name each once")
