"""What an operator grants tenants: the JSON object in the file that --tenants names.

The object maps tenants to entries. The entry "default" is for every tenant without an entry. A field left out of an
entry means no limit, or weight 1. The field "name_prefixes" lists beginnings of adapter names that are reserved for the
tenant. The file is read once, at the start.

Use is charged to accounts. A tenant with an entry has an account of its own, and so has every tenant of an
authenticated caller, whose credential fixes the name. Other clients can invent names as they like, so those have no
accounts: requests of a host under such names, or without a name, are charged to the host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from control_plane.access.name_prefixes import NO_PREFIXES, NamePrefixes, reserve
from control_plane.access.tenant_names import TENANT_FORM, is_tenant

DEFAULT_ENTRY = "default"
PREFIXES_FIELD = "name_prefixes"
MAX_FILE_BYTES = 16 << 20


class InvalidTenants(ValueError):
    """The file is not valid. The message names the tenant, the field, the value and the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may use."""

    weight: float = 1.0  # share of service against the other tenants' weights, while several wait
    max_running_requests: int | None = None  # accepted and not ended, those that wait included, a count
    max_queued_tokens: int | None = None  # prompt tokens of its requests that have no generated token yet, a count
    tokens_per_minute: int | None = None  # prompt and generated tokens; as many may be saved up, a count
    requests_per_minute: int | None = None  # accepted requests; as many may be saved up, a count
    max_pinned_bytes: int | None = None  # packed size of its adapters that are pinned


@dataclass(frozen=True, slots=True)
class TenantTable:
    """Limits of every tenant."""

    named: dict[str, TenantLimits] = field(default_factory=dict)
    default: TenantLimits = TenantLimits()
    trusts_names: bool = False  # clients cannot invent names: every tenant has an account
    name_prefixes: NamePrefixes = NO_PREFIXES  # of adapter names

    def account_of(self, tenant: str, host: str, *, is_authenticated: bool = False) -> str:
        """The account that is charged for a request that a host sends for a tenant.

        `is_authenticated`: the caller's credential allows this tenant, so that the name cannot be invented.
        """
        has_entry = tenant in self.named and tenant != DEFAULT_ENTRY
        return tenant if has_entry or is_authenticated or self.trusts_names else host

    def limits_of(self, account: str) -> TenantLimits:
        """The limits of the account's entry, or of the default entry."""
        return self.named.get(account, self.default)


def read_tenants(path: Path) -> TenantTable:
    """The table in a file. Raises InvalidTenants."""
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidTenants(f"cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidTenants(f"is larger than {MAX_FILE_BYTES} bytes")
    try:
        document = json.loads(content, object_pairs_hook=_without_twins)
    except InvalidTenants:
        raise
    except ValueError as error:  # of json, or of the bytes' encoding
        raise InvalidTenants(f"is not valid JSON: {error}") from error
    return parse_tenants(document)


def parse_tenants(document: object) -> TenantTable:
    """The table in a JSON document. Raises InvalidTenants."""
    if not isinstance(document, dict):
        raise InvalidTenants(f"is a JSON {type(document).__name__}; use an object that maps tenants to limits")
    named = {tenant: _parse_entry(tenant, entry) for tenant, entry in document.items()}
    try:
        name_prefixes = reserve({tenant: _prefixes_of(tenant, entry) for tenant, entry in document.items()})
    except ValueError as error:
        raise InvalidTenants(str(error)) from error
    return TenantTable(named, named.get(DEFAULT_ENTRY, TenantLimits()), name_prefixes=name_prefixes)


def _parse_entry(tenant: str, entry: object) -> TenantLimits:
    if not is_tenant(tenant):
        raise InvalidTenants(f"{tenant!r} is not a tenant: {TENANT_FORM}")
    if not isinstance(entry, dict):
        raise InvalidTenants(f"{tenant}: {entry!r} is not an object")
    known = [item.name for item in fields(TenantLimits)]
    entry = {name: value for name, value in entry.items() if name != PREFIXES_FIELD}
    for name, value in entry.items():
        if name not in known:
            raise InvalidTenants(f"{tenant}.{name}: unknown; known are {', '.join([*known, PREFIXES_FIELD])}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name == "weight":
            if not (is_number and 0 < value < math.inf):
                raise InvalidTenants(f"{tenant}.{name}: {value!r} is not a finite number above 0")
        elif not (is_number and isinstance(value, int) and value >= 1):
            raise InvalidTenants(f"{tenant}.{name}: {value!r} is not an integer above 0; leave it out for no limit")
    return TenantLimits(**entry)


def _prefixes_of(tenant: str, entry: Mapping[str, object]) -> tuple[str, ...]:
    prefixes = entry.get(PREFIXES_FIELD, [])
    if not isinstance(prefixes, list) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise InvalidTenants(f"{tenant}.{PREFIXES_FIELD}: {prefixes!r} is not a list of beginnings of adapter names")
    if prefixes and tenant == DEFAULT_ENTRY:
        raise InvalidTenants(
            f"{tenant}.{PREFIXES_FIELD}: this entry is for every tenant without one; reserve names in a tenant's entry"
        )
    return tuple(prefixes)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise InvalidTenants(f"{next(name for name in names if names.count(name) > 1)!r} appears twice; remove one")
    return members
