"""Tables and the verdict of many rounds. No I/O but the text that it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.hostile.faults.rounds import RoundResult

# Longest wait for a token at the 99th percentile of calls that met the fault, seconds; of rounds with this fault alone.
TARGETS_S = {"worker killed": 1.5, "control plane killed": 5.0}


@dataclass
class Tally:
    """Everything about one kind of round."""

    num_rounds: int = 0
    num_right: int = 0
    num_cancelled: int = 0
    num_wrong: int = 0
    num_avoidable: int = 0
    num_hung: int = 0
    num_problems: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)

    def add(self, result: RoundResult) -> None:
        self.num_rounds += 1
        self.num_right += result.num_right
        self.num_cancelled += result.num_cancelled
        self.num_wrong += len(result.wrong)
        self.num_avoidable += len(result.avoidable)
        self.num_hung += len(result.hung)
        self.num_problems += len(result.problems)
        self.errors.update(result.errors)
        self.waits_s += result.waits_s


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def tallies(results: Iterable[RoundResult]) -> dict[str, Tally]:
    """By kind of round: single faults by name, the others together, and all of them."""
    found: dict[str, Tally] = {}
    for result in results:
        kind = result.kind if len(result.names) <= 1 else "two or three of them"
        for name in (f"{kind} (real model)" if result.is_real else kind, "all rounds"):
            found.setdefault(name, Tally()).add(result)
    return dict(sorted(found.items(), key=lambda item: (item[0] == "all rounds", item[0])))


def table(results: Sequence[RoundResult]) -> str:
    """One line a kind."""
    head = ["fault", "rounds", "right", "wrong", "errors", "avoidable", "hung", "cancelled", "other"]
    head += ["p50", "p99", "max"]
    rows = [head]
    for name, tally in tallies(results).items():
        waits = tally.waits_s
        rows.append(
            [
                name,
                *(str(n) for n in (tally.num_rounds, tally.num_right, tally.num_wrong, tally.errors.total())),
                *(str(n) for n in (tally.num_avoidable, tally.num_hung, tally.num_cancelled, tally.num_problems)),
                *(f"{quantile(waits, share):.2f}" for share in (0.5, 0.99, 1.0)),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    errors = Counter(error for result in results for error in result.errors)
    lines += [f"{count} x {error}" for error, count in errors.most_common()]
    return "\n".join([*lines, "p50, p99, max: longest wait for a token of calls that met the fault, seconds"])


def verdict(results: Sequence[RoundResult]) -> list[str]:
    """What misses its target; empty if nothing does."""
    found = []
    for result in results:
        for what in ("wrong", "avoidable", "hung", "problems"):
            found += [f"round {result.number} ({result.kind}), {what}: {text}" for text in getattr(result, what)]
    for name, tally in tallies(results).items():
        limit_s, p99_s = TARGETS_S.get(name), quantile(tally.waits_s, 0.99)
        if limit_s is not None and p99_s > limit_s:
            found.append(f"{name}: longest wait for a token, p99, is {p99_s:.2f} s; at most {limit_s:g} s")
    return found
