"""Compares what is served with merged float32 weights: prompts through the fleet, and through a process of its own.

The same prompts are computed four times: by the base model and by the version, each served and in float32. The error of
the base model is the rounding of the serving dtype on these prompts; the version may have a few times that error.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from control_plane.adapters.operations import Operation, OperationStore
from control_plane.adapters.reference_process import Prompt, ReferenceProcess
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import current_caller
from control_plane.checks import Violations
from control_plane.errors import MotetError, NotFinite
from control_plane.fleet.fleet import Fleet
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.records import AdapterRecord, AdapterVersion, Registered
from control_plane.registry.registry import Registry
from control_plane.registry.versions.invocation import last_occurrence
from control_plane.registry.versions.verification import NOT_FINITE, Verification
from control_plane.scheduler.types import AdapterRef, Request, Sampling

NUM_PROMPTS, PROMPT_TOKENS = 4, 24
CHANGED_EVERY = 3  # every third token of a drawn prompt is one whose row the version changes, if it changes any
BEFORE_INVOCATION = 8  # tokens of a drawn prompt before the invocation tokens of an activated adapter
REQUEST_TIMEOUT_S = 300.0
# Log-probabilities of the served base model differ from float32 by the rounding of its dtype. An adapter's product is
# rounded as often as the linear that it is added to, so its error is of the same size: ROUNDING times the base model's
# leaves room for other tokens and activations. The tolerance is at least what one rounding of a logit of 16 gives
# (half of its spacing, and 1e-3 for float32, whose sums have another order), and at most what would change tokens.
# Over FP8 weights the reference has the same weights. What is left is the rounding of inputs, of which an adapter may
# make more than ROUNDING times as much: so the process computes what it makes of both. The tolerance is at least SPREAD
# times that of the version, since two draws of one rounding differ. Its limit is at least ROUNDING times the base's.
ROUNDING, SPREAD = 4.0, 2.0
LEAST_TOLERANCE = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.07}
MOST_TOLERANCE = {"float32": 0.02, "float16": 0.25, "bfloat16": 1.0}


class Verifier:
    """Runs verifications, one at a time: each holds a float32 model in memory."""

    def __init__(
        self,
        *,
        reference: ReferenceProcess,
        base_model: BaseModel,
        registry: Registry,
        activate: Callable[[str, str], Awaitable[AdapterRecord]],
        fleet: Fleet,
        operations: OperationStore,
        audit: AuditLog,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`activate` makes a version of a name the active one."""
        self._reference = reference
        self._base_model = base_model
        self._registry = registry
        self._activate = activate
        self._fleet = fleet
        self._operations = operations
        self._audit = audit
        self._clock = clock
        self._wall_clock = wall_clock
        self._turn = asyncio.Lock()

    def start(
        self, adapter_id: str, digest: str, prompts: Sequence[Sequence[int]], *, activates: bool = False
    ) -> Operation:
        """Verify a version as an operation; an empty digest is the active version. Raises what resolving it raises.

        `activates`: if it passes, the version becomes the active one.
        """
        self._audit.check()
        ownership = self._registry.changeable(adapter_id).ownership
        resolved = self._registry.resolve(adapter_id, digest)
        version, ref = resolved.version, resolved.ref
        own = self._checked(prompts, version)

        async def work() -> Registered:
            async with self._audit.change(actions.VERIFY, f"adapters/{adapter_id}", digest=version.digest):
                async with self._turn:
                    verification = await self._verify(version, ref, own)
                record = await self._registry.verified.put(adapter_id, version.digest, verification)
            if activates and verification.is_passed:
                record = await self._activate(adapter_id, version.digest)
            return Registered(version.digest, record, record)

        return self._operations.start(
            adapter_id, "verify", work, owner=ownership.owner, is_cancellable=True, digest=version.digest
        )

    def _vocab_size(self, version: AdapterVersion) -> int:
        return version.vocab_size or self._base_model.vocab_size

    def _checked(self, prompts: Sequence[Sequence[int]], version: AdapterVersion) -> list[Prompt]:
        """The caller's prompts. Raises InvalidRequest for one that the version cannot be compared with."""
        violations, found = Violations(), []
        vocab_size, invocation = self._vocab_size(version), version.alora_invocation_tokens
        for index, token_ids in enumerate(prompts):
            field = f"prompts[{index}].ids"
            start = last_occurrence(token_ids, invocation) if invocation else 0
            if max(token_ids) >= vocab_size:
                violations.add(field, f"has {max(token_ids)}; token ids are below {vocab_size}")
            elif start is None:
                violations.add(field, f"lacks the adapter's {len(invocation)} invocation tokens in a row; add them")
            else:
                found.append(Prompt(tuple(token_ids), start))
        violations.raise_if_any()
        return found

    def _drawn(self, version: AdapterVersion, changed: Sequence[int]) -> list[Prompt]:
        """Prompts that follow from the digest: the same at every verification of the version.

        They have the tokens whose rows it changes, and the invocation tokens of an activated adapter.
        """
        drawn = random.Random(version.digest)
        vocab_size = min(self._vocab_size(version), self._base_model.vocab_size)
        prompts = []
        for _ in range(NUM_PROMPTS):
            token_ids = [drawn.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
            if changed:
                for place in range(1, PROMPT_TOKENS, CHANGED_EVERY):
                    token_ids[place] = drawn.choice(changed)
            start = None
            if version.alora_invocation_tokens:
                token_ids[BEFORE_INVOCATION:BEFORE_INVOCATION] = version.alora_invocation_tokens
                start = last_occurrence(token_ids, version.alora_invocation_tokens)
            prompts.append(Prompt(tuple(token_ids), start or 0))
        return prompts

    async def _verify(self, version: AdapterVersion, ref: AdapterRef, own: Sequence[Prompt]) -> Verification:
        begun_s = self._clock()
        async with self._reference.packed(version.digest) as packed:
            prompts = [*self._drawn(version, await asyncio.to_thread(packed.changed_token_ids)), *own]
            num_known = self._base_model.vocab_size  # as the process computes them: without the version's new tokens
            known = [Prompt(tuple(token_id % num_known for token_id in prompt.token_ids)) for prompt in prompts]
            served_base = await asyncio.gather(*(self._served(prompt, None) for prompt in known))
            served = await asyncio.gather(*(self._served(prompt, ref) for prompt in prompts))
            reference = await packed.compute(prompts)
        base, merged = reference.base, reference.merged
        base_error, error = largest_difference(served_base, base), largest_difference(served, merged)
        tolerance = tolerance_of(
            version.dtype,
            base_error,
            base_rounding=largest_difference(reference.base_rounded, base),
            rounding=largest_difference(reference.merged_rounded, merged),
        )
        return Verification(
            is_passed=error <= tolerance < NOT_FINITE,
            tolerance=tolerance,
            largest_error=error,
            largest_effect=largest_difference(merged, base),
            num_prompts=len(prompts),
            num_logprobs=sum(len(row) for row in merged),
            verify_time_s=self._wall_clock(),
            duration_s=self._clock() - begun_s,
        )

    async def _served(self, prompt: Prompt, ref: AdapterRef | None) -> list[float]:
        """Log-probabilities of the prompt's tokens from the second on, as any request gets them.

        They are NaN where requests with the version end because its logits are not finite.
        """
        caller, now_s = current_caller(), self._clock()
        request = Request(
            request_id=self._fleet.next_request_id(),
            prompt_token_ids=prompt.token_ids,
            max_tokens=1,
            adapter=ref,
            active_from=prompt.active_from,
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
        num_expected = len(prompt.token_ids) - 1
        try:
            async for event in job:
                found += [entry.logprob for entry in event.prompt_logprobs or ()]
                if event.finish_reason is not None:
                    break
        except NotFinite:
            if ref is None:  # the base model has no verdict
                raise
            return [math.nan] * num_expected
        finally:
            job.cancel()
        if len(found) != num_expected:
            raise MotetError(f"{len(found)} log-probabilities came for a prompt of {len(prompt.token_ids)} tokens")
        return found


def largest_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """The largest difference of two lists of rows; NOT_FINITE if any of them is not a number."""
    pairs = (pair for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True))
    differences = [abs(a - b) for a, b in pairs]
    # max() leaves a NaN out that is not first: every comparison with it is false.
    return max(differences) if all(map(math.isfinite, differences)) else NOT_FINITE


def tolerance_of(dtype: str, base_error: float, *, base_rounding: float = 0.0, rounding: float = 0.0) -> float:
    """The tolerance where the served base model has this error.

    Inputs in FP8 alone would make errors of `base_rounding` with the base model and of `rounding` with the version.
    Errors that are not finite allow nothing.
    """
    base_error, base_rounding, rounding = (
        error if error < NOT_FINITE else 0.0 for error in (base_error, base_rounding, rounding)
    )
    least = max(LEAST_TOLERANCE[dtype], SPREAD * rounding)
    most = max(MOST_TOLERANCE[dtype], ROUNDING * base_rounding, least)
    return min(max(ROUNDING * base_error, least), most)
