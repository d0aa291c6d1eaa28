"""Whether what a process takes stays the same: a line through the samples of the last half of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.hostile.faults.rig import ProcessUse

LEAST_SAMPLES = 10  # of the last half; fewer say nothing
MAX_GROWTH_SHARE = 0.03  # of the mean, over the last half: allocators and caches settle slowly
MAX_GROWTH_BYTES = 3 << 20  # or so much, where that is more
MAX_GROWTH_DESCRIPTORS = 2.0


@dataclass(frozen=True)
class Sample:
    """One process at one time."""

    time_s: float
    use: ProcessUse


def growth(times_s: Sequence[float], values: Sequence[float]) -> float:
    """How much the line of least squares rises from the first sample to the last."""
    mean_time, mean_value = sum(times_s) / len(times_s), sum(values) / len(values)
    spread = sum((time_s - mean_time) ** 2 for time_s in times_s)
    if spread == 0:
        return 0.0
    product = sum((t - mean_time) * (v - mean_value) for t, v in zip(times_s, values, strict=True))
    return product / spread * (times_s[-1] - times_s[0])


def problems(samples: Sequence[Sample]) -> list[str]:
    """Which processes grow. Only those that lived through the last half of the time are judged."""
    if not samples:
        return []
    middle_s = (samples[0].time_s + samples[-1].time_s) / 2
    found = []
    for role, pid in sorted({(sample.use.role, sample.use.pid) for sample in samples}):
        own = [sample for sample in samples if (sample.use.role, sample.use.pid) == (role, pid)]
        late = [sample for sample in own if sample.time_s >= middle_s]
        if len(late) < LEAST_SAMPLES or own[0].time_s > middle_s or own[-1].time_s < samples[-1].time_s:
            continue
        times_s = [sample.time_s for sample in late]
        sizes = [float(sample.use.resident_bytes) for sample in late]
        limit = max(MAX_GROWTH_SHARE * sum(sizes) / len(sizes), MAX_GROWTH_BYTES)
        if (grown := growth(times_s, sizes)) > limit:
            found.append(f"{role}: {grown / 2**20:.1f} MiB more over the last half; at most {limit / 2**20:.1f}")
        counts = [float(sample.use.num_descriptors) for sample in late]
        if (grown := growth(times_s, counts)) > MAX_GROWTH_DESCRIPTORS:
            found.append(f"{role}: {grown:.1f} descriptors more over the last half; at most {MAX_GROWTH_DESCRIPTORS:g}")
    return found
