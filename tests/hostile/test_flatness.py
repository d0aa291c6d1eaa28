"""Growth of memory and descriptors is seen, and neither noise nor a start is taken for it."""

from __future__ import annotations

import random

import pytest

from tests.hostile.faults.rig import ProcessUse
from tests.hostile.flatness import Sample, growth, problems

MIB = 1 << 20


def samples(sizes: list[float], descriptors: list[int] | None = None, *, pid: int = 1) -> list[Sample]:
    """One a minute."""
    counts = descriptors or [30] * len(sizes)
    return [
        Sample(60.0 * minute, ProcessUse("control plane", pid, int(size * MIB), count))
        for minute, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]


def test_growth_is_that_of_the_line_of_least_squares() -> None:
    assert growth([0.0, 1.0, 2.0], [5.0, 7.0, 9.0]) == pytest.approx(4.0)
    assert growth([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 1.0, 2.0]) == pytest.approx(0.6)
    assert growth([5.0], [1.0]) == 0.0


def test_a_process_that_settles_is_flat() -> None:
    draw = random.Random(0)
    sizes = [70 + 15 * (1 - 0.8**minute) + draw.uniform(-0.5, 0.5) for minute in range(60)]
    assert problems(samples(sizes)) == []


def test_a_leak_of_a_fifth_of_a_mebibyte_a_minute_is_seen() -> None:
    draw = random.Random(0)
    sizes = [80 + 0.2 * minute + draw.uniform(-0.5, 0.5) for minute in range(60)]
    [found] = problems(samples(sizes))
    assert "MiB more" in found


def test_descriptors_that_are_not_closed_are_seen() -> None:
    [found] = problems(samples([80.0] * 60, [30 + minute // 8 for minute in range(60)]))
    assert "descriptors more" in found


def test_a_process_that_was_started_again_is_not_judged_by_its_start() -> None:
    first, second = samples([80.0] * 40, pid=1), samples([float(10 + minute) for minute in range(60)], pid=2)[40:]
    assert problems([*first, *second]) == []
    assert problems(samples([float(minute) for minute in range(12)])) == [], "too few samples"
