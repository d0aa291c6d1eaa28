"""What a ScaledObject wants a worker to be given: read from the metadata of its trigger, with the metrics that follow.

Keys of Motet begin with `motet`; all others are KEDA's own (scalerAddress, and those of later versions) and no concern
of the scaler's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control_plane.checks import Violations, quoted
from control_plane.fleet.workload import Workload

_PREFIX = "motet"
FIELD = "scalerMetadata"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric that the number of workers may follow."""

    name: str  # as KEDA names it
    key: str  # of the metadata, with its target
    default_target: float | None  # None: used only where the metadata has the key
    highest: float  # of a target
    value: Callable[[Workload, float], float]  # over all workers, of the workload and the target
    unit: str  # of a target, for people
    per_worker: float | None = None  # what one worker is to have; None: the target


# The first one is a number of workers by itself: the part of a worker that the target leaves is room for what comes.
WANTED_WORKERS = Metric(
    *("motet-wanted-workers", "motetTargetLoad", 0.8, 1.0),
    value=Workload.needed_workers,
    unit="part of a worker's rows or KV blocks",
    per_worker=1.0,
)
METRICS = (
    WANTED_WORKERS,
    Metric(
        *("motet-requests-waiting", "motetTargetWaiting", None, math.inf),
        value=lambda workload, _target: float(workload.num_waiting),
        unit="number of requests",
    ),
    Metric(
        *("motet-rows-requested", "motetTargetRows", None, math.inf),
        value=lambda workload, _target: float(workload.num_rows_requested),
        unit="number of rows",
    ),
)


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of one ScaledObject, by the name of the metric."""

    by_name: Mapping[str, float]

    def specs(self) -> list[tuple[str, float]]:
        """Names of the metrics that count, and what each worker is to have of them."""
        found = []
        for metric in METRICS:
            if (target := self.by_name.get(metric.name)) is not None:
                found.append((metric.name, target if metric.per_worker is None else metric.per_worker))
        return found

    def value(self, name: str, workload: Workload) -> float:
        """The value of a metric of `specs` over all workers. Raises InvalidRequest for any other name."""
        for metric in METRICS:
            if metric.name == name and name in self.by_name:
                return metric.value(workload, self.by_name[name])
        violations = Violations()
        known = ", ".join(metric for metric, _ in self.specs())
        violations.add("metricName", f"{quoted(name)} is not a metric of this ScaledObject; use {known}")
        violations.raise_if_any()
        raise AssertionError("a violation is raised")


def read_targets(metadata: Mapping[str, str]) -> Targets:
    """The targets that the metadata of a trigger sets. Raises InvalidRequest for a key or a value of ours."""
    violations = Violations()
    keys = {metric.key: metric for metric in METRICS}
    targets = {metric.name: metric.default_target for metric in METRICS if metric.default_target is not None}
    for key in sorted(metadata):
        if not key.startswith(_PREFIX):
            continue
        if (metric := keys.get(key)) is None:
            violations.add(FIELD, f"{quoted(key)} is not a key that Motet has; use {', '.join(keys)}")
        elif (target := _number(metadata[key])) is None or not 0 < target <= metric.highest:
            most = f" and at most {metric.highest:g}" if metric.highest < math.inf else ""
            violations.add(FIELD, f"{key}: {quoted(metadata[key])} is not a {metric.unit}; give one above 0{most}")
        else:
            targets[metric.name] = target
    violations.raise_if_any()
    return Targets(targets)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
