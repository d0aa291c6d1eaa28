"""What a request may rely on: the model and the prompt that an earlier `started` reported.

A continued stream must never mix the tokens of two models or of two prompts.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from motet.v1 import generation_pb2

from control_plane.checks import Violations, check_digest
from control_plane.errors import PreconditionFailed
from control_plane.registry.records import ResolvedAdapter


def check_preconditions(preconditions: generation_pb2.Preconditions, violations: Violations) -> None:
    """Adds a violation for every field that is neither empty nor a digest."""
    for name in ("model_fingerprint", "prompt_sha256"):
        if digest := getattr(preconditions, name):
            check_digest(digest, f"preconditions.{name}", violations)


def require_model(expected: str, fingerprint: str, field: str = "preconditions.model_fingerprint") -> None:
    """Raises PreconditionFailed if `expected` is another model than the one served here; empty matches any.

    `field`: where the request names it.
    """
    if expected and expected != fingerprint:
        raise PreconditionFailed(
            f"{field}: {expected[:12]} is not the model served here, {fingerprint[:12]}; "
            "send a new request, without resume_from and preconditions"
        )


def require_prompt(expected: str, token_ids: Sequence[int]) -> None:
    """Raises PreconditionFailed if the prompt has other tokens than expected; empty matches any."""
    if not expected:
        return
    present = prompt_sha256(token_ids)
    if expected != present:
        raise PreconditionFailed(
            f"preconditions.prompt_sha256: the prompt has the SHA-256 {present[:12]}, not {expected[:12]}: the "
            "tokenizer, the chat template or the input changed; send a new request, without resume_from and "
            "preconditions"
        )


def require_vocabulary(checked_for: int, vocab_size: int) -> None:
    """Raises PreconditionFailed if the version that the request gets has another vocabulary than it was checked for."""
    if checked_for != vocab_size:
        raise PreconditionFailed(
            f"adapter: its version was deleted meanwhile, and the active one has {vocab_size} tokens, not "
            f"{checked_for}; send the request again"
        )


def require_text(named: ResolvedAdapter | None, resolved: Sequence[ResolvedAdapter]) -> None:
    """Raises PreconditionFailed if the prompt was made with the tokenizer or template of a version that is gone."""
    if named is None or len(resolved) != 1 or resolved[0].ref.digest == named.ref.digest:
        return
    if named.version.files or resolved[0].version.files:
        raise PreconditionFailed(
            "adapter: its version was deleted meanwhile, and the active one has another tokenizer, chat template or "
            "defaults; send the request again"
        )


def prompt_sha256(token_ids: Sequence[int]) -> str:
    """SHA-256 of token ids, each as 4 bytes, least significant first; 64 lower-case hexadecimal digits."""
    words = array("I", token_ids)
    assert words.itemsize == 4, "unsigned int has 4 bytes wherever CPython runs"
    if sys.byteorder != "little":
        words.byteswap()
    return hashlib.sha256(words).hexdigest()
