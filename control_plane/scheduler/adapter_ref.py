"""An adapter version as the scheduler sees it. By itself, since a process that reads records needs no more of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One adapter version as the scheduler sees it."""

    digest: str  # 64 lower-case hexadecimal digits
    arena_bytes: int  # what it takes of a worker's arena, page rounding included
    context_length: int = 0  # tokens that its own rotary embedding was trained for; 0: it has the base model's
    vocab_size: int | None = None  # tokens of its own vocabulary; None: the base model's
