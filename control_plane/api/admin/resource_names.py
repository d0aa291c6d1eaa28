"""Resource names of the public API, and the ids in them."""

from __future__ import annotations

import re

from control_plane.checks import check_adapter_id, quoted, refuse, require

_ADAPTER_PREFIX = "adapters/"
_OPERATION = re.compile(r"operations/([0-9a-f]{32})")


def adapter_id_in(name: str, field: str = "name") -> str:
    """The id in "adapters/{id}". Raises InvalidRequest."""
    if not name.startswith(_ADAPTER_PREFIX):
        raise refuse(field, f"{quoted(name)} is not a resource name of the form adapters/{{id}}")
    adapter_id = name.removeprefix(_ADAPTER_PREFIX)
    require(check_adapter_id, adapter_id, field)
    return adapter_id


def operation_id_in(name: str) -> str:
    """The id in "operations/{id}". Raises InvalidRequest."""
    match = _OPERATION.fullmatch(name)
    if match is None:
        raise refuse("name", f"{quoted(name)} is not a resource name of the form operations/{{id}}")
    return match[1]
