"""Who may see an adapter, and who may change it: the one place that decides.

Pure functions of the caller (principal and tenant) and of the adapter (id and ownership). What a caller may not see
does not exist for it. A caller that sees an adapter may use it; only its owner, and an admin, may change it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from control_plane.access.principal import THE_SERVER, Principal


class Visibility(enum.Enum):
    """Who sees an adapter beside its owner. Stored by value."""

    PRIVATE = "private"  # nobody
    SHARED = "shared"  # the tenants of `shared_with`
    PUBLIC = "public"  # every tenant


@dataclass(frozen=True, slots=True)
class Ownership:
    """Whose an adapter is, and who else sees it. Whoever is an admin sees it in any case."""

    # Invariant: `shared_with` names tenants if and only if the adapter is SHARED.
    owner: str = ""  # tenant; empty: no tenant's
    visibility: Visibility = Visibility.PRIVATE
    shared_with: tuple[str, ...] = ()

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that see it by name. A PUBLIC adapter is seen by all others, too."""
        return frozenset(filter(None, (self.owner, *self.shared_with)))

    @property
    def is_public(self) -> bool:
        return self.visibility is Visibility.PUBLIC


NOBODYS = Ownership()


def may_see(principal: Principal, tenant: str, ownership: Ownership, adapter_id: str) -> bool:
    """Whether the adapter exists for a call of this principal that counts for this tenant."""
    if not principal.may_use(adapter_id):
        return False
    return principal.is_admin or ownership.is_public or tenant in ownership.tenants


def may_change(principal: Principal, tenant: str, ownership: Ownership, adapter_id: str) -> bool:
    """Whether such a call may change the adapter. It sees the adapter then."""
    if not principal.may_use(adapter_id):
        return False
    return principal.is_admin or (bool(ownership.owner) and tenant == ownership.owner)


def may_give_to(principal: Principal, tenant: str, owner: str) -> bool:
    """Whether such a call may make `owner` the owner of an adapter that it may change."""
    return principal.is_admin or owner == tenant


def owner_of_new(principal: Principal, tenant: str, reserved_for: str = "") -> str:
    """The owner of an adapter that such a call registers without naming one.

    A server without users knows no owners, and what the server registers by itself is no tenant's. `reserved_for` is
    the tenant that the name is reserved for, if any: an admin registers it for that tenant. Nobody else can have it.
    """
    if not principal.is_authenticated or principal == THE_SERVER:
        return ""
    return reserved_for if principal.is_admin and reserved_for else tenant
