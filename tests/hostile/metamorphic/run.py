"""Runs relations, judges what differs, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.hostile.metamorphic.judge import Judge
from tests.hostile.metamorphic.relations import Comparison, Relation
from tests.hostile.metamorphic.world import World


@dataclass
class Counts:
    """Of many runs."""

    equal: Counter[str] = field(default_factory=Counter)  # comparisons, by relation
    close: Counter[str] = field(default_factory=Counter)  # those that differ by rounding
    wrong: list[str] = field(default_factory=list)

    @property
    def num_compared(self) -> int:
        return self.equal.total() + self.close.total() + len(self.wrong)


def run_relation(world: World, judge: Judge, name: str, relation: Relation, counts: Counts) -> None:
    """One relation once."""
    for comparison in relation(world):
        if _as_tuple(comparison.due) == _as_tuple(comparison.got):
            counts.equal[name] += 1
        elif _is_close_call(judge, comparison):
            counts.close[name] += 1
        else:
            what = f"{name}, {comparison.what}" if comparison.what else name
            counts.wrong.append(f"{what}: {comparison.got!r} where {comparison.due!r} is due; {comparison.request}")


def _is_close_call(judge: Judge, comparison: Comparison) -> bool:
    request, due, got = comparison.request, comparison.due, comparison.got
    if request is None or isinstance(due, str | bool) or isinstance(got, str | bool):
        return False
    place = next((place for place, (a, b) in enumerate(zip(due, got, strict=False)) if a != b), None)
    if place is None:
        return False  # one of the completions is longer
    prompt: Sequence[int] = request.prompt
    return judge.is_close_call(prompt, due[:place], (due[place], got[place]), request.options)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else value
