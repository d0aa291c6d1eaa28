"""Shapes of sampling for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One step's sampling rows."""

    name: str
    num_rows: int
    vocab_size: int


CASES = (
    Case("one row of two tokens", 1, 2),
    Case("odd vocabulary", 3, 257),
    Case("a step", 32, 8192),
    Case("large vocabulary", 8, 128_256),
)
