"""VerificationService: starts verifications of versions as operations."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc.aio

# googleapis-common-protos ships no py.typed marker.
from google.longrunning import operations_pb2
from motet.v1 import verify_pb2, verify_pb2_grpc

from control_plane.adapters.verifier import Verifier
from control_plane.api.admin.operations import operation_message
from control_plane.api.admin.resource_names import adapter_id_in
from control_plane.api.gate import ShutdownGate
from control_plane.api.rpc.shared_limit import SharedLimit
from control_plane.caller import current_caller
from control_plane.checks import Violations, check_digest

SERVICE_NAME = verify_pb2.DESCRIPTOR.services_by_name["VerificationService"].full_name
MAX_PROMPTS = 64
MAX_VERIFICATIONS = 8  # under way: one computes, the others wait
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 2, 1024
Context = grpc.aio.ServicerContext[Any, Any]


class VerificationService(verify_pb2_grpc.VerificationServiceServicer):
    """See protos/motet/v1/verify.proto."""

    def __init__(self, verifier: Verifier, gate: ShutdownGate) -> None:
        self._verifier = verifier
        self._gate = gate
        self._places = SharedLimit(MAX_VERIFICATIONS, "verifications", retry_after_s=60.0)

    # ruff: noqa: N802 - the stub names the method

    async def VerifyVersion(
        self, request: verify_pb2.VerifyVersionRequest, _context: Context
    ) -> operations_pb2.Operation:
        """Check the request, then begin."""
        self._gate.check()
        adapter_id, violations = adapter_id_in(request.name), Violations()
        if request.digest:
            check_digest(request.digest, "digest", violations)
        if len(request.prompts) > MAX_PROMPTS:
            violations.add("prompts", f"has {len(request.prompts)} prompts; send at most {MAX_PROMPTS}")
            violations.raise_if_any()
        for index, prompt in enumerate(request.prompts):
            if not MIN_PROMPT_TOKENS <= len(prompt.ids) <= MAX_PROMPT_TOKENS:
                violations.add(
                    f"prompts[{index}].ids",
                    f"has {len(prompt.ids)} tokens; send {MIN_PROMPT_TOKENS} to {MAX_PROMPT_TOKENS}",
                )
        violations.raise_if_any()
        prompts = [list(prompt.ids) for prompt in request.prompts]
        with contextlib.ExitStack() as place:
            place.enter_context(self._places.place(current_caller().holder))
            operation = self._verifier.start(adapter_id, request.digest, prompts, activates=request.activate)
            operation.when_done(place.pop_all().close)
        return operation_message(operation)
