"""The form of a tenant's name: in metadata, in the operator's files and in the claims of a token."""

from __future__ import annotations

import re

TENANT_FORM = "[a-z0-9._-], from 1 to 63 characters"
_TENANT = re.compile(r"[a-z0-9._-]{1,63}")


def is_tenant(name: str) -> bool:
    """Whether this is a valid tenant name: TENANT_FORM says how."""
    return _TENANT.fullmatch(name) is not None
