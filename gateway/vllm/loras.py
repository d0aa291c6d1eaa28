"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM's server has them, on Motet's registry.

A place is named by one of the operator's roots (`--adapter-root`), never by a path or URL of the caller's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from motet import Adapter, AsyncClient, InvalidArgument, NotFound, PermissionDenied

from contract.ids import ADAPTER_ID_FORM, is_adapter_id
from gateway.openai.errors import FieldRefusal, refused, unknown_model


class LoadBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    # Refused by name.
    base_model_name: Any = None
    is_3d_lora_weight: Any = None


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's own number; not used


async def load(body: LoadBody, client: AsyncClient, timeout_s: float) -> str:
    """Register an adapter from a root, or with `load_inplace` its next version. Raises Refusal, MotetError."""
    for name in ("base_model_name", "is_3d_lora_weight"):
        if getattr(body, name) is not None:
            raise refused(name, "is not served; leave it out")
    _check_name(body.lora_name)
    if not body.load_inplace and await _is_registered(body.lora_name, client):
        raise FieldRefusal(
            f"lora_name: {body.lora_name} is registered; give load_inplace for a new version", param="lora_name"
        )
    try:
        await client.adapters.register_from_root(body.lora_name, body.lora_path, timeout_s=timeout_s)
    except InvalidArgument as error:
        raise _of_path(error) from error
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


async def unload(body: UnloadBody, client: AsyncClient, timeout_s: float) -> str:
    """Delete an adapter with all its versions; requests that run finish. Raises Refusal, MotetError."""
    _check_name(body.lora_name)
    if await _found(body.lora_name, client) is None:
        raise unknown_model(body.lora_name, param="lora_name")
    await client.adapters.delete(body.lora_name, timeout_s=timeout_s)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _of_path(error: InvalidArgument) -> FieldRefusal:
    """The adapter's files, or what is in them: the name has been checked."""
    first = next(iter(error.field_violations), None)
    is_of_path = first is not None and first.field in ("source", "source_uri", "root")
    return refused("lora_path", first.description if first is not None and is_of_path else error.message)


def _check_name(name: str) -> None:
    if not is_adapter_id(name):
        raise refused("lora_name", f"is not a valid adapter id: {ADAPTER_ID_FORM}")


async def _is_registered(name: str, client: AsyncClient) -> bool:
    try:
        return await _found(name, client) is not None
    except PermissionDenied:
        return False  # who may not read may not register either, and that refusal names the role


async def _found(name: str, client: AsyncClient) -> Adapter | None:
    try:
        return await client.adapters.get(name)
    except NotFound:
        return None
