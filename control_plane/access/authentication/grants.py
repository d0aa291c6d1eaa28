"""What a credential allows, as the operator's files say it: tenants, roles, adapters. Read strictly.

Errors name the place in the file, the value, the limit and the next step, and repeat no secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from contract.process_log import printable
from control_plane.access.principal import ANY_TENANT, BASE_MODEL, Principal, Role, of_roles
from control_plane.access.tenant_names import TENANT_FORM, is_tenant

MAX_TENANTS = 100  # of one credential
MAX_ADAPTERS = 100  # patterns of one credential; every call may try them all

_ADAPTER_PATTERN = re.compile(r"[a-z0-9._\-*?\[\]!]{1,128}")
ADAPTER_PATTERN_FORM = (
    f"use an adapter's id, a pattern such as 'acme.*' with *, ? and [...], or {BASE_MODEL} for the base model"
)
ROLES = {role.value: role for role in Role}  # by the names that files and tokens use


class InvalidAccessFile(ValueError):
    """A file of keys or identities is not valid. The message names the entry, the field, the value and the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one credential allows."""

    tenants: tuple[str, ...]  # the first one is meant by calls that name none; ANY_TENANT: all
    roles: tuple[Role, ...]
    adapters: tuple[str, ...] | None = None  # patterns; None: all that its tenant sees

    def principal(self, name: str, *, expires_s: float | None = None) -> Principal:
        """The principal that presents this credential."""
        return Principal(name, of_roles(self.roles), self.tenants, self.adapters, expires_s)

    def as_json(self) -> dict[str, Any]:
        """The fields as a file has them."""
        fields: dict[str, Any] = {"tenants": list(self.tenants), "roles": [role.value for role in self.roles]}
        return fields if self.adapters is None else {**fields, "adapters": list(self.adapters)}


def read_grant(entry: Mapping[str, Any], where: str) -> Grant:
    """The grant in one object of a file; `where` names the object. Raises InvalidAccessFile."""
    return Grant(
        tenants=_tenants(entry.get("tenants"), f"{where}.tenants"),
        roles=_roles(entry.get("roles"), f"{where}.roles"),
        adapters=adapter_patterns(entry["adapters"], f"{where}.adapters") if "adapters" in entry else None,
    )


def adapter_patterns(value: object, where: str) -> tuple[str, ...]:
    """Ids of adapters or patterns of them; none: no adapter, and not the base model. Raises InvalidAccessFile."""
    items = _strings(value, where, most=MAX_ADAPTERS)
    for item in items:
        if item != BASE_MODEL and not _ADAPTER_PATTERN.fullmatch(item):
            raise InvalidAccessFile(f"{where}: {shortened(item)} is not valid: {ADAPTER_PATTERN_FORM}")
    return items


def read_object(content: bytes) -> dict[str, Any]:
    """The JSON object in a file. Raises InvalidAccessFile, also where a member appears twice."""
    try:
        document = json.loads(content, object_pairs_hook=_without_twins)
    except InvalidAccessFile:
        raise
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "the text is not UTF-8 or is nested too deeply")
        line = getattr(error, "lineno", 1)
        raise InvalidAccessFile(f"line {line}: is not valid JSON: {reason}") from error
    if not isinstance(document, dict):
        raise InvalidAccessFile(f"is a JSON {type(document).__name__}; use an object")
    return document


def check_fields(entry: object, where: str, *, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Raise InvalidAccessFile unless `entry` is an object with these fields and no others."""
    if not isinstance(entry, dict):
        raise InvalidAccessFile(f"{where}: is a JSON {type(entry).__name__}; use an object")
    known = [*required, *optional]
    for name in entry:
        if name not in known:
            raise InvalidAccessFile(f"{where}: field {shortened(name)} is unknown; known are {', '.join(known)}")
    for name in required:
        if name not in entry:
            raise InvalidAccessFile(f"{where}: field {name!r} is missing; add it")


def shortened(value: object) -> str:
    """A value of a file for a message: on one line, cut off."""
    return printable(repr(value), 80)


def _tenants(value: object, where: str) -> tuple[str, ...]:
    items = _strings(value, where, most=MAX_TENANTS)
    if not items:
        raise InvalidAccessFile(f"{where}: is empty; name at least one tenant, or {ANY_TENANT!r} for all")
    for item in items:
        if item != ANY_TENANT and not is_tenant(item):
            raise InvalidAccessFile(
                f"{where}: {shortened(item)} is not a tenant: {TENANT_FORM}, or {ANY_TENANT!r} for all"
            )
    return items


def _roles(value: object, where: str) -> tuple[Role, ...]:
    items = _strings(value, where, most=len(ROLES))
    if not items:
        raise InvalidAccessFile(f"{where}: is empty; use at least one of {', '.join(ROLES)}")
    for item in items:
        if item not in ROLES:
            raise InvalidAccessFile(f"{where}: {shortened(item)} is not a role; use {', '.join(ROLES)}")
    return tuple(ROLES[item] for item in items)


def _strings(value: object, where: str, *, most: int) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidAccessFile(f"{where}: {shortened(value)} is not a list of strings")
    if len(value) > most:
        raise InvalidAccessFile(f"{where}: has {len(value)} items; at most {most} are allowed")
    if len(set(value)) < len(value):
        twin = next(item for item in value if value.count(item) > 1)
        raise InvalidAccessFile(f"{where}: {shortened(twin)} appears twice; remove one")
    return tuple(value)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise InvalidAccessFile(f"{shortened(twin)} appears twice in one object; remove one")
    return members
