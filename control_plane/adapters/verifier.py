"""Compares what is served with merged float32 weights: prompts through the fleet, and through a process of its own.

The same prompts are computed four times: by the base model and by the version, each served and in float32. The error of
the base model is the rounding of the serving dtype on these prompts; the version may have a few times that error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from control_plane.adapters.operations import Operation, OperationStore
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import current_caller
from control_plane.child_process import ChildProcess, module_command
from control_plane.directory_lock import PRIVATE
from control_plane.errors import MotetError, StoreUnavailable
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.packed import read_layout
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.records import AdapterVersion, Registered
from control_plane.registry.registry import Registry
from control_plane.registry.versions.verification import Verification
from control_plane.scheduler.types import AdapterRef, Request, Sampling

NUM_PROMPTS, PROMPT_TOKENS = 4, 24
TIMEOUT_S = 1800.0  # of the process: a model of 8B parameters takes minutes on a CPU
REQUEST_TIMEOUT_S = 300.0
# Log-probabilities of the served base model differ from float32 by the rounding of its dtype. An adapter's product is
# rounded as often as the linear that it is added to, so its error is of the same size: ROUNDING times the base model's
# leaves room for other tokens and activations. The tolerance is at least what one rounding of a logit of 16 gives
# (half of its spacing, and 1e-3 for float32, whose sums have another order), and at most what would change tokens.
ROUNDING = 4.0
LEAST_TOLERANCE = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.07}
MOST_TOLERANCE = {"float32": 0.02, "float16": 0.25, "bfloat16": 1.0}


class Verifier:
    """Runs verifications, one at a time: each holds a float32 model in memory."""

    def __init__(
        self,
        *,
        model_dir: Path,
        work_dir: Path,
        base_model: BaseModel,
        registry: Registry,
        weights: AdapterWeights,
        fleet: Fleet,
        operations: OperationStore,
        audit: AuditLog,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._model_dir = model_dir
        self._work_dir = work_dir
        self._base_model = base_model
        self._registry = registry
        self._weights = weights
        self._fleet = fleet
        self._operations = operations
        self._audit = audit
        self._clock = clock
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()

    def start(self, adapter_id: str, digest: str, prompts: Sequence[Sequence[int]]) -> Operation:
        """Verify a version as an operation; an empty digest is the active version. Raises what resolving it raises."""
        self._audit.check()
        ownership = self._registry.changeable(adapter_id).ownership
        resolved = self._registry.resolve(adapter_id, digest)
        version, ref = resolved.version, resolved.ref

        async def work() -> Registered:
            async with self._audit.change(actions.VERIFY, f"adapters/{adapter_id}", digest=version.digest):
                async with self._turn:
                    verification = await self._verify(version, ref, [*self._drawn(version.digest), *prompts])
                record = await self._registry.verified.put(adapter_id, version.digest, verification)
                return Registered(version.digest, record, record)

        return self._operations.start(
            adapter_id, "verify", work, owner=ownership.owner, is_cancellable=True, digest=version.digest
        )

    def _drawn(self, digest: str) -> list[list[int]]:
        """Prompts that follow from the digest: the same at every verification of the version."""
        drawn = random.Random(digest)
        vocab_size = self._base_model.vocab_size
        return [[drawn.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]

    async def _verify(self, version: AdapterVersion, ref: AdapterRef, prompts: list[Sequence[int]]) -> Verification:
        begun_s = self._clock()
        served_base, served = [await asyncio.gather(*(self._served(p, r) for p in prompts)) for r in (None, ref)]
        base, merged = await self._computed(version.digest, prompts)
        tolerance = _tolerance(version.dtype, _largest(served_base, base))
        error = _largest(served, merged)
        return Verification(
            is_passed=error <= tolerance,
            tolerance=tolerance,
            largest_error=error,
            largest_effect=_largest(merged, base),
            num_prompts=len(prompts),
            num_logprobs=sum(len(row) for row in merged),
            verify_time_s=self._wall_clock(),
            duration_s=self._clock() - begun_s,
        )

    async def _served(self, prompt: Sequence[int], ref: AdapterRef | None) -> list[float]:
        """Log-probabilities of the prompt's tokens from the second on, as any request gets them."""
        caller, now_s = current_caller(), self._clock()
        request = Request(
            request_id=self._fleet.next_request_id(),
            prompt_token_ids=tuple(prompt),
            max_tokens=1,
            adapter=ref,
            sampling=Sampling(num_prompt_logprobs=0),
            arrival_s=now_s,
            deadline_s=now_s + REQUEST_TIMEOUT_S,
            tenant=caller.tenant,
            charged_to=self._fleet.account_of(
                caller.tenant, caller.host, is_authenticated=caller.principal.is_authenticated
            ),
        )
        found: list[float] = []
        job = self._fleet.submit(request)
        try:
            async for event in job:
                found += [entry.logprob for entry in event.prompt_logprobs or ()]
                if event.finish_reason is not None:
                    break
        finally:
            job.cancel()
        if len(found) != len(prompt) - 1:
            raise MotetError(f"{len(found)} log-probabilities came for a prompt of {len(prompt)} tokens")
        return found

    async def _computed(self, digest: str, prompts: list[Sequence[int]]) -> tuple[list[list[float]], list[list[float]]]:
        """The same in float32 by the process: of the base model, and with the version merged into it."""
        self._work_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self._work_dir, prefix="verify-"))
        try:
            await self._write_packed(digest, directory)
            (directory / "prompts.json").write_text(json.dumps([list(prompt) for prompt in prompts]))
            argv, environment = module_command("data_plane.verify", str(self._model_dir), str(directory))
            with (directory / "log").open("wb") as log:
                child = ChildProcess(argv, stderr=log, environment=environment)
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        status = await child.wait()
                except TimeoutError:
                    raise StoreUnavailable(f"the verifying process did not end within {TIMEOUT_S:g} s") from None
                finally:
                    if child.returncode is None:
                        child.kill()
            if status != 0:
                lines = (directory / "log").read_text("utf-8", "replace").strip().splitlines()
                raise StoreUnavailable(
                    f"the verifying process ended with status {status}: {lines[-1][:200] if lines else 'no message'}; "
                    "the server's machine needs torch, transformers and 4 bytes of memory for each parameter"
                )
            result = json.loads((directory / "result.json").read_text("utf-8"))
            return result["base"], result["merged"]
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)

    async def _write_packed(self, digest: str, directory: Path) -> None:
        packed = await self._weights.open_packed(digest)
        layout = read_layout(digest, packed.manifest)
        assert layout is not None, "an opened adapter has a manifest of ours"
        (directory / "manifest.json").write_bytes(packed.manifest)
        parts = packed.parts()
        for index, size in enumerate(layout.sizes):
            with (directory / str(index)).open("wb") as out:
                while out.tell() < size:
                    await asyncio.to_thread(out.write, await anext(parts))


def _tolerance(dtype: str, base_error: float) -> float:
    return min(max(ROUNDING * base_error, LEAST_TOLERANCE[dtype]), MOST_TOLERANCE[dtype])


def _largest(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """The largest difference of two lists of rows."""
    return max(abs(a - b) for row, expected in zip(one, other, strict=True) for a, b in zip(row, expected, strict=True))
