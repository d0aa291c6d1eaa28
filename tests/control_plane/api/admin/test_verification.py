"""Verifications: how many one tenant has under way. What they compute: tests/e2e/test_verification.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from motet.v1 import verify_pb2

from control_plane.access.principal import Principal, Role
from control_plane.adapters.operations import OperationStore
from control_plane.api.admin.verification import MAX_VERIFICATIONS, VerificationService
from control_plane.api.gate import ShutdownGate
from control_plane.caller import Caller, acting_as
from control_plane.errors import AdapterNotFound, Exhausted


class Verifier:
    """Its verifications end when `gate` is set."""

    def __init__(self, operations: OperationStore) -> None:
        self.operations = operations
        self.gate = asyncio.Event()

    def start(self, adapter_id: str, _digest: str, _prompts: object, *, activates: bool) -> Any:
        assert not activates, "no call requests it"
        if adapter_id == "absent":
            raise AdapterNotFound("absent", resource="adapters/absent")

        async def work() -> None:
            await self.gate.wait()

        return self.operations.start(adapter_id, "verify", work, owner="", is_cancellable=True)


def caller_of(tenant: str) -> Caller:
    principal = Principal(name=f"key:{tenant}", tenants=(tenant,), roles=frozenset({Role.ADAPTERS_WRITE}))
    return Caller(principal=principal, tenant=tenant, peer=f"ipv4:10.0.0.1:{len(tenant)}")


async def test_verifications_of_one_tenant_leave_room_for_others() -> None:
    """Each may take half an hour, and only one runs at a time."""
    operations = OperationStore()
    verifier = Verifier(operations)
    service = VerificationService(cast(Any, verifier), ShutdownGate())
    context = cast(Any, SimpleNamespace())

    async def verify(tenant: str, name: str = "poet") -> str:
        with acting_as(caller_of(tenant)):
            return (await service.VerifyVersion(verify_pb2.VerifyVersionRequest(name=f"adapters/{name}"), context)).name

    for _ in range(MAX_VERIFICATIONS + 1):  # what is refused holds no place
        with pytest.raises(AdapterNotFound):
            await verify("acme", "absent")
    names = [await verify("acme") for _ in range(MAX_VERIFICATIONS)]
    with pytest.raises(Exhausted, match=f"at most {MAX_VERIFICATIONS} verifications") as refused:
        await verify("acme")
    assert refused.value.retry_after_s == pytest.approx(75.0, abs=15.0)
    await verify("labs")
    operations.get(names[0].removeprefix("operations/")).cancel()  # before its first line
    verifier.gate.set()
    await operations.close(timeout_s=5)
    await verify("acme")
    await operations.close(timeout_s=5)
