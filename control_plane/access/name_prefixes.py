"""Beginnings of adapter names that the operator reserves for tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contract.ids import is_adapter_id


@dataclass(frozen=True, slots=True)
class NamePrefixes:
    """Which tenant a name is reserved for. Use `reserve`, so that no name is reserved for two tenants."""

    tenant_by_prefix: Mapping[str, str] = field(default_factory=dict)

    def reserved(self, adapter_id: str) -> tuple[str, str] | None:
        """The reserved prefix that the id begins with, and its tenant."""
        for end in range(1, len(adapter_id) + 1):
            prefix = adapter_id[:end]
            if (tenant := self.tenant_by_prefix.get(prefix)) is not None:
                return prefix, tenant
        return None


NO_PREFIXES = NamePrefixes()


def reserve(prefixes_by_tenant: Mapping[str, tuple[str, ...]]) -> NamePrefixes:
    """The reservations of all tenants. Raises ValueError, which names tenant and prefix."""
    reserved: dict[str, str] = {}
    for tenant, prefixes in prefixes_by_tenant.items():
        for prefix in prefixes:
            if not prefix or not is_adapter_id(prefix + "0"):  # whatever an id may go on with
                raise ValueError(f"{tenant}.name_prefixes: {prefix!r} is not the beginning of an adapter id")
            if reserved.setdefault(prefix, tenant) != tenant:
                raise ValueError(f"{tenant}.name_prefixes: {prefix!r} is reserved for {reserved[prefix]} already")
    for prefix, tenant in reserved.items():
        for end in range(1, len(prefix)):
            holder = reserved.get(prefix[:end], tenant)
            if holder != tenant:
                raise ValueError(
                    f"{tenant}.name_prefixes: {prefix!r} begins with {prefix[:end]!r}, which is reserved for {holder}"
                )
    return NamePrefixes(reserved)
