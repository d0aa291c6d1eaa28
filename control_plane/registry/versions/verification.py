"""What a verification of a version found. It is stored with the version."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

NOT_FINITE = 1e30  # in the place of a difference that is infinite or no number, which a document cannot have


@dataclass(frozen=True, slots=True)
class Verification:
    """Served log-probabilities against those of merged float32 weights. Differences are natural logarithms, no unit."""

    is_passed: bool  # largest_error <= tolerance
    tolerance: float
    largest_error: float
    largest_effect: float  # largest difference between the merged weights and the base model
    num_prompts: int
    num_logprobs: int
    verify_time_s: float  # when it ended: wall clock, seconds since 1970
    duration_s: float


def verification_of(document: Any) -> Verification | None:
    """Read the document of a verification; None for none. Raises ValueError with what is wrong."""
    if document is None:
        return None
    known = {field.name: field.type for field in fields(Verification)}
    if not isinstance(document, dict) or document.keys() != known.keys():
        raise ValueError("verification does not have its fields")
    for name, kind in known.items():
        value = document[name]
        is_right = isinstance(value, bool) if kind == "bool" else type(value) in (int, float)
        if not is_right or not math.isfinite(value):
            raise ValueError(f"verification.{name} is {value!r}")
    return Verification(**document)
