"""Builds the Caller of an RPC. The only place where the tenant is read from the metadata of a call."""

from __future__ import annotations

from typing import Any

import grpc.aio

from control_plane.caller import DEFAULT_TENANT, Caller
from control_plane.checks import quoted, refuse
from control_plane.fleet.tenants import TENANT_FORM, is_tenant

TENANT_KEY = "motet-tenant"  # metadata


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """The caller by the metadata and the connection; nobody is authenticated. Raises InvalidRequest."""
    values = [value for key, value in context.invocation_metadata() or () if key == TENANT_KEY]
    if len(values) > 1:
        raise refuse(TENANT_KEY, f"appears {len(values)} times in the metadata; send it once")
    tenant = values[0] if values else DEFAULT_TENANT
    if isinstance(tenant, bytes):
        tenant = tenant.decode("ascii", "replace")
    if not is_tenant(tenant):
        raise refuse(TENANT_KEY, f"{quoted(tenant)} is not a valid tenant: {TENANT_FORM}")
    return Caller(tenant=tenant, peer=context.peer())
