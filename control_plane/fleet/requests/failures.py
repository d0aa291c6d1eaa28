"""The errors that clients get when the fleet could not bring their request to an end."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.errors import (
    AdapterLoadFailed,
    AdapterNotServed,
    AdapterTooLarge,
    ConstraintFailed,
    ContextTooLong,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    MotetError,
    NotFinite,
    NoWorker,
    PoisonedRequest,
    PoolingNotServed,
    WorkerLost,
)
from control_plane.fleet.requests.deaths import open_deaths
from control_plane.fleet.requests.jobs import Job
from control_plane.scheduler.errors import AdapterNeverFits, PoolingNeverFits, RequestNeverFits, RowsNeverFit
from control_plane.scheduler.types import FinishReason, Request, RequestOutput

MAX_MISMATCH_CHARS = 500


def never_fits(request: Request, refusal: RequestNeverFits) -> MotetError:
    """The request fits none of the attached workers; `refusal` is what one of them refused."""
    if isinstance(refusal, AdapterNeverFits):
        assert request.adapter is not None, "no adapter, and it does not fit"
        num_bytes = sum(ref.arena_bytes for ref in request.adapters)
        if len(request.adapters) > 1:
            return AdapterTooLarge(
                f"the adapters {_digest(request)} take {num_bytes} bytes together, more than the adapter memory of "
                "every worker, or more slots than a worker has; combine fewer, or start a worker with larger "
                "--arena-bytes and --num-slots"
            )
        return AdapterTooLarge(
            f"adapter {_digest(request)} takes {num_bytes} bytes, more than the adapter memory of "
            "every worker; lower its rank, or start a worker with a larger --arena-bytes"
        )
    if isinstance(refusal, PoolingNeverFits):
        return PoolingNotServed(
            "no worker can read the last hidden state of this model, so it has no embeddings and no classes; use "
            "Generate, or serve another base model"
        )
    if isinstance(refusal, RowsNeverFit):
        field = "decoding.best_of" if request.beam is None else "decoding.beam_search.width"
        return InvalidRequest(FieldViolation(field, str(refusal)))
    num_prompt, num_indices = len(request.prompt_token_ids), request.num_indices
    completions = f" for each of {num_indices} completions at once" if num_indices > 1 else ""
    return ContextTooLong(
        FieldViolation(
            "stopping.max_tokens",
            f"prompt of {num_prompt} tokens and max_tokens {request.max_tokens}{completions}: {refusal}",
        )
    )


def error_of(output: RequestOutput, request: Request, damage: Callable[[str], MotetError | None]) -> MotetError:
    """The error for an output that ended without reaching its length or a stop token.

    What a worker said about a failed load stays in the log: it may name paths and addresses. The client gets only the
    reason why an adapter does not fit the model, which names modules and sizes. `damage`: the error for an adapter, by
    digest, whose stored weights the control plane found wrong.
    """
    if output.finish_reason is FinishReason.DEADLINE:
        return DeadlineExceeded("the request's deadline passed")
    if output.finish_reason is FinishReason.ADAPTER_FAILED and output.is_mismatch:
        reason = output.message[:MAX_MISMATCH_CHARS]
        return AdapterNotServed(f"the workers cannot serve adapter {_digest(request)}: {reason}")
    if output.finish_reason is FinishReason.ADAPTER_FAILED and output.is_crowded_out:
        # Not the sizes of the pinned adapters, which are in the output's message: they may be another tenant's.
        what = "adapter" if len(request.adapters) == 1 else "adapters"
        num_bytes = sum(ref.arena_bytes for ref in request.adapters)
        return AdapterTooLarge(
            f"no worker has room for the {what} {_digest(request)} of {num_bytes} bytes beside the pinned adapters; "
            "unpin an adapter, or start a worker with larger --arena-bytes and --num-slots"
        )
    if output.finish_reason is FinishReason.ADAPTER_FAILED:
        assert request.adapter is not None, "no adapter, and its load failed"
        found = (damage(ref.digest) for ref in request.adapters)
        return next(filter(None, found), None) or adapter_failed(request)
    if output.finish_reason is FinishReason.CONSTRAINT_FAILED:
        return ConstraintFailed(
            "constraint: the grammar took too much work to follow behind the tokens so far; give a simpler constraint"
        )
    assert output.finish_reason is FinishReason.NOT_FINITE, f"{output.finish_reason} is not an error"
    return NotFinite("the model's logits were not finite for this request; check the adapter's weights")


def adapter_failed(request: Request) -> MotetError:
    """None of the workers that tried could load the request's adapter."""
    return AdapterLoadFailed(f"adapter {_digest(request)} could not be loaded by any worker that tried; try again")


def broken() -> MotetError:
    """A mistake of ours ended the request. The log has the exception."""
    return MotetError("an internal error ended the request; the server log has the details")


def lost(job: Job) -> MotetError:
    """The request lost its worker too often."""
    return WorkerLost(f"the request lost its worker {job.num_losses} times; send it again")


def no_worker_came(job: Job, grace_s: float) -> MotetError:
    """No worker attached in time to begin with the request, or to go on with it."""
    if job.has_run:
        return WorkerLost(f"no worker took requests for {grace_s:g} s, to go on with this one; send it again")
    return NoWorker(f"no worker took requests for {grace_s:g} s; try again in a moment")


def poisoned(job: Job) -> MotetError:
    """The request killed its workers."""
    num_deaths = len(open_deaths(job))
    return PoisonedRequest(f"{num_deaths} workers died while they computed this request; do not send it again")


def _digest(request: Request) -> str:
    return ", ".join(ref.digest[:12] for ref in request.adapters) or "none"
