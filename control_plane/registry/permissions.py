"""Refuses what a caller may not do with a name. `access.visibility` decides, this says it in errors."""

from __future__ import annotations

from control_plane.access.name_prefixes import NamePrefixes
from control_plane.access.visibility import may_change, may_give_to, may_see
from control_plane.caller import Caller
from control_plane.errors import AdapterNameTaken, PermissionDenied
from control_plane.registry.records import AdapterRecord


def is_visible(record: AdapterRecord, caller: Caller) -> bool:
    """Whether the adapter exists for the caller."""
    return may_see(caller.principal, caller.tenant, record.ownership, record.adapter_id)


def require_change(record: AdapterRecord, caller: Caller) -> None:
    """Raise PermissionDenied unless the caller, who sees the adapter, may change it."""
    if not may_change(caller.principal, caller.tenant, record.ownership, record.adapter_id):
        raise PermissionDenied(
            f"adapter {record.adapter_id!r} belongs to another tenant: tenant {caller.tenant!r} may use it and not "
            "change it; register your own under another name"
        )


def require_registration(adapter_id: str, record: AdapterRecord | None, caller: Caller, prefixes: NamePrefixes) -> None:
    """Raise PermissionDenied or AdapterNameTaken unless the caller may register under this name.

    `record` is what has the name at present, if anything has.
    """
    principal = caller.principal
    if not principal.may_use(adapter_id):
        raise PermissionDenied(f"this credential may not use adapter {adapter_id!r}; use one that lists the adapter")
    if record is not None and may_change(principal, caller.tenant, record.ownership, adapter_id):
        return
    # Before the record is looked at: the refusal of a reserved name does not say whether the name is taken.
    if (found := prefixes.reserved(adapter_id)) is not None and not principal.is_admin:
        prefix, tenant = found
        if tenant != caller.tenant:
            raise PermissionDenied(
                f"adapter_id: names that begin with {prefix!r} are reserved for another tenant; use another name"
            )
    if record is not None:
        if is_visible(record, caller):
            require_change(record, caller)
        raise AdapterNameTaken(f"adapter_id: the name {adapter_id!r} is taken; use another name")


def require_same_owner(record: AdapterRecord, owner: str | None) -> None:
    """Raise AdapterNameTaken if a registration names another owner than the tenant that has the name.

    The versions of one tenant would become those of another by a slip in a name.
    """
    present = record.ownership.owner
    if owner is not None and present and owner != present:
        raise AdapterNameTaken(
            f"adapter_id: the name {record.adapter_id!r} is taken by tenant {present!r}; use another name, or change "
            "the owner first (UpdateAdapter, `motet adapters update NAME --owner TENANT`)"
        )


def require_owner(owner: str | None, caller: Caller, field: str) -> None:
    """Raise PermissionDenied unless the caller may make this tenant the owner; None: no other than at present."""
    if owner is not None and not may_give_to(caller.principal, caller.tenant, owner):
        raise PermissionDenied(f"{field}: only an admin may name another tenant than {caller.tenant!r} as the owner")
