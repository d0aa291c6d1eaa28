"""Owner, visibility and tenants of an adapter, as messages give them."""

from __future__ import annotations

from collections.abc import Collection

from motet.v1 import adapters_pb2, push_pb2

from control_plane.api.wire import VISIBILITY_BY_MESSAGE
from control_plane.checks import Violations
from control_plane.registry.ownership_change import OwnershipChange, check_owner, check_shared_with

FIELDS = ("visibility", "shared_with", "owner")
Message = adapters_pb2.Adapter | adapters_pb2.UploadHeader | adapters_pb2.CreateAdapterRequest | push_pb2.PushHeader


def check_ownership(message: Message, path: str, violations: Violations) -> None:
    """Adds what is wrong with each field; `path` leads to the fields, such as "header."."""
    check_owner(message.owner, f"{path}owner", violations)
    check_shared_with(message.shared_with, f"{path}shared_with", violations)
    if message.visibility and message.visibility not in VISIBILITY_BY_MESSAGE:
        violations.add(f"{path}visibility", f"is {message.visibility}, which is not a value of AdapterVisibility")


def change_of(message: Message) -> OwnershipChange:
    """The change that a checked message requests: fields that are not set stay as they are."""
    return change_of_fields(message, [name for name in FIELDS if getattr(message, name)])


def change_of_fields(message: Message, names: Collection[str]) -> OwnershipChange:
    """The change that a checked message requests: these fields, empty ones too."""
    return OwnershipChange(
        owner=message.owner if "owner" in names else None,
        visibility=VISIBILITY_BY_MESSAGE[message.visibility] if "visibility" in names else None,
        shared_with=tuple(message.shared_with) if "shared_with" in names else None,
    )
